"""The simulated hardware: cost curves, KV memory, node types, noise; and its YAML file.

The file has the fields of `Hardware`. Curves are mappings:

encode: {fixed: 0.02, linear: 9.0e-5, square: 4.0e-9}
kv_tokens: 120000
node_types: {encoder: {small: {startup_seconds: 40, nodes: 4}}}
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from vlm_operator.names import POOL_ROLES, Role

_POSITIVE = {"kv_tokens", "chunk_tokens", "prompts_per_step", "encode_items", "itl_base"}


class HardwareError(ValueError):
    """A field of the file is invalid; the message names it and the fix."""


@dataclasses.dataclass(frozen=True)
class Curve:
    """Seconds at speed 1: fixed + linear·units + square·squares (as in `state.WorkCounters`)."""

    fixed: float
    linear: float
    square: float = 0.0

    def seconds(self, units: float, squares: float) -> float:
        """Return the duration of one call."""
        return self.fixed + self.linear * units + self.square * squares


@dataclasses.dataclass(frozen=True)
class NodeType:
    """Properties of the nodes of one variant of one role; the policy does not contain them.

    Attributes:
        nodes: maximum number of scheduled pods; if 0, pods stay pending.
        schedule_seconds: time from creation to scheduling.
        startup_seconds: median time from scheduling to ready.
        startup_spread: sigma of its logarithm; limited to half to twice the median.
        kv_share: share of the hardware's `kv_tokens`.
        gone_from, gone_until: start and end, in seconds of the trace, of a time in which no pod is
            scheduled; scheduled pods are not affected.
    """

    nodes: int = 1000
    schedule_seconds: float = 2.0
    startup_seconds: float = 60.0
    startup_spread: float = 0.35
    kv_share: float = 1.0
    gone_from: float = 0.0
    gone_until: float = 0.0


@dataclasses.dataclass(frozen=True)
class Hardware:
    """Hardware at speed 1. The defaults are for a model of about 30 B on one device.

    Attributes:
        encode: cost of one batch of images; units are patches.
        encode_items: maximum number of images per batch.
        prefill: cost of one chunk; units are tokens.
        chunk_tokens, prompts_per_step: maximum numbers of tokens and prompts per prefill step.
        itl_base, itl_per_token: ITL in seconds without KV tokens, and its increase for each in use.
        kv_tokens: KV capacity of one decode replica.
        kv_margin: share of KV that new requests leave free.
        tokens_per_patch: visual tokens per patch.
        gateway_seconds: time to parse and route one request.
        media_seconds: time until the images of a request are decoded.
        transfer_seconds: time to transfer the embeddings of a request.
        node_types: by role and variant; the default is `NodeType()`.
    """

    encode: Curve = Curve(0.03, 1.1e-4, 6e-9)
    encode_items: int = 8
    prefill: Curve = Curve(0.010, 3.4e-4, 2e-8)
    chunk_tokens: int = 2048
    prompts_per_step: int = 256
    itl_base: float = 0.018
    itl_per_token: float = 8e-7
    kv_tokens: int = 24_000
    kv_margin: float = 0.05
    tokens_per_patch: float = 0.25
    gateway_seconds: float = 0.004
    media_seconds: float = 0.03
    transfer_seconds: float = 0.02
    node_types: Mapping[Role, Mapping[str, NodeType]] = dataclasses.field(default_factory=dict)

    def node_type(self, role: Role, variant: str) -> NodeType:
        """Return the node type of a variant."""
        return self.node_types.get(role, {}).get(variant, NodeType())

    def visual_tokens(self, patches: tuple[int, ...]) -> int:
        """Return the visual tokens of images, given the patches of each; at least 1 per image."""
        return sum(max(1, round(count * self.tokens_per_patch)) for count in patches)


@dataclasses.dataclass(frozen=True)
class Noise:
    """Noise of a run. All runs use the defaults; `QUIET` is for tests that compare with theory.

    Attributes:
        loss: share of samples that are lost.
        jitter: relative sigma of errors in the sampled queued work and KV tokens in use.
        service: sigma of the logarithm of the duration of a batch or step.
        prediction: sigma of the logarithm of the ratio of predicted to real work of a role. Each
            pod deviates from its role with half of this sigma.
        bias: factor of this ratio for all pods.
    """

    loss: float = 0.05
    jitter: float = 0.05
    service: float = 0.1
    prediction: float = 0.2
    bias: float = 1.0


QUIET = Noise(loss=0.0, jitter=0.0, service=0.0, prediction=0.0)


def read_hardware(value: Any) -> Hardware:
    """Read the content of a file; missing fields have the defaults.

    Raises:
        HardwareError: a field is unknown, or its value is invalid.
    """
    given = _mapping(value, "the hardware")
    plain = {key: item for key, item in given.items() if key not in ("encode", "prefill")}
    types = _mapping(plain.pop("node_types", {}), "node_types")
    curves: dict[str, Any] = {
        key: Curve(**_numbers(_mapping(given[key], key), Curve, f"{key}."))
        for key in ("encode", "prefill")
        if key in given
    }
    return dataclasses.replace(
        Hardware(**_numbers(plain, Hardware, "")),
        **curves,
        node_types={
            _role(role): {
                name: NodeType(**_numbers(_mapping(item, where), NodeType, f"{where}."))
                for name, item in _mapping(variants, f"node_types.{role}").items()
                for where in (f"node_types.{role}.{name}",)
            }
            for role, variants in types.items()
        },
    )


def _numbers(given: Mapping[str, Any], kind: type, path: str) -> dict[str, Any]:
    """Return `given` if it has only fields of `kind`, numbers of at least 0, and no field lacks."""
    known = {field.name: field.type for field in dataclasses.fields(kind)}
    for name, value in given.items():
        if name not in known:
            raise HardwareError(f"{path}{name} is not a field: use one of {', '.join(known)}")
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or value < 0:
            raise HardwareError(f"{path}{name} must be a number of at least 0")
        if known[name] == "int" and not float(value).is_integer():
            raise HardwareError(f"{path}{name} must be an integer")
        if name in _POSITIVE and value == 0:
            raise HardwareError(f"{path}{name} must be greater than 0")
    missing = [
        field.name
        for field in dataclasses.fields(kind)
        if field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
        and field.name not in given
    ]
    if missing:
        raise HardwareError(f"{path}{missing[0]} is missing: write a number")
    return {key: int(item) if known[key] == "int" else item for key, item in given.items()}


def _mapping(value: Any, path: str) -> Mapping[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise HardwareError(f"{path} must be a mapping with text keys")
    return value


def _role(name: str) -> Role:
    if name not in POOL_ROLES:
        raise HardwareError(f"node_types.{name} is not a role: use one of {', '.join(POOL_ROLES)}")
    return Role(name)
