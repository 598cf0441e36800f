"""Stores the last accepted manifest, which drives a service while a newer one is refused. Pure.

accepted turn ─▶ ConfigMap <service>-state ─▶ a refused turn: scaling, drains and repair continue

The ConfigMap also holds the node classes that placed the pods. If a class is deleted, or no longer
allows the role, the operator refuses the manifest and changes no pod.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping

from pydantic import TypeAdapter

from vlm_operator import names
from vlm_operator.api import VLMService
from vlm_operator.cluster import CONFIG_MAP, Manifest
from vlm_operator.state import NodeClassState, Observed

KEY = "accepted.json"
_CLASSES = TypeAdapter(Mapping[str, NodeClassState])
_STARTUP_SECONDS = NodeClassState("").startup_seconds


@dataclasses.dataclass(frozen=True)
class AcceptedSpec:
    """A spec that the operator accepted, and the node classes that it names.

    Attributes:
        spec: the VLMService's spec as the user wrote it.
        classes: node classes by name, without their measured start-up times.
    """

    spec: Manifest
    classes: Mapping[str, NodeClassState]

    @classmethod
    def of(cls, body: Manifest, service: VLMService, observed: Observed) -> AcceptedSpec:
        """Return the spec of `body`, parsed as `service`, with the node classes that it names."""
        named = {
            variant.node_class_ref.name
            for pool in service.spec.pools.present.values()
            for variant in pool.variants
            if variant.node_class_ref is not None
        }
        classes = {
            name: dataclasses.replace(observed.node_classes[name], startup_seconds=_STARTUP_SECONDS)
            for name in sorted(named)
        }
        return cls(body["spec"], classes)

    @classmethod
    def stored(cls, observed: Observed, name: str) -> AcceptedSpec | None:
        """Return what an earlier turn stored; None if it is missing or cannot be decoded."""
        config_map = observed.child(CONFIG_MAP.kind, object_name(name))
        try:
            value = json.loads((config_map or {})["data"][KEY])
            return cls(dict(value["spec"]), _CLASSES.validate_python(value["classes"]))
        except (ValueError, KeyError, TypeError):
            return None

    def dump(self) -> str:
        value = {
            "spec": self.spec,
            "classes": _CLASSES.dump_python(dict(self.classes), mode="json"),
        }
        return json.dumps(value, sort_keys=True, separators=(",", ":"))

    def instead_of(self, body: Manifest) -> Manifest:
        return {**body, "spec": self.spec}

    def seen_in(self, observed: Observed) -> Observed:
        """Return the view with the node classes as they were accepted."""
        classes = {**observed.node_classes, **self.classes}
        return dataclasses.replace(observed, node_classes=classes)


def object_name(service: str) -> str:
    return names.child(service, "state")
