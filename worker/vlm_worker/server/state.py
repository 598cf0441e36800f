"""What a worker process is and how it is: the source of Hello, /stats, health and readiness."""

from __future__ import annotations

import dataclasses
import enum
import secrets
import time
from collections import Counter
from collections.abc import Mapping

from vlm_worker.core.memory import MemoryKind
from vlm_worker.core.rates import Rates
from vlm_worker.engine.settings import EngineStats
from vlm_worker.errors import (
    CancelledError,
    DrainingError,
    DuplicateError,
    IncompatibleError,
    InvalidRequestError,
    OverloadedError,
    Refusal,
)
from vlm_worker.settings import WorkerSettings


class Phase(enum.StrEnum):
    """Where a process is in its life."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class Outcome(enum.StrEnum):
    """How a call ended; the label of `vlm_requests_total`."""

    OK = "ok"
    INVALID = "invalid"
    REJECTED = "rejected"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclasses.dataclass(frozen=True, slots=True)
class ModelFacts:
    """What `/stats` says of the model, known once it is loaded; zeros where it does not apply.

    `weights` is the type of most linear layers: `int8`, or what the model computes in.
    """

    kv_bytes_per_token: int
    embedding_bytes_per_token: int
    image_tokens_per_megapixel: int
    weights_bytes: int
    weights: str


class WorkerState:
    """One process. Written by its lifecycle and by the gRPC handlers, on one event loop.

    `device` is what the model computes on, None before it is loaded. `heartbeat` is when the engine
    was last seen well, in seconds since 1970; None before it is there.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings
        self.boot_id = secrets.token_bytes(16)
        self.pod_uid = settings.identity.pod_uid or self.boot_id.hex()
        self.phase = Phase.LOADING
        self.message = "starting"
        self.model: ModelFacts | None = None
        self.device: str | None = None
        self.outcomes: Counter[Outcome] = Counter()
        self.heartbeat: float | None = None
        self._started = time.monotonic()
        self.rates = Rates(self._started)

    @property
    def uptime_seconds(self) -> float:
        """Since the process came up."""
        return time.monotonic() - self._started

    @property
    def accepting(self) -> bool:
        """New work is taken."""
        return self.phase is Phase.READY

    @property
    def serving(self) -> bool:
        """Requests are worked on: ready, or draining, which still finishes what it has."""
        return self.phase in (Phase.READY, Phase.DRAINING)

    def enter(self, phase: Phase, message: str) -> None:
        """Go on to a phase."""
        self.phase = phase
        self.message = message

    def beat(self, engine: EngineStats) -> None:
        """The engine was seen well, now."""
        self.heartbeat = time.time()
        self.rates.note(time.monotonic(), growth_of(engine))

    def count(self, error: BaseException | None) -> None:
        """Note how a call ended."""
        self.outcomes[outcome_of(error)] += 1


def growth_of(engine: EngineStats) -> dict[str, float]:
    """The counters whose rates `/stats` tells."""
    return {
        "requests_per_second": engine.requests,
        "output_tokens_per_second": engine.output_tokens,
        "visual_tokens_per_second": engine.visual_tokens,
    }


def outcome_of(error: BaseException | None) -> Outcome:
    """The label of an ending."""
    match error:
        case None:
            return Outcome.OK
        case InvalidRequestError() | IncompatibleError() | DuplicateError():
            return Outcome.INVALID
        case OverloadedError() | DrainingError():
            return Outcome.REJECTED
        case CancelledError():
            return Outcome.CANCELLED
        case Exception():
            return Outcome.ERROR
        case _:  # asyncio.CancelledError: the caller went away
            return Outcome.CANCELLED


@dataclasses.dataclass(frozen=True, slots=True)
class LeaseCounts:
    """Leases by state, as in `vlm_leases`, and how many ended by their deadline so far."""

    held: int = 0
    reserved: int = 0
    quarantined: int = 0
    expired: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class TransferCounts:
    """Transfers that were void, by what was wrong, and bytes that peers read by themselves."""

    refused: Mapping[Refusal, int] = dataclasses.field(default_factory=dict)
    exposed_bytes: int = 0
    lost_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryCounts:
    """Bytes that requests may hold in this process, their shares by kind, and what is in use."""

    budget_bytes: int = 0
    limits: Mapping[MemoryKind, int] = dataclasses.field(default_factory=dict)
    used: Mapping[MemoryKind, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """What the engine and the leases say at one moment; None before the model is loaded."""

    engine: EngineStats
    leases: LeaseCounts
    num_calls: int
    transfers: TransferCounts = dataclasses.field(default_factory=TransferCounts)
    memory: MemoryCounts = dataclasses.field(default_factory=MemoryCounts)
    native_kernels: str = "none"
