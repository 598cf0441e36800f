"""Decides whether a live object equals the applied manifest, so that an idle loop writes nothing.

Each object has the digest of its manifest as an annotation. If the digest differs, the manifest
changed, which includes removed fields. If the digest is equal, `drift` finds changes by others.

wanted    our manifest
live      the object in the API server: wanted + its defaults + changes by other writers
learned   answers to dry runs of such a manifest: wanted + defaults and injections of admission

part                                        rule
metadata                                    contains wanted; others may add labels and annotations
status                                      not compared
all other fields                            equal wanted, except learned and assigned fields
selector, matchLabels, nodeSelector         equal wanted, even if nothing is learned
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vlm_operator import names
from vlm_operator.api import quantity
from vlm_operator.cluster import Manifest
from vlm_operator.state.deployments import ANNOTATION_APPLIED

# Merge keys of lists, tried in this order.
_KEYS = (
    "name",
    "mountPath",
    "containerPort",
    "port",
    "conditionType",
    "type",
    "uid",
    "topologyKey",
)
_SHARED = ("ownerReferences", "conditions")  # other writers add items
_IDENTITY = frozenset(("apiVersion", "kind", "metadata", "status"))
_STRICT = frozenset(("selector", "matchLabels", "nodeSelector"))  # have no defaults
_QUANTITIES = re.compile(r"\.(resources|sizeLimit|divisor)(\.|\[|$)")
# Fields that the API server, a controller or the autoscaler assigns: any value is accepted.
_ASSIGNED = {
    "Service": re.compile(
        r"\.spec\.(clusterIPs?|ipFamilies|ipFamilyPolicy|healthCheckNodePort|ports\[\d+\]\.nodePort)"
    ),
    "ServiceAccount": re.compile(r"\.(secrets|imagePullSecrets)"),
    "VLMPool": re.compile(r"\.spec\.replicas"),
}
_EMPTY: tuple[Any, ...] = ("", None, {}, [])


@dataclasses.dataclass(frozen=True)
class Drift:
    """One field whose live value differs from the manifest.

    Attributes:
        steps: keys of maps and indexes of lists, from the object's root.
        added: whether the field is in the live object and not in the manifest.
    """

    steps: tuple[str | int, ...]
    added: bool = False

    @property
    def path(self) -> str:
        """Path as a user writes it: `spec.selector.x`, `spec.ports[0].port`."""
        text = "".join(f"[{one}]" if isinstance(one, int) else f".{one}" for one in self.steps)
        return text.removeprefix(".")


def with_digest(manifest: Manifest) -> Manifest:
    """Return the manifest with its own digest as an annotation."""
    meta = manifest["metadata"]
    notes = {
        **meta.get("annotations", {}),
        ANNOTATION_APPLIED: names.digest_of(manifest, length=16),
    }
    return {**manifest, "metadata": {**meta, "annotations": notes}}


def drift(
    live: Manifest, wanted: Manifest, learned: Sequence[Manifest] | None = ()
) -> tuple[Drift, ...]:
    """Return every field whose live value differs from the manifest.

    Empty maps, lists and strings count as absent, because the API server drops them. Quantities
    are compared by value, because the API server rewrites them.

    `learned` are answers to dry runs of such manifests. If it is None, they are unknown, and added
    fields outside of selectors are accepted.
    """
    return tuple(_Walk(str(wanted.get("kind", ""))).object(live, wanted, learned))


def patch(wanted: Manifest, drifts: Sequence[Drift]) -> Manifest:
    """Return the merge patch that removes added fields: null per key, lists as a whole."""
    meta = wanted["metadata"]
    result: Manifest = {
        "apiVersion": wanted["apiVersion"],
        "kind": wanted["kind"],
        "metadata": {key: meta[key] for key in ("name", "namespace", "uid") if key in meta},
    }
    for item in drifts:
        lists = [at for at, step in enumerate(item.steps) if isinstance(step, int)]
        whole = item.steps[: lists[0]] if lists else item.steps
        node: Any = result
        source: Any = wanted
        for step in whole[:-1]:
            node, source = node.setdefault(step, {}), source.get(step, {})
        node[whole[-1]] = source.get(whole[-1])
    return result


class _Walk:
    def __init__(self, kind: str) -> None:
        self._assigned = _ASSIGNED.get(kind)

    def object(
        self, live: Manifest, wanted: Manifest, learned: Sequence[Manifest] | None
    ) -> Iterator[Drift]:
        for key in ("apiVersion", "kind", "metadata"):
            if key in wanted:
                yield from self._any(live.get(key), wanted[key], None, (key,))
        rest = {key: value for key, value in wanted.items() if key not in _IDENTITY}
        have = {key: value for key, value in live.items() if key not in _IDENTITY}
        yield from self._map(have, rest, learned, ())

    def _any(
        self, live: Any, wanted: Any, learned: Sequence[Any] | None, at: tuple[str | int, ...]
    ) -> Iterator[Drift]:
        if isinstance(wanted, Mapping):
            yield from self._map(live if isinstance(live, dict) else {}, wanted, learned, at)
        elif isinstance(wanted, list | tuple):
            yield from self._list(live if isinstance(live, list) else [], wanted, learned, at)
        elif not _same(live, wanted, Drift(at).path):
            yield Drift(at)

    def _map(
        self,
        live: Mapping[str, Any],
        wanted: Mapping[str, Any],
        learned: Sequence[Any] | None,
        at: tuple[str | int, ...],
    ) -> Iterator[Drift]:
        for key, value in wanted.items():
            yield from self._any(live.get(key), value, _below(learned, key), (*at, key))
        exact = learned is not None or bool(at and at[-1] in _STRICT)
        if not exact or at[:1] == ("metadata",):
            return
        for key in sorted(set(live) - set(wanted)):
            field = Drift((*at, key), added=True)
            if not self._expected(live[key], _below(learned or (), key) or (), field):
                yield field

    def _list(
        self,
        live: Sequence[Any],
        wanted: Sequence[Any],
        learned: Sequence[Any] | None,
        at: tuple[str | int, ...],
    ) -> Iterator[Drift]:
        if not all(isinstance(item, Mapping) for item in wanted):
            if list(live) != list(wanted):
                yield Drift(at)
            return
        if not wanted:
            if live and not any(_equal(live, answer, Drift(at).path) for answer in learned or ()):
                yield Drift(at, added=True)
            return
        key = _key(wanted)
        if key is None:
            # atomic lists without a merge key, such as rules of a policy: compared in order
            if len(live) != len(wanted):
                yield Drift(at, added=len(live) > len(wanted))
                return
            for index, (have, item) in enumerate(zip(live, wanted, strict=True)):
                yield from self._any(have, item, _below(learned, index), (*at, index))
            return
        live_items = {item.get(key): item for item in live if isinstance(item, dict)}
        extra = set(live_items) - {item[key] for item in wanted}
        if at[-1] not in _SHARED:
            answers = [_by(key, answer) for answer in learned or ()]
            injected = {name for answer in answers for name in answer}
            if any(
                name not in injected
                or not any(
                    _equal(live_items[name], one.get(name), Drift(at).path) for one in answers
                )
                for name in extra
            ):
                yield Drift(at, added=True)
        for index, item in enumerate(wanted):
            below = learned and [
                one[item[key]]
                for one in (_by(key, answer) for answer in learned)
                if item[key] in one
            ]
            yield from self._any(live_items.get(item[key]), item, below, (*at, index))

    def _expected(self, value: Any, learned: Sequence[Any], field: Drift) -> bool:
        """Whether a field outside of the manifest is empty, assigned or learned."""
        path = f".{field.path}"
        return (
            value in _EMPTY
            or (self._assigned is not None and self._assigned.fullmatch(path) is not None)
            or any(_equal(value, answer, path) for answer in learned)
        )


def _below(learned: Sequence[Any] | None, step: str | int) -> Sequence[Any] | None:
    """Return the value at `step` of each answer that has it; None if nothing is learned."""
    if learned is None:
        return None
    values = []
    for answer in learned:
        if isinstance(step, str) and isinstance(answer, Mapping) and step in answer:
            values.append(answer[step])
        if isinstance(step, int) and isinstance(answer, list) and step < len(answer):
            values.append(answer[step])
    return values


def _by(key: str, items: Any) -> Mapping[Any, Any]:
    if not isinstance(items, list):
        return {}
    return {item[key]: item for item in items if isinstance(item, dict) and key in item}


def _equal(live: Any, other: Any, path: str) -> bool:
    """Whether two values are equal to Kubernetes: empty is absent, quantities by value."""
    if isinstance(live, dict) and isinstance(other, dict):
        keys = set(live) | set(other)
        return all(_equal(live.get(key), other.get(key), f"{path}.{key}") for key in keys)
    if isinstance(live, list) and isinstance(other, list):
        return len(live) == len(other) and all(
            _equal(one, two, path) for one, two in zip(live, other, strict=True)
        )
    return _same(live, other, path)


def _same(live: Any, wanted: Any, path: str) -> bool:
    if live == wanted or (wanted in _EMPTY and live in _EMPTY):
        return True
    if _QUANTITIES.search(f".{path}") is None or not isinstance(live, str | int):
        return False
    try:
        return quantity.parse(str(live)) == quantity.parse(str(wanted))
    except ValueError:
        return False


def _key(items: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the merge key of a list: the first that all items have with different values."""
    for key in _KEYS:
        values = {str(item[key]) for item in items if item.get(key) is not None}
        if len(values) == len(items):
            return key
    return None
