"""Writes the VLMService of a plan, and reads a plan's input from one. Pure."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any, Final

from vlm_cli.plan.facts import PARTS, check_weights, type_of
from vlm_cli.plan.fields import Fields, PlanError
from vlm_cli.plan.load import Load
from vlm_cli.plan.pool import Numbers
from vlm_cli.plan.topology import Candidate
from vlm_operator import names
from vlm_operator.api.enums import KvDType
from vlm_operator.api.model import Limits
from vlm_operator.cluster import Manifest
from vlm_operator.names import Role

ANNOTATION_LOAD: Final = f"{names.GROUP}/planned-load"
"""The load that a VLMService was planned for, as JSON. Only `vlm plan` reads it."""

_NAME: Final = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_WEIGHTS_ARG: Final = "--weights="
_KV_FIELD: Final = {kind.flag: None if kind is KvDType.AUTO else kind.value for kind in KvDType}
_DTYPE_FIELD: Final = {
    None: None,
    "bfloat16": "BFloat16",
    "float16": "Float16",
    "float32": "Float32",
}


@dataclasses.dataclass(frozen=True)
class ScalesRef:
    """`model.weights.activationScales`: a ConfigMap, its key, and the sha256 of the file."""

    name: str
    key: str
    sha256: str

    def to_dict(self) -> dict[str, Any]:
        return {"configMapKeyRef": {"name": self.name, "key": self.key}, "sha256": self.sha256}


@dataclasses.dataclass(frozen=True)
class Service:
    """The identity of the planned service.

    Attributes:
        dtype: replaces that of the checkpoint; None keeps it.
        kv_dtype: as the worker's --kv-dtype: `auto` is that of the activations.
        weights: as the worker's --weights.
        scales: of the inputs of int8 layers; None without any.
    """

    name: str
    uri: str
    revision: str | None = None
    dtype: str | None = None
    kv_dtype: str = "auto"
    weights: str = "auto"
    scales: ScalesRef | None = None

    def check(self) -> None:
        """Raise PlanError for what the API server's rules refuse."""
        if not _NAME.fullmatch(self.name) or len(self.name) > names.MAX_SERVICE_NAME:
            raise PlanError(
                f"--name: {self.name!r} is no name; write at most {names.MAX_SERVICE_NAME} "
                "lower-case letters, digits and -, and a letter first"
            )
        if not self.uri.startswith(("pvc://", "hf://", "oci://")):
            forms = "pvc://CLAIM[/PATH], hf://ORG/NAME or oci://IMAGE"
            raise PlanError(f"--uri: {self.uri!r} is no {forms}")
        if self.uri.startswith("hf://") and self.revision is None:
            raise PlanError(f"--revision: is required for {self.uri}: write the commit to serve")
        has_int8 = any(type_of(part, self.weights) == "int8" for part in PARTS)
        if self.scales is not None and not ("=" in self.weights and has_int8):
            raise PlanError(
                f"--weights: is {self.weights!r}, and model.weights.activationScales needs types "
                "by part with one in int8, such as encoder=int8,merger=int8; or remove "
                "activationScales from the manifest"
            )

    def numbers(self, dtype: str, *, visual_share: float = 0.0) -> Numbers:
        """Return the number types, with `dtype` of the activations for an automatic KV dtype."""
        kv_dtype = dtype if self.kv_dtype == "auto" else self.kv_dtype
        return Numbers(
            kv_dtype, self.weights, has_scales=self.scales is not None, visual_share=visual_share
        )


def build(service: Service, load: Load, candidate: Candidate) -> Manifest:
    """Return the VLMService with the pools of `candidate`; sizes are in mode Manual."""
    model = {
        "uri": service.uri,
        "revision": service.revision,
        "dtype": _DTYPE_FIELD[service.dtype],
        "kvCacheDtype": _KV_FIELD[service.kv_dtype],
        "weights": _by_part(service),
        "limits": _limits(load),
    }
    slo = {"ttftP95Milliseconds": load.ttft_ms, "itlP95Milliseconds": load.itl_ms}
    spec: dict[str, Any] = {
        "model": _present(model),
        "pools": {role.value: _pool(role, candidate, service.weights) for role in candidate.pools},
        "slo": _present(slo),
    }
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND_SERVICE,
        "metadata": {
            "name": service.name,
            "annotations": {ANNOTATION_LOAD: json.dumps(load.to_dict())},
        },
        "spec": _present(spec),
    }


