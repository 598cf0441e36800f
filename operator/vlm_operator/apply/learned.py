"""Learns what the API server adds to our manifests: defaults, and injections of admission.

A field outside of our manifest comes from the API server or from another writer. A dry run of the
manifest under an unused name returns only what the API server adds. The operator sends one only if
an object has unknown fields, so an idle operator sends none.

Some defaults copy a field of ours: `serviceAccount` is that of `serviceAccountName`. So an answer
is stored with a mark instead of the service's name, and serves all services with such a manifest.
"""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import secrets
from collections.abc import Sequence
from typing import Any

from vlm_operator import names
from vlm_operator.cluster import Cluster, Manifest
from vlm_operator.errors import ClusterError, NamespaceEndsError
from vlm_operator.metrics import UNLEARNED

logger = logging.getLogger(__name__)

_SHAPES = 2048  # limit of shapes in memory
_ANSWERS = 4  # limit of answers per shape
_AGAIN_SECONDS = 600.0  # pause after a refused dry run
_MASK = "*"
_MARK = "\0"  # the service's name in a stored answer; no name in an API contains it
# Keys whose values differ between services and influence no default.
_MASKED = frozenset(
    ("args", "command", "data", "matchLabels", "replicas", "selector", "uid", "value")
)
_MASKED_VALUES = frozenset(("labels", "annotations"))


class Learned:
    """Answers to dry runs, by the shape of the manifest. All loops of a process share one."""

    def __init__(self) -> None:
        self._answers: dict[str, tuple[Manifest, ...]] = {}
        self._asked: dict[str, set[str]] = {}  # digests, by shape
        self._refused: dict[str, float] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    def known(self, manifest: Manifest) -> Sequence[Manifest]:
        """Return the answers to manifests of this shape; empty if there are none."""
        return self._of(manifest, shape(manifest))

    async def ask(
        self, cluster: Cluster, manifest: Manifest, digest: str, *, now: float
    ) -> Sequence[Manifest] | None:
        """Return the answers, including that to this manifest; None if the dry run is refused.

        `digest` identifies the manifest. A refused shape is not asked again for `_AGAIN_SECONDS`.

        Raises:
            UnavailableError: the API server is unreachable.
            NamespaceEndsError: the namespace is being deleted.
        """
        key = shape(manifest)
        if len(self._answers) > _SHAPES:
            self._answers.clear()
            self._asked.clear()
        async with self._locks.setdefault(key, asyncio.Lock()):
            if digest in self._asked.get(key, ()):
                return self._of(manifest, key)
            if now - self._refused.get(key, float("-inf")) < _AGAIN_SECONDS:
                return None
            try:
                answer = await cluster.apply(_trial(manifest), manager=names.MANAGER, dry_run=True)
            except NamespaceEndsError:
                raise
            except ClusterError as error:
                # status 0 is an unreachable API server, 429 a full one: a later turn asks again
                if error.status == 0 or error.status == 429:
                    raise
                kind = manifest["kind"]
                UNLEARNED.labels(kind=kind).inc()
                logger.warning("defaults unknown", extra={"kind": kind, "error": str(error)})
                self._refused[key] = now
                return None
            plain = {part: value for part, value in answer.items() if part not in _DROPPED}
            marked = _renamed(plain, _service_of(manifest), _MARK)
            self._asked.setdefault(key, set()).add(digest)
            before = [item for item in self._answers.get(key, ()) if item != marked]
            self._answers[key] = (*before, marked)[-_ANSWERS:]
            return self._of(manifest, key)

    def _of(self, manifest: Manifest, key: str) -> Sequence[Manifest]:
        service = _service_of(manifest)
        return [_renamed(answer, _MARK, service) for answer in self._answers.get(key, ())]


_DROPPED = frozenset(("apiVersion", "kind", "metadata", "status"))


def shape(manifest: Manifest) -> str:
    """Return what defaults depend on: JSON of the manifest without the service's names and values.

    Labels count by key, and the namespace counts, because admission may differ by namespace.
    """
    meta = manifest["metadata"]
    service = _service_of(manifest)
    body = {part: value for part, value in manifest.items() if part not in ("metadata", "status")}
    labels = sorted(meta.get("labels", {}))
    return json.dumps([meta.get("namespace"), labels, _masked(body, service)], sort_keys=True)


def _masked(value: Any, service: str, key: str = "") -> Any:
    if key in _MASKED:
        return _MASK
    if isinstance(value, dict):
        if key in _MASKED_VALUES:
            return dict.fromkeys(value, _MASK)
        return {name: _masked(item, service, name) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_masked(item, service) for item in value]
    if isinstance(value, str) and _names(value, service):
        return _MASK
    return value


def _service_of(manifest: Manifest) -> str:
    return str(manifest["metadata"].get("labels", {}).get(names.LABEL_SERVICE, ""))


def _names(value: str, service: str) -> bool:
    """Whether a value is the service's name, or that of a child."""
    return bool(service) and (value == service or value.startswith(f"{service}-"))


def _renamed(value: Any, old: str, new: str) -> Any:
    """Return the value with the name `new` in each value that names `old`."""
    if isinstance(value, dict):
        return {key: _renamed(item, old, new) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_renamed(item, old, new) for item in value]
    if isinstance(value, str) and _names(value, old):
        return new + value[len(old) :]
    return value


def _trial(manifest: Manifest) -> Manifest:
    trial = copy.deepcopy(manifest)
    meta = trial["metadata"]
    meta["name"] = f"triptych-dry-run-{secrets.token_hex(6)}"
    meta.pop("uid", None)
    if trial["kind"] == names.KIND_POOL:
        trial["spec"].setdefault("replicas", 0)  # required; the autoscaler owns it
    return trial
