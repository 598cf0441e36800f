{{- /* Whether objects of the Prometheus operator are rendered; takes a dict of root and value: true, false, auto. */ -}}
{{- define "triptych.monitored" -}}
{{- if or (eq (toString .value) "true") (and (eq (toString .value) "auto") (.root.Capabilities.APIVersions.Has "monitoring.coreos.com/v1")) -}}
true
{{- end -}}
{{- end -}}

{{- /* Metadata of an object of monitoring; takes a dict of root, name and labels. */ -}}
{{- define "triptych.monitoringMetadata" -}}
name: {{ .name }}
namespace: {{ default .root.Release.Namespace .root.Values.monitoring.namespace }}
labels:
  {{- merge (dict) .labels .root.Values.monitoring.labels (include "triptych.labels" .root | fromYaml) | toYaml | nindent 2 }}
{{- with merge (dict) .annotations .root.Values.monitoring.annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
