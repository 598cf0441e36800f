"""State of a worker process: the source of Hello, /stats, health and readiness."""

from __future__ import annotations

import dataclasses
import enum
import secrets
import time
from collections import Counter
from collections.abc import Mapping

from vlm_worker.core.measurements import Rates
from vlm_worker.core.probe import Verification
from vlm_worker.core.process_memory import NO_HOST_MEMORY, HostMemory
from vlm_worker.core.request_memory import MemoryKind
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
from vlm_worker.wire.identity_store import IdentityStore


class Phase(enum.StrEnum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class CallOutcome(enum.StrEnum):
    """How a call ended; the label of `triptych_requests_total`."""

    OK = "ok"
    INVALID = "invalid"
    REJECTED = "rejected"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclasses.dataclass(frozen=True, slots=True)
class ModelFacts:
    """The `model` part of `/stats`, known once the model is loaded; 0 if not applicable.

    `weights` is the type of most linear layers: `int8`, or the type of the computation; or the
    types by part (`vlm_worker.weights.label`). With `--activation-scales`, `;activations=` and the
    first digits of their sha256 follow.
    """

    kv_bytes_per_token: int
    embedding_bytes_per_token: int
    image_tokens_per_megapixel: int
    weights_bytes: int
    weights: str


class WorkerState:
    """Written by the lifecycle and the gRPC handlers of one process, on one event loop.

    `device` is the device of the model; None before the model is loaded. `heartbeat` is the time of
    the last check that found the engine healthy, in seconds since 1970; None before the first.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings
        self.boot_id = secrets.token_bytes(16)
        self.pod_uid = settings.identity.pod_uid or self.boot_id.hex()
        self.phase = Phase.LOADING
        self.message = "starting"
        self.model: ModelFacts | None = None
        self.verification: Verification | None = None  # of an unlisted family
        self.device: str | None = None
        self.outcomes: Counter[CallOutcome] = Counter()
        self.heartbeat: float | None = None
        self.identity: IdentityStore | None = None
        self._started = time.monotonic()
        self.rates = Rates(self._started)

    @property
    def uptime_seconds(self) -> float:
        return time.monotonic() - self._started

    @property
    def accepting(self) -> bool:
        return self.phase is Phase.READY

    @property
    def serving(self) -> bool:
        """Whether requests run: the process is ready, or drains and finishes its requests."""
        return self.phase in (Phase.READY, Phase.DRAINING)

    def enter(self, phase: Phase, message: str) -> None:
        self.phase = phase
        self.message = message

    def record_heartbeat(self, engine: EngineStats) -> None:
        """Record that the engine is healthy now, and its counters for the rates."""
        self.heartbeat = time.time()
        self.rates.note(time.monotonic(), growth_of(engine))

    def count(self, error: BaseException | None) -> CallOutcome:
        """Count how a call ended."""
        outcome = outcome_of(error)
        self.outcomes[outcome] += 1
        return outcome


def growth_of(engine: EngineStats) -> dict[str, float]:
    """The counters whose rates are in `/stats`."""
    return {
        "requests_per_second": engine.requests,
        "output_tokens_per_second": engine.count("output_tokens"),
        "visual_tokens_per_second": engine.count("visual_tokens"),
    }


def outcome_of(error: BaseException | None) -> CallOutcome:
    match error:
        case None:
            return CallOutcome.OK
        case InvalidRequestError() | IncompatibleError() | DuplicateError():
            return CallOutcome.INVALID
        case OverloadedError() | DrainingError():
            return CallOutcome.REJECTED
        case CancelledError():
            return CallOutcome.CANCELLED
        case Exception():
            return CallOutcome.ERROR
        case _:  # asyncio.CancelledError: the caller disconnected
            return CallOutcome.CANCELLED


@dataclasses.dataclass(frozen=True, slots=True)
class LeaseCounts:
    """Leases by state, as in `triptych_leases`, and the number that expired so far."""

    held: int = 0
    reserved: int = 0
    quarantined: int = 0
    expired: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """Statistics of a worker at one instant.

    Attributes:
        refused_transfers: rejected transfers by reason.
        exposed_bytes: memory that peers may read.
        lost_bytes: exposed memory that is not reused, because the consumer never confirmed the end
            of its reads.
        request_limits, request_bytes: memory of requests, in bytes by kind.
        host_memory: all memory of the process, that of requests included.
    """

    engine: EngineStats
    leases: LeaseCounts
    num_calls: int
    refused_transfers: Mapping[Refusal, int] = dataclasses.field(default_factory=dict)
    exposed_bytes: int = 0
    lost_bytes: int = 0
    request_limits: Mapping[MemoryKind, int] = dataclasses.field(default_factory=dict)
    request_bytes: Mapping[MemoryKind, int] = dataclasses.field(default_factory=dict)
    host_memory: HostMemory = NO_HOST_MEMORY
    native_kernels: str = "none"
