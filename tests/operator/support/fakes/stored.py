"""One object in the fake API server: what it holds, how it reads, what of it is refused."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from support.fakes.fields import Fields, unflatten
from vlm_operator.cluster import Kind, Manifest
from vlm_operator.errors import ClusterError


@dataclasses.dataclass(eq=False)
class Stored:
    """Its fields and its identity. `FakeCluster` is the only writer."""

    fields: Fields
    meta: dict[str, Any]
    written: str = ""  # the manifest as JSON, until something changes

    def trial(self) -> Stored:
        """Return a copy to try a change on."""
        return Stored(self.fields.copy(), dict(self.meta))

    def render(self, kind: Kind) -> Manifest:
        """Return it as the API server sends it; the caller's own to change."""
        if not self.written:
            body = self._body()
            meta = {**body.pop("metadata", {}), **self.meta}
            if not meta["finalizers"]:
                del meta["finalizers"]
            meta["managedFields"] = self.fields.managed()
            head = {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": meta}
            self.written = json.dumps({**head, **body})
        found: Manifest = json.loads(self.written)
        return found

    def validate(self, kind: Kind, before: Stored | None = None) -> None:
        """Raise the 422 that the real one answers to what we could get wrong."""
        body = self._body()
        spec = body.get("spec", {})
        problem = ""
        if kind.kind == "VLMPool" and "replicas" not in spec:
            problem = "spec.replicas: Required value"
        if kind.kind == "Pod" and not spec.get("containers"):
            problem = "spec.containers: Required value"
        if kind.kind == "Deployment":
            wanted = spec.get("selector", {}).get("matchLabels", {})
            have = spec.get("template", {}).get("metadata", {}).get("labels", {})
            if any(have.get(key) != value for key, value in wanted.items()):
                problem = "spec.template.metadata.labels: `selector` does not match"
        if before is not None and before._body().get("roleRef") != body.get("roleRef"):
            problem = "roleRef: Invalid value: cannot change roleRef"
        if problem:
            raise ClusterError(422, "Invalid", f"{kind.kind} is invalid: {problem}")

    def _body(self) -> dict[str, Any]:
        found: dict[str, Any] = unflatten(self.fields.flat) if self.fields.flat else {}
        return found
