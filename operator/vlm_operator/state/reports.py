"""A pod's own report: its `/stats`, at one moment. Values only; `scrape` fills them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from vlm_operator.names import Role

Phase = Literal["loading", "ready", "draining", "failed"]


@dataclasses.dataclass(frozen=True)
class KvTokens:
    """A worker's KV cache, in tokens."""

    capacity: int
    running: int
    reserved: int
    cached: int
    free: int
    queued: int


@dataclasses.dataclass(frozen=True)
class ModelFacts:
    """What a worker found in the checkpoint; integers, 0 where a role does not know."""

    kv_bytes_per_token: int
    embedding_bytes_per_token: int
    image_tokens_per_megapixel: int
    weights_bytes: int


@dataclasses.dataclass(frozen=True)
class StageSeconds:
    """Seconds of one stage, summed over requests that met and that missed their target.

    Attributes:
        buckets: upper bound in seconds → requests whose stage took that long or less.
    """

    met: float
    missed: float
    buckets: Mapping[float, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Busy:
    """What a worker has computed for one kind of work since it started. All of these only grow.

    encode    a call is one batch, an item one picture, a unit one patch, squares Σ patches²
    prefill   a call is one chunk, an item one prompt, a unit one token computed,
              squares Σ n·(h + n/2) for n tokens after h cached ones
    decode    a call is one step, an item one sequence of a step, a unit one KV token of a step
    """

    seconds: float
    calls: int
    items: int
    units: int
    squares: float


@dataclasses.dataclass(frozen=True)
class Gaps:
    """Times between tokens at one gateway, counted since it started."""

    count: int
    buckets: Mapping[float, int]  # upper bound in seconds → gaps at or below it


@dataclasses.dataclass(frozen=True)
class Ttft:
    """Time to first token of one modality at one gateway, counted since it started."""

    count: int
    missed: int
    sum_seconds: float
    buckets: Mapping[float, int]  # upper bound in seconds → requests at or below it
    stages: Mapping[str, StageSeconds]


@dataclasses.dataclass(frozen=True)
class Sample:
    """One pod's `/stats` (docs/stats.schema.json) at one moment; only well-formed ones exist."""

    pod_uid: str
    boot_id: str
    role: Role
    phase: Phase
    message: str
    accepting: bool
    inflight: int
    queued_requests: int
    queued_work_seconds: float
    admitted_work_seconds: float  # since the process started
    kv: KvTokens | None
    model: ModelFacts | None
    ttft: Mapping[str, Ttft]  # by modality; empty on workers
    config_hash: str | None
    busy: Mapping[str, Busy] = dataclasses.field(default_factory=dict)  # "encode", "prefill", …
    gaps: Gaps | None = None  # of gateways
    held_for: Mapping[str, int] = dataclasses.field(default_factory=dict)  # gateways: role → count
    device: str = ""  # of workers: `cpu`, `cuda:0`; "" where an older image does not say
