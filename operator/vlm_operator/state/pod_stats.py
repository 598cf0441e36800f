"""A pod's `/stats` at one time. Values only; `scrape` builds them."""

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
    """Facts that a worker read from the checkpoint; 0 if its role does not know them."""

    kv_bytes_per_token: int
    embedding_bytes_per_token: int
    image_tokens_per_megapixel: int
    weights_bytes: int


@dataclasses.dataclass(frozen=True)
class StageSeconds:
    """Seconds of one stage, summed over requests.

    Attributes:
        met: sum over requests that met their target.
        missed: sum over requests that missed their target.
        buckets: cumulative histogram: upper bound in seconds → number of requests.
    """

    met: float
    missed: float
    buckets: Mapping[float, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class WorkCounters:
    """The work of one kind that a worker computed since it started. All counters are monotonic.

    encode    a call is one batch, an item one image, a unit one patch, squares Σ patches²
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
class ItlHistogram:
    """ITL at one gateway since it started."""

    count: int
    buckets: Mapping[float, int]  # cumulative: upper bound in seconds → number of gaps


@dataclasses.dataclass(frozen=True)
class Ttft:
    """TTFT of one modality at one gateway since it started."""

    count: int
    missed: int
    sum_seconds: float
    buckets: Mapping[float, int]  # cumulative: upper bound in seconds → number of requests
    stages: Mapping[str, StageSeconds]


@dataclasses.dataclass(frozen=True)
class Sample:
    """One valid `/stats` of a pod (docs/stats.schema.json) at one time."""

    pod_uid: str
    boot_id: str
    role: Role
    phase: Phase
    message: str
    accepting: bool
    inflight: int
    queued_requests: int
    queued_work_seconds: float
    started_work_seconds: float  # since the process started
    kv: KvTokens | None
    model: ModelFacts | None
    ttft: Mapping[str, Ttft]  # by modality; empty on workers
    config_hash: str | None
    busy: Mapping[str, WorkCounters] = dataclasses.field(
        default_factory=dict
    )  # "encode", "prefill", …
    gaps: ItlHistogram | None = None  # gateways only
    held_for: Mapping[str, int] = dataclasses.field(default_factory=dict)  # gateways: role → count
    idle_seconds: float | None = None  # gateways, not of older images: since the last request
    waiting_for_wake: int = 0  # gateways: requests that wait for a service at zero
    device: str = ""  # workers: `cpu`, `cuda:0`; "" from an older image
