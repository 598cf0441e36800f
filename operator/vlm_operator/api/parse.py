"""Converts a Kubernetes body to a VLMService, and fills in its defaults.

body ── parse ─▶ VLMService as written ── resolve ─▶ VLMService with every default filled in
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from vlm_operator import names
from vlm_operator.api import quantity
from vlm_operator.api.base import Model
from vlm_operator.api.enums import KvDType, ScalingMode
from vlm_operator.api.model import ModelSource
from vlm_operator.api.placement import Placement, Variant
from vlm_operator.api.pod_template import check_pod_template
from vlm_operator.api.pool import Pool
from vlm_operator.api.scaling import Scaling
from vlm_operator.api.service import VLMServiceSpec
from vlm_operator.errors import SpecError
from vlm_operator.names import Role

DEFAULT_VARIANT = Variant(name="default", placement=Placement())
_COMMIT = re.compile("[0-9a-f]{40}")
_BLOCK_SIZE_CPU = 64
_BLOCK_SIZE_ACCELERATOR = 16
_BLOCK_SIZE_KIVI4 = 32


class VLMService(Model):
    """One VLMService: its identity, its spec, and the annotation that restarts its pods."""

    name: str
    namespace: str
    uid: str
    generation: int
    spec: VLMServiceSpec
    restarted_at: str = ""


def parse(body: Mapping[str, Any]) -> VLMService:
    """Convert a Kubernetes body to a VLMService.

    The API server checked the CEL rules when the object was written, perhaps those of an older
    CustomResourceDefinition. So this function checks again what the operator's code requires.

    Raises:
        SpecError: a field is invalid; the error names its path in the manifest.
    """
    meta = body["metadata"]
    try:
        # as strict as the API server: the string "3" is not a number
        spec = VLMServiceSpec.model_validate_json(json.dumps(body.get("spec") or {}), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise SpecError(_path(first["loc"]), first["msg"]) from None
    for role, pool in spec.pools.present.items():
        _check_scaling(pool.scaling, path=f"spec.pools.{role}.scaling")
        check_pod_template(pool.pod_template, role, path=f"spec.pools.{role}.podTemplate")
        _check_disk(pool, path=f"spec.pools.{role}")
    gateway = spec.gateway.pod_template
    check_pod_template(gateway, Role.GATEWAY, path="spec.gateway.podTemplate")
    _check_cache(spec.model)
    _check_block_size(spec.model)
    _check_pruned_types(spec)
    return VLMService(
        name=meta["name"],
        namespace=meta["namespace"],
        uid=meta["uid"],
        generation=meta["generation"],
        spec=spec,
        restarted_at=(meta.get("annotations") or {}).get(names.ANNOTATION_RESTARTED_AT, ""),
    )


def resolve(service: VLMService, *, worker_image: str, gateway_image: str = "") -> VLMService:
    """Fill in every default that is not a constant; an empty `gateway_image` is the worker's."""
    spec = service.spec
    image = spec.image or worker_image
    pools = {
        role.value: pool.model_copy(
            update={"image": pool.image or image, "variants": pool.variants or [DEFAULT_VARIANT]}
        )
        for role, pool in spec.pools.present.items()
    }
    model = spec.model.model_copy(
        update={
            "served_name": spec.model.served_name or service.name,
            "block_size_tokens": spec.model.block_size_tokens or _block_size(spec),
        }
    )
    resolved = spec.model_copy(
        update={
            "image": image,
            "model": model,
            "pools": spec.pools.model_copy(update=pools),
            "gateway": spec.gateway.model_copy(
                update={"image": spec.gateway.image or spec.image or gateway_image or image}
            ),
        }
    )
    return service.model_copy(update={"spec": resolved})


def effective(service: VLMService, resolved: VLMService) -> dict[str, Any]:
    """Return the defaults that took effect, with the field names of the spec."""
    written = service.spec.model_dump(
        mode="json", by_alias=True, exclude_none=True, exclude_unset=True
    )
    missing: dict[str, Any] = _missing(resolved.spec.to_dict(), written) or {}
    return missing


def _missing(whole: Any, written: Any) -> Any:
    """Return the part of `whole` that `written` lacks; lists count as one value."""
    if not isinstance(whole, dict) or not isinstance(written, dict):
        return None
    rest = {
        key: value if key not in written else _missing(value, written[key])
        for key, value in whole.items()
    }
    return {
        key: pruned for key, value in rest.items() if (pruned := _without_empty(value)) is not None
    }


