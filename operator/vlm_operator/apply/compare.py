"""Is the live object still what we applied? Decided here, so that an idle loop writes nothing.

A digest of the manifest stands in an annotation: another digest means that we want something
else now, fields that we dropped included. With the same digest, `difference` finds what somebody
changed, by asking whether the live object contains the manifest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from vlm_operator.api import quantity
from vlm_operator.cluster import Manifest
from vlm_operator.state import ANNOTATION_APPLIED

# What tells the items of a list apart, tried in this order.
_SHARED = (".ownerReferences", ".conditions")  # others have their items there too
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


def stamped(manifest: Manifest) -> Manifest:
    """Return the manifest with its own digest as an annotation."""
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    meta = manifest["metadata"]
    notes = {**meta.get("annotations", {}), ANNOTATION_APPLIED: digest}
    return {**manifest, "metadata": {**meta, "annotations": notes}}


def difference(live: Any, wanted: Any, path: str = "") -> str | None:
    """Return the path of the first field that the live object has not as wanted; None if none.

    Empty maps, lists and strings count as absent, quantities by their value: the API server
    drops the former and rewrites the latter. Keys that others add to maps are theirs; items that
    they add to our lists are not.
    """
    if isinstance(wanted, dict):
        live = live if isinstance(live, dict) else {}
        for key, value in wanted.items():
            found = difference(live.get(key), value, f"{path}.{key}")
            if found is not None:
                return found
        return None
    if isinstance(wanted, list | tuple):
        return _list_difference(live if isinstance(live, list) else [], wanted, path)
    if wanted in ("", None) and live in ("", None):
        return None
    return None if live == wanted or _same_quantity(live, wanted) else path


def _list_difference(live: Sequence[Any], wanted: Sequence[Any], path: str) -> str | None:
    if not all(isinstance(item, dict) for item in wanted):
        return None if list(live) == list(wanted) else path
    key = next((name for name in _KEYS if _tells_apart(wanted, name)), None)
    if key is None:
        # rules of a policy, tolerations: atomic lists, in our order
        if len(live) != len(wanted):
            return path
        pairs = list(zip(live, wanted, strict=True))
    else:
        known = {item.get(key): item for item in live if isinstance(item, dict)}
        if set(known) - {item[key] for item in wanted} and not path.endswith(_SHARED):
            return path
        pairs = [(known.get(item[key]), item) for item in wanted]
    for index, (have, item) in enumerate(pairs):
        found = difference(have, item, f"{path}[{index}]")
        if found is not None:
            return found
    return None


def _tells_apart(items: Sequence[Mapping[str, Any]], key: str) -> bool:
    values = [item.get(key) for item in items]
    return None not in values and len({str(value) for value in values}) == len(values)


def _same_quantity(live: Any, wanted: Any) -> bool:
    if not isinstance(live, str | int) or not isinstance(wanted, str | int):
        return False
    try:
        return quantity.parse(str(live)) == quantity.parse(str(wanted))
    except ValueError:
        return False
