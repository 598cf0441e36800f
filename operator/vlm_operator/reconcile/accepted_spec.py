"""The last manifest that was accepted: it keeps driving a service while a newer one is refused.

accepted turn ─▶ ConfigMap <service>-state ─▶ a refused turn: scaling, drains and repair go on

The node classes that it was placed by are part of it: deleting a class, or changing one so that it
no longer takes the role, refuses the manifest and changes no pod. Pure.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping

from vlm_operator import names
from vlm_operator.api import VLMService
from vlm_operator.autoscale.codec import decode, encode
from vlm_operator.cluster import CONFIG_MAP, Manifest
from vlm_operator.state import NodeClassState, Observed

KEY = "accepted.json"
_STARTUP_SECONDS = NodeClassState("").startup_seconds


@dataclasses.dataclass(frozen=True)
class AcceptedSpec:
    """A spec that the operator could act on, and the node classes that it named.

    Attributes:
        spec: of the VLMService, as its user wrote it.
        classes: by name; what was measured of them is left out.
    """

    spec: Manifest
    classes: Mapping[str, NodeClassState]

    @classmethod
    def of(cls, body: Manifest, service: VLMService, observed: Observed) -> AcceptedSpec:
        """What `body`, parsed as `service`, asks for now."""
        named = {
            variant.node_class_ref.name
            for pool in service.spec.pools.present.values()
            for variant in pool.variants
            if variant.node_class_ref is not None
        }
        found = {
            name: dataclasses.replace(observed.node_classes[name], startup_seconds=_STARTUP_SECONDS)
            for name in sorted(named)
        }
        return cls(body["spec"], found)

    @classmethod
    def stored(cls, observed: Observed, name: str) -> AcceptedSpec | None:
        """What an earlier turn kept; None if there is nothing that this program can read."""
        found = observed.child(CONFIG_MAP.kind, object_name(name))
        try:
            value = json.loads((found or {})["data"][KEY])
            classes: Mapping[str, NodeClassState] = decode(
                Mapping[str, NodeClassState], value["classes"]
            )
            return cls(dict(value["spec"]), classes)
        except (ValueError, KeyError, TypeError):
            return None

    def dump(self) -> str:
        """One line of JSON."""
        value = {"spec": self.spec, "classes": encode(self.classes)}
        return json.dumps(value, sort_keys=True, separators=(",", ":"))

    def instead_of(self, body: Manifest) -> Manifest:
        """The service with this spec in the place of its own."""
        return {**body, "spec": self.spec}

    def seen_in(self, observed: Observed) -> Observed:
        """The view with the node classes as they were accepted."""
        classes = {**observed.node_classes, **self.classes}
        return dataclasses.replace(observed, node_classes=classes)


def object_name(service: str) -> str:
    """The ConfigMap in which it is kept."""
    return names.child(service, "state")