def _without_empty(value: Any) -> Any:
    """Drop empty maps and lists at every depth; return None for an empty result."""
    if isinstance(value, dict):
        rest = {
            key: pruned
            for key, item in value.items()
            if (pruned := _without_empty(item)) is not None
        }
        return rest or None
    return None if value == [] else value


def _block_size(spec: VLMServiceSpec) -> int:
    """Return the tokens per KV block: one value for all pools.

    CPU kernels prefer long blocks, GPU kernels short ones. If any prefill or decode
    variant requests an extended resource, the GPU's value applies. VisionKivi4 has one size.
    """
    if spec.model.kv_cache_dtype is KvDType.VISION_KIVI4:
        return _BLOCK_SIZE_KIVI4
    pools: tuple[Pool | None, ...] = (spec.pools.prefill, spec.pools.decode)
    variants = [variant for pool in pools if pool is not None for variant in pool.variants]
    on_accelerator = any(
        "/" in resource
        for variant in variants
        for resource in (*variant.resources.limits, *variant.resources.requests)
    )
    return _BLOCK_SIZE_ACCELERATOR if on_accelerator else _BLOCK_SIZE_CPU


def _check_block_size(model: ModelSource) -> None:
    """Workers with VisionKivi4 start with one block size only: a block shares scales (0053)."""
    is_kivi4 = model.kv_cache_dtype is KvDType.VISION_KIVI4
    if is_kivi4 and model.block_size_tokens not in (None, _BLOCK_SIZE_KIVI4):
        raise SpecError(
            "spec.model.blockSizeTokens",
            f"is {model.block_size_tokens}: with kvCacheDtype VisionKivi4, it must be "
            f"{_BLOCK_SIZE_KIVI4}; set that, or remove the field",
        )


_TWO_TYPES = (KvDType.VISION_INT8, KvDType.TEXT_INT8, KvDType.VISION_KIVI4)


def _check_pruned_types(spec: VLMServiceSpec) -> None:
    """Workers do not start if they would prune KV of two types: rows do not move between them."""
    decode = spec.pools.decode
    kv = decode.kv if decode is not None else None
    if kv is not None and kv.prune_text and spec.model.kv_cache_dtype in _TWO_TYPES:
        raise SpecError(
            "spec.pools.decode.kv.pruneText",
            f"is not for kvCacheDtype {spec.model.kv_cache_dtype.value}: remove one of them",
        )


def _check_cache(model: ModelSource) -> None:
    if model.cache is None:
        if model.uri.startswith("s3://"):
            raise SpecError("spec.model.cache", "is required for s3:// models")
        return
    if not model.uri.startswith(("hf://", "s3://")):
        raise SpecError("spec.model.cache", "is only for hf:// and s3:// models: remove it")
    if model.uri.startswith("hf://") and _COMMIT.fullmatch(model.revision or "") is None:
        raise SpecError("spec.model.revision", "must be a commit of 40 hexadecimal digits")
    check_pod_template(model.cache.pod_template, None, path="spec.model.cache.podTemplate")


def _check_disk(pool: Pool, *, path: str) -> None:
    """The kubelet evicts a pod that exceeds its own limit, however large its emptyDir may be."""
    if pool.encoder_cache is None or pool.encoder_cache.disk is None:
        return
    size = pool.encoder_cache.disk.size
    for index, variant in enumerate(pool.variants):
        limit = variant.resources.limits.get("ephemeral-storage")
        if limit is not None and quantity.parse(limit) < quantity.parse(size):
            raise SpecError(
                f"{path}.variants[{index}].resources.limits.ephemeral-storage",
                f"is {limit}, less than encoderCache.disk.size, {size}: a pod would be evicted; "
                f"raise it to at least {size}, or remove it",
            )


def _check_scaling(scaling: Scaling, *, path: str) -> None:
    if scaling.mode is ScalingMode.MANUAL:
        if scaling.replicas is None:
            raise SpecError(f"{path}.replicas", "is required with mode Manual")
        return
    if scaling.min_replicas is None or scaling.max_replicas is None:
        raise SpecError(path, f"mode {scaling.mode} needs minReplicas and maxReplicas")
    if scaling.min_replicas > scaling.max_replicas:
        raise SpecError(
            f"{path}.minReplicas",
            f"minReplicas ({scaling.min_replicas}) is greater than maxReplicas "
            f"({scaling.max_replicas})",
        )


def _path(location: tuple[int | str, ...]) -> str:
    """Convert a location of pydantic to a path: spec.pools.decode.variants[0].name."""
    return "spec" + "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}" for part in location
    )
