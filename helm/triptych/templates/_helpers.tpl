{{- define "triptych.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-operator" (default .Release.Name .Values.nameOverride) | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- /* Names of what is no namespace's: two releases of one name in two namespaces stay apart. */ -}}
{{- define "triptych.clusterName" -}}
{{- printf "%s:%s" .Release.Namespace (include "triptych.fullname" .) -}}
{{- end -}}

{{- define "triptych.selector" -}}
app.kubernetes.io/name: triptych-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "triptych.labels" -}}
{{ include "triptych.chartLabels" . }}
{{- with .Values.commonLabels }}
{{ include "triptych.ownLabels" (dict "of" "commonLabels" "labels" .) }}
{{- end }}
{{- end -}}

{{- /* A label of podLabels wins over the same of commonLabels. */ -}}
{{- define "triptych.podLabels" -}}
{{ include "triptych.chartLabels" . }}
{{- $common := include "triptych.ownLabels" (dict "of" "commonLabels" "labels" .Values.commonLabels) | fromYaml }}
{{- $pods := include "triptych.ownLabels" (dict "of" "podLabels" "labels" .Values.podLabels) | fromYaml }}
{{- with merge $pods $common }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- /* The user's labels; those that the chart sets itself would be there twice. */ -}}
{{- define "triptych.ownLabels" -}}
{{- range $key, $value := .labels }}
{{- if or (hasPrefix "app.kubernetes.io/" $key) (eq "helm.sh/chart" $key) }}
{{- fail (printf "%s: the chart sets %s itself: remove it" $.of $key) }}
{{- end }}
{{- end }}
{{- toYaml .labels }}
{{- end -}}

{{- define "triptych.chartLabels" -}}
{{ include "triptych.selector" . }}
app.kubernetes.io/component: operator
app.kubernetes.io/part-of: triptych
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "triptych.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "triptych.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- required "serviceAccount.name is required with serviceAccount.create=false" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- /* registry/repository:tag, or @digest; takes a dict of image and chart */ -}}
{{- define "triptych.image" -}}
{{- with .image -}}
{{- if .registry }}{{ .registry }}/{{ end }}{{ .repository -}}
{{- if .digest }}@{{ .digest }}{{ else }}:{{ default $.chart.AppVersion .tag }}{{ end -}}
{{- end -}}
{{- end -}}

{{- /* The gateway's image: registry and tag are the worker's if it has none */ -}}
{{- define "triptych.gatewayImage" -}}
{{- $worker := .Values.workers.image -}}
{{- $image := mergeOverwrite (deepCopy .Values.gateways.image) (dict
      "registry" (default $worker.registry .Values.gateways.image.registry)
      "tag" (default $worker.tag .Values.gateways.image.tag)) -}}
{{- include "triptych.image" (dict "image" $image "chart" .Chart) -}}
{{- end -}}

{{- /* Rights of the operator in the namespaces that it watches. */ -}}
{{- define "triptych.rules" -}}
# what users write: read, our finalizer, status
- apiGroups: [triptych.dev]
  resources: [vlmservices]
  verbs: [get, list, watch, patch]
- apiGroups: [triptych.dev]
  resources: [vlmservices/status, vlmpools/status]
  verbs: [patch]
# OwnerReferencesPermissionEnforcement asks for this where it is on
- apiGroups: [triptych.dev]
  resources: [vlmservices/finalizers]
  verbs: [update]
# children: created and changed by server-side apply, pruned by name
- apiGroups: [triptych.dev]
  resources: [vlmpools]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [services, configmaps, serviceaccounts]
  verbs: [get, list, watch, create, patch, delete]
# model.cache: a claim and the Job that fills it
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
# each service has a Role and a RoleBinding that let its gateways watch pods
- apiGroups: [rbac.authorization.k8s.io]
  resources: [roles, rolebindings]
  verbs: [get, list, watch, create, patch, delete]
# pods: which one goes first (deletion cost), and the accepting gate; `get` only to grant it
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, patch]
- apiGroups: [""]
  resources: [pods/status]
  verbs: [patch]
- apiGroups: [""]
  resources: [events]
  verbs: [get, create, patch]
{{- if has "OperatorCA" .Values.identity.issuers }}
# certificates of pods: written and compared by patch, never read; the admission policy bounds it
- apiGroups: [""]
  resources: [secrets]
  verbs: [create, patch]
{{- end }}
{{- if has "CertManager" .Values.identity.issuers }}
- apiGroups: [cert-manager.io]
  resources: [certificates]
  verbs: [create, patch]
{{- end }}
{{- end -}}
