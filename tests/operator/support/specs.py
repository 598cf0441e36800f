"""VLMServices of every shape, drawn from the API's own types; and the same with one field broken.

    VLMServiceSpec ─ JSON schema ─▶ drawn(right=False)   any spec that the types allow
                                 └▶ drawn(right=True)    one that keeps the rules, too
                                        └─ broken ─▶     … with one value that its type refuses

Rules (CEL) speak of several fields at once: `_KEPT` mends what was drawn where a model has some.
Everything else follows from the types, so that a new field is drawn as soon as it exists.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hypothesis import strategies as st

from vlm_operator.api import VLMServiceSpec

Spec = dict[str, Any]
Schema = Mapping[str, Any]

_SCHEMA: Schema = VLMServiceSpec.model_json_schema(by_alias=True)
_QUANTITIES = ("1", "2", "500m", "0.5", "1Gi", "24.50", "1e3", 3)
_BYTES = tuple(item for item in _QUANTITIES if item != "500m")
_COUNTS = ("1", 2, "25%", "100%")
_NAMES = ("a", "b-1", "shapes")
_TEXT = ("", "x", "a b", "ü", "--max-num-seqs=8", "http://collector.b-1:4318")
_FEW = 2  # entries of a drawn list or map: more of the same shows nothing
NODE_CLASSES = _NAMES[:2]  # of the names that a spec may refer to, those worth making


@functools.cache
def drawn(*, right: bool) -> st.SearchStrategy[Spec]:
    """Specs that the types allow; with `right`, those that keep the rules as well."""
    return _of(_SCHEMA, right)


@st.composite
def broken(draw: st.DrawFn, *, twice: bool = True) -> tuple[Spec, str]:
    """A spec that is right but for one field, and the path of that field.

    With `twice`, the wrong value may be two items of a list with one key; no cluster stores those.
    """
    spec = copy.deepcopy(draw(drawn(right=True)))
    places = [
        found for found in _places(spec, _SCHEMA, "spec") if twice or isinstance(found[1], str)
    ]
    owner, key, path, wrong = places[draw(st.integers(0, len(places) - 1))]
    value = wrong[draw(st.integers(0, len(wrong) - 1))]
    if value is _MISSING:
        del owner[key]
    else:
        owner[key] = value
    return spec, path


def _of(schema: Schema, right: bool) -> st.SearchStrategy[Any]:
    schema = _plain(schema)
    kind = schema.get("type")
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if schema.get("x-kubernetes-int-or-string"):
        whole = "x-kubernetes-validations" in schema
        quantities = _BYTES if right and whole else _QUANTITIES
        return st.sampled_from(_COUNTS if "%" in schema["pattern"] else quantities)
    if schema.get("x-kubernetes-preserve-unknown-fields"):
        return st.sampled_from([{}, {"nodeAffinity": {}}])
    if kind == "object":
        return _object(schema, right) if "properties" in schema else _map(schema, right)
    if kind == "array":
        return _array(schema, right)
    if kind == "integer":
        low, high = schema.get("minimum", 0), schema.get("maximum", 2**31)
        return st.sampled_from(sorted({low, low + 1, min(low + 9, high), high}))
    return st.booleans() if kind == "boolean" else st.sampled_from(_texts(schema))


def _object(schema: Schema, right: bool) -> st.SearchStrategy[Spec]:
    required = schema.get("required", [])
    fields = {key: _of(value, right) for key, value in schema["properties"].items()}
    found = st.fixed_dictionaries(
        {key: fields[key] for key in required},
        optional={key: value for key, value in fields.items() if key not in required},
    )
    keep = _KEPT.get(schema["title"])
    return found.map(keep) if right and keep is not None else found


def _map(schema: Schema, right: bool) -> st.SearchStrategy[Spec]:
    names = st.sampled_from(("cpu", "memory", "nvidia.com/gpu"))
    return st.dictionaries(names, _of(schema["additionalProperties"], right), max_size=_FEW)


def _array(schema: Schema, right: bool) -> st.SearchStrategy[list[Any]]:
    keys = schema.get("x-kubernetes-list-map-keys")
    return st.lists(
        _of(schema["items"], right),
        min_size=schema.get("minItems", 0),
        max_size=min(_FEW, schema["maxItems"]),
        unique_by=(lambda item: item.get(keys[0])) if keys else None,
    )


def _texts(schema: Schema) -> list[str]:
    pattern = re.compile(schema.get("pattern", ""))
    least, most = schema.get("minLength", 0), schema.get("maxLength", 64)
    return [
        text
        for text in ("/scratch", "Issuer", "10.20.0.0/16", "a" * 64, *_NAMES, *_TEXT)
        if pattern.search(text) and least <= len(text) <= most
    ]


def _plain(schema: Schema) -> Schema:
    """Follow references, and leave out that an optional field may be null."""
    while True:
        if "$ref" in schema:
            rest = {key: value for key, value in schema.items() if key != "$ref"}
            schema = {**_SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]], **rest}
        elif "anyOf" in schema:
            (schema,) = (item for item in schema["anyOf"] if item.get("type") != "null")
        else:
            return schema


# how the rules are kept, by model


def _one_of(spec: Spec, *keys: str) -> Spec:
    """Of several fields that exclude each other, the first."""
    first, *others = [key for key in keys if key in spec] or [""]
    return {key: value for key, value in spec.items() if key not in others or key == first}


def _without(*keys: str) -> Callable[[Spec], Spec]:
    return lambda spec: {key: value for key, value in spec.items() if key not in keys}


def _scaling(spec: Spec) -> Spec:
    if spec["mode"] == "Manual":
        return {"mode": "Manual", "replicas": spec.get("replicas", 1)}
    low = max(1, spec.get("minReplicas", 1))
    bounds = {"minReplicas": low, "maxReplicas": max(low, spec.get("maxReplicas", 1))}
    return {**_without("replicas", "scaleToZero")(spec), **bounds}


def _variant(spec: Spec) -> Spec:
    spec = _without("maxReplicas")(_one_of(spec, "nodeClassRef", "placement"))
    return spec if "nodeClassRef" in spec else {"placement": {}, **spec}


def _source(spec: Spec) -> Spec:
    key = {"name": "a", "key": "k"}
    return _one_of(spec, *spec) if spec else {"secretKeyRef": key}


def _resources(spec: Spec) -> Spec:
    """Devices are whole and stand under limits, memory is whole bytes; what is asked for twice is
    asked for alike.
    """
    spec = {
        key: {
            name: "1e9" if name == "memory" and value not in _BYTES else value
            for name, value in found.items()
        }
        for key, found in spec.items()
    }
    limits = {name: 1 if "/" in name else value for name, value in spec.get("limits", {}).items()}
    requests = {
        name: limits.get(name, value)
        for name, value in spec.get("requests", {}).items()
        if "/" not in name
    }
    return {**spec, **{k: v for k, v in (("limits", limits), ("requests", requests)) if k in spec}}


def _toleration(spec: Spec) -> Spec:
    spec = _without("value")(spec) if spec.get("operator") == "Exists" else spec
    if "tolerationSeconds" in spec:
        spec = {**spec, "effect": "NoExecute"}
    value = {key: "x" for key in ("key", "value") if key in spec}
    return {**spec, **value} if spec.get("operator") == "Exists" else {**spec, **value, "key": "x"}


def _model(spec: Spec) -> Spec:
    remote = "credentialsSecretRef" in spec or "revision" in spec or "cache" in spec
    if not remote:
        return {**spec, "uri": "pvc://shapes"}
    if "cache" in spec:
        spec = {**spec, "revision": "8f4592b9a2fd38cf9d2e9f6ae45a0a4cdd5a4d3f"}
    return {**spec, "uri": "hf://org/name", "revision": spec.get("revision", "abc")}


def _pools(spec: Spec) -> Spec:
    found = {role: _without("encodeInline", "maxLentRequests")(item) for role, item in spec.items()}
    if "encoder" in found:
        lent = spec["encoder"].get("maxLentRequests", 0)
        found["encoder"] = _without("kv")(found["encoder"])
        if lent:
            found["encoder"] |= {"maxLentRequests": lent, "kv": {"memoryPercent": 30}}
    if len(found) > 1:  # neither a prefill pool nor an encoder that lends goes with it
        found = {
            role: {**item, "kv": _without("pruneText")(item["kv"])} if "kv" in item else item
            for role, item in found.items()
        }
    encoding = next(role for role in ("encoder", "prefill", "decode") if role in found)
    return {
        role: item if role == encoding else _without("encoderCache")(item)
        for role, item in found.items()
    }


def _service(spec: Spec) -> Spec:
    roles, pools = set(spec["pools"]), spec["pools"].values()
    found = _without("admission")(spec)
    if any(item["scaling"]["mode"] == "Auto" for item in pools):
        found["slo"] = {"ttftP95Milliseconds": 1000, **found.get("slo", {})}
    if any(item["scaling"]["mode"] != "Auto" for item in pools):
        found.pop("scaleToZero", None)
    found["poolRatios"] = [
        item
        for item in found.get("poolRatios", [])
        if {item["numerator"], item["denominator"]} <= roles
        and item["numerator"] != item["denominator"]
        and item.get("minPercent", 0) <= item.get("maxPercent", 10_000)
    ]
    return found


def _identity(spec: Spec) -> Spec:
    if spec.get("mode") == "CertManager":
        return {**spec, "issuerRef": spec.get("issuerRef") or {"name": "a"}}
    return {key: value for key, value in spec.items() if key != "issuerRef"}


def _visual(spec: Spec) -> Spec:
    if "maxPixels" in spec.get("low", {}):
        return spec
    return {key: value for key, value in spec.items() if key != "brownOutSeconds"}


_KEPT: Mapping[str, Callable[[Spec], Spec]] = {
    "Autoscaling": lambda spec: {"fallbackReplicas": {}, **spec},
    "EmbeddingDisk": lambda spec: {**spec, "size": "2Gi"},
    "EnvSource": _source,
    "EnvVar": lambda spec: _one_of(spec, "value", "valueFrom"),
    "Gateway": lambda spec: (
        {**spec, "auth": {"secretRef": {"name": "keys"}}} if "tenants" in spec else spec
    ),
    "GatewayScaling": lambda spec: {
        **spec,
        "maxReplicas": max(spec["minReplicas"], spec["maxReplicas"]),
    },
    "Identity": _identity,
    "KvCache": lambda spec: _one_of(
        {**spec, "memory": "1e9"} if "memory" in spec else spec, "memory", "memoryPercent"
    ),
    "Limits": lambda spec: {**_without("videoSeconds")(spec), "imagesPerRequest": 4},
    "ModelSource": _model,
    "Parallelism": _without("tensor"),
    "PoolRollout": lambda spec: {**spec, "maxSurge": 1},
    "Pools": _pools,
    "ResourceRequirements": _resources,
    "Rollout": lambda spec: {"progressDeadlineSeconds": 600, **spec},
    "Scaling": _scaling,
    "Toleration": _toleration,
    "Transfer": lambda spec: {},
    "VLMServiceSpec": _service,
    "Variant": _variant,
    "Visual": _visual,
    "VisualTier": lambda spec: (
        {**spec, "keepPercent": 25} if spec.get("method") == "Pool" else spec
    ),
    "Weights": lambda spec: {**spec, **({"head": "Int8"} if spec.get("activationScales") else {})},
}


# what a field's type refuses

_MISSING = object()
Place = tuple[Any, Any, str, list[Any]]  # owner, key, path, wrong values


def _places(value: Any, schema: Schema, path: str) -> Iterator[Place]:
    """Every field that the spec sets, with values that are wrong there."""
    schema = _plain(schema)
    if isinstance(value, list):
        for index in range(len(value)):
            yield from _places(value[index], schema["items"], f"{path}[{index}]")
        if value and "x-kubernetes-list-map-keys" in schema:
            yield value, slice(None), path, [[value[0], value[0]]]
    elif isinstance(value, dict) and "properties" in schema:
        yield value, "surplus", f"{path}.surplus", [1]
        for key, item in value.items():
            below = schema["properties"][key]
            wrong = _wrong(_plain(below))
            if key in schema.get("required", []):
                wrong = [*wrong, _MISSING]
            yield value, key, f"{path}.{key}", wrong
            yield from _places(item, below, f"{path}.{key}")


def _wrong(schema: Schema) -> list[Any]:
    if "enum" in schema:
        return ["Nonsense"]
    if schema.get("x-kubernetes-int-or-string"):
        return ["much", "1.5K", -1, True]
    match schema["type"]:
        case "integer":
            least = schema.get("minimum", -(2**62)) - 1
            return ["1", True, least, *([schema["maximum"] + 1] if "maximum" in schema else [])]
        case "boolean":
            return ["true", 1]
        case "string":
            return [1, "x" * (schema["maxLength"] + 1)]
        case kind:
            return [1, "x", [] if kind == "object" else {}]
