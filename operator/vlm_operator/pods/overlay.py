"""Merges a user's podTemplate into a pod template, by the rules of a strategic merge patch. Pure.

objects    merged field by field; null removes a field
lists      of `LIST_KEYS`: items with an equal key are merged, others appended; else replaced

`api.pod_template.check_pod_template` has refused changes of what the operator sets.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vlm_operator.api.pod_template import LIST_KEYS, PodTemplate
from vlm_operator.pods.parts import Part


def with_overlay(template: Part, overlay: PodTemplate, *, spread: Mapping[str, str]) -> Part:
    """Return the pod template with the user's changes.

    Args:
        template: the operator's.
        overlay: the user's changes.
        spread: labels that select the pods. A topology spread constraint without a selector gets
            them.
    """
    if overlay.is_empty:
        return template
    metadata = {**template["metadata"]}
    metadata["labels"] = {**overlay.metadata.labels, **metadata["labels"]}
    if overlay.metadata.annotations:
        metadata["annotations"] = dict(overlay.metadata.annotations)
    spec = _merged(template["spec"], overlay.spec)
    if constraints := spec.get("topologySpreadConstraints"):
        selected = {"labelSelector": {"matchLabels": dict(spread)}}
        spec["topologySpreadConstraints"] = [{**selected, **item} for item in constraints]
    return {"metadata": metadata, "spec": spec}


def _merged(base: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        elif isinstance(value, dict):
            present = base.get(name)
            merged[name] = _merged(present if isinstance(present, dict) else {}, value)
        elif isinstance(value, list) and name in LIST_KEYS:
            merged[name] = _merged_list(base.get(name) or [], value, LIST_KEYS[name])
        else:
            merged[name] = value
    return merged


def _merged_list(base: list[Part], patch: list[Part], key: str) -> list[Part]:
    changes = {item[key]: item for item in patch}
    kept = [_merged(item, changes.pop(item[key], {})) for item in base]
    return [*kept, *(_merged({}, item) for item in changes.values())]