def read_input(where: str, manifest: Mapping[str, Any]) -> tuple[Service, Load]:
    """Return service and load of a manifest that `build` returned.

    Raises:
        PlanError: it has no annotation with a load, or a field has another type.
    """
    metadata = Fields(f"{where}: metadata", manifest.get("metadata") or {})
    annotations = metadata.child("annotations")
    if ANNOTATION_LOAD not in annotations:
        raise metadata.error(
            "annotations", f"has no {ANNOTATION_LOAD}: no plan wrote this manifest"
        )
    try:
        load = json.loads(annotations.text(ANNOTATION_LOAD))
    except ValueError:
        load = None
    if not isinstance(load, dict):
        raise annotations.error(ANNOTATION_LOAD, "is no JSON object")
    spec = Fields(f"{where}: spec", manifest.get("spec") or {})
    model, pools = spec.child("model"), spec.child("pools")
    service = Service(
        name=metadata.text("name"),
        uri=model.text("uri"),
        revision=model.text("revision") if "revision" in model else None,
        dtype=_chosen(_DTYPE_FIELD, model, "dtype"),
        kv_dtype=_chosen(_KV_FIELD, model, "kvCacheDtype") or "auto",
        weights=_weights(model, pools),
        scales=_scales(model.child("weights")),
    )
    return service, Load.from_dict(f"{where}: {ANNOTATION_LOAD}", load)


def slug(text: str, *, longest: int) -> str:
    """Return `text` as a DNS label of at most `longest` characters."""
    label = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return label[:longest].strip("-")


def _limits(load: Load) -> dict[str, int]:
    """Return the limits that the defaults do not allow."""
    limits, default = {}, Limits()
    if len(load.images) > default.images_per_request:
        limits["imagesPerRequest"] = len(load.images)
    pixels = max((width * height for width, height in load.images), default=0)
    if pixels > default.pixels_per_image:
        limits["pixelsPerImage"] = pixels
    return limits


def _pool(role: Role, candidate: Candidate, weights: str) -> dict[str, Any]:
    plan, state = candidate.pools[role]
    variant = slug(plan.node.name, longest=names.MAX_VARIANT_NAME)
    pool: dict[str, Any] = {
        "scaling": {"mode": "Manual", "replicas": state.replicas},
        "variants": [{"name": variant, "nodeClassRef": {"name": plan.node.name}}],
    }
    if plan.kv_bytes:
        pool["kv"] = {"memory": f"{plan.kv_bytes >> 20}Mi"}
    if weights != "auto" and "=" not in weights:
        pool["engine"] = {"extraArgs": [f"{_WEIGHTS_ARG}{weights}"]}
    return pool


def _by_part(service: Service) -> dict[str, Any] | None:
    """Return `model.weights` for types that name parts."""
    if "=" not in service.weights:
        return None
    types = {part: type_of(part, service.weights) for part in PARTS}
    found: dict[str, Any] = {part: kind.title() for part, kind in types.items() if kind != "auto"}
    if service.scales is not None:
        found["activationScales"] = service.scales.to_dict()
    return found


def _weights(model: Fields, pools: Fields) -> str:
    """Return --weights: that of a pool, which replaces the model's in its pods, or the model's."""
    for role in Role:
        for argument in pools.child(role.value).child("engine").items("extraArgs"):
            if str(argument).startswith(_WEIGHTS_ARG):
                return str(argument).removeprefix(_WEIGHTS_ARG)
    by_part = model.child("weights")
    types = [f"{part}={by_part.text(part).lower()}" for part in PARTS if part in by_part]
    check_weights(",".join(types) or "auto")
    return ",".join(types) or "auto"


def _scales(weights: Fields) -> ScalesRef | None:
    if "activationScales" not in weights:
        return None
    scales = weights.child("activationScales")
    key = scales.child("configMapKeyRef")
    return ScalesRef(key.text("name"), key.text("key"), scales.text("sha256"))


def _chosen(choices: Mapping[Any, str | None], fields: Fields, name: str) -> Any:
    """Return the key of a field's value; None if it is absent."""
    if name not in fields:
        return None
    value = fields.text(name)
    for key, written in choices.items():
        if written == value:
            return key
    if value == "Auto":
        return None
    raise fields.error(name, f"is {value!r}; planned are {', '.join(map(str, choices))}")


def _present(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are neither None nor empty."""
    return {name: value for name, value in values.items() if value not in (None, {})}
