"""The components of a worker with a loaded model: the engine, the role context, the roles."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final

from vlm_worker.core.leases import LeaseKind
from vlm_worker.core.limits import QueueLimit
from vlm_worker.core.process_memory import HostMemory, ProcessMemory
from vlm_worker.core.request_memory import MemoryKind
from vlm_worker.engine.engine import Engine
from vlm_worker.engine.settings import EngineStats
from vlm_worker.errors import IncompatibleError
from vlm_worker.roles.context import RoleContext
from vlm_worker.server.state import (
    LeaseCounts,
    MemoryCounts,
    Snapshot,
    TransferCounts,
    WorkerState,
)
from vlm_worker.types import Stage
from vlm_worker.wire.messages import Hello, Limits, Load

_BOUNDS: Final = {
    MemoryKind.UPLOADS: QueueLimit.UPLOADS,
    MemoryKind.IMAGES: QueueLimit.IMAGE_MEMORY,
    MemoryKind.EMBEDDINGS: QueueLimit.EMBEDDINGS,
}


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerComponents:
    """The parts of a worker with a loaded model, with the roles of its loaded stages.

    `model_revision` is the revision in the layouts. The worker makes `num_embedding_copies` copies
    of each embedding that it holds for a peer.
    `native_kernels` is the variant of the C++ kernels, or `none`. `declared` is all memory that
    this process may use; `resident()` returns what it uses now.
    """

    engine: Engine
    context: RoleContext
    model_revision: str
    max_model_len: int
    num_embedding_copies: int = 0
    native_kernels: str = "none"
    declared: ProcessMemory = dataclasses.field(default_factory=ProcessMemory)
    resident: Callable[[], int] = lambda: 0
    roles: Mapping[Stage, Any] = dataclasses.field(default_factory=dict)

    def role(self, stage: Stage) -> Any:
        """Return the role of a stage. Raises IncompatibleError if the stage is not loaded."""
        if stage not in self.roles:
            raise IncompatibleError(f"the stage {stage} is not loaded here")
        return self.roles[stage]

    def snapshot(self) -> Snapshot:
        """Return the current statistics."""
        leases = self.context.attempts.leases
        counts = LeaseCounts(
            held=leases.count(LeaseKind.HELD),
            reserved=leases.count(LeaseKind.RESERVED),
            quarantined=leases.count(LeaseKind.QUARANTINED),
            expired=sum(leases.num_expired.values()),
        )
        engine = self.engine.stats()
        violations = engine.invariant_violations + self.context.num_violations
        engine = dataclasses.replace(engine, invariant_violations=violations)
        account = self.context.transport.account
        transfers = TransferCounts(dict(self.context.num_refused), account.used, account.abandoned)
        return Snapshot(
            self._with_refusals(engine),
            counts,
            self.context.num_inflight,
            transfers,
            self._memory(engine),
            self.native_kernels,
        )

    def _memory(self, engine: EngineStats) -> MemoryCounts:
        memory, account = self.context.memory, self.context.transport.account
        copies = engine.held_embedding_bytes * self.num_embedding_copies
        used = {
            **memory.used,
            MemoryKind.EMBEDDINGS: engine.encoder_cache.bytes + copies,
            MemoryKind.EXPOSED: account.used + account.abandoned,
        }
        return MemoryCounts(
            memory.budget.by_kind(), used, HostMemory(self.declared, self.resident())
        )

    def _with_refusals(self, engine: EngineStats) -> EngineStats:
        """Add the refusals of calls that never reached the engine to the engine's."""
        refused = dict(engine.queue.refused)
        for kind, count in self.context.memory.num_refused.items():
            bound = _BOUNDS[kind]
            refused[bound] = refused.get(bound, 0) + count
        return dataclasses.replace(engine, queue=dataclasses.replace(engine.queue, refused=refused))

    @property
    def unhealthy_reason(self) -> str | None:
        """Why this process must be restarted; None while it is healthy."""
        if (unhealthy_reason := self.engine.unhealthy_reason) is not None:
            return f"the engine cannot go on: {unhealthy_reason}"
        return self.context.unhealthy_reason

    @property
    def outstanding(self) -> dict[str, int]:
        """Nonzero counts of everything that has not ended, by kind; empty at rest."""
        kv = self.engine.stats().kv
        counts = {
            **self.context.outstanding,
            "KV tokens in use": kv.running_tokens if kv else 0,
            "KV tokens reserved": kv.reserved_tokens if kv else 0,
        }
        return {name: count for name, count in counts.items() if count}

    @property
    def empty(self) -> bool:
        """Whether no call, lease or sequence is in flight."""
        return self.context.num_inflight == 0 and self.engine.stats().inflight == 0

    def hello(self, state: WorkerState) -> Hello:
        """Return the identity and the limits of this worker."""
        settings, context = state.settings, self.context
        layout, kv = context.kv_layout, self.engine.stats().kv
        return Hello(
            role=settings.role,
            stages=settings.stages,
            model=settings.served_name,
            model_revision=self.model_revision,
            pod_name=settings.identity.pod_name,
            pod_uid=state.pod_uid,
            boot_id=state.boot_id,
            layout_fingerprint=layout.fingerprint if layout else b"",
            embed_fingerprint=context.embed_layout.fingerprint,
            compat=settings.compat,
            weights=state.model.weights if state.model else "",
            limits=Limits(
                block_size=layout.block_size if layout else 0,
                kv_capacity_tokens=kv.capacity_tokens if kv else 0,
                max_model_len=self.max_model_len if layout else 0,
                max_requests=settings.max_requests,
            ),
        )

    def load(self, state: WorkerState) -> Load:
        """Return the current load."""
        stats = self.engine.stats()
        return Load(
            num_inflight=max(stats.inflight, self.context.num_inflight),
            num_waiting=stats.num_waiting + stats.num_waiting_images,
            work_queued_seconds=stats.work_queued_seconds,
            kv_free_tokens=stats.kv.free_tokens + stats.kv.cached_tokens if stats.kv else 0,
            kv_capacity_tokens=stats.kv.capacity_tokens if stats.kv else 0,
            accepting=state.accepting,
            boot_id=state.boot_id,
        )
