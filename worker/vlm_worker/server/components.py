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
from vlm_worker.server.state import LeaseCounts, Snapshot, WorkerState
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

    The worker makes `num_embedding_copies` copies of each embedding that it holds for a peer.
    `native_kernels` is the variant of the C++ kernels, or `none`. `declared` is all memory that
    this process may use; `resident()` returns what it uses now.
    """

    engine: Engine
    context: RoleContext
    max_model_len: int
    num_embedding_copies: int = 0
    native_kernels: str = "none"
    declared: ProcessMemory = dataclasses.field(default_factory=ProcessMemory)
    resident: Callable[[], int] = lambda: 0
    roles: Mapping[Stage, Any] = dataclasses.field(default_factory=dict)

    def role(self, stage: Stage) -> Any:
        """Raises IncompatibleError if the stage is not loaded."""
        if stage not in self.roles:
            raise IncompatibleError(f"the stage {stage} is not loaded here")
        return self.roles[stage]

    def snapshot(self) -> Snapshot:
        engine, context = self._engine_stats(), self.context
        leases, memory, account = context.attempts.leases, context.memory, context.transport.account
        copies = engine.held_embedding_bytes * self.num_embedding_copies
        return Snapshot(
            engine,
            LeaseCounts(
                held=leases.count(LeaseKind.HELD),
                reserved=leases.count(LeaseKind.RESERVED),
                quarantined=leases.count(LeaseKind.QUARANTINED),
                expired=sum(leases.num_expired.values()),
            ),
            context.num_inflight,
            refused_transfers=dict(context.num_refused),
            exposed_bytes=account.used,
            lost_bytes=account.abandoned,
            request_limits=memory.budget.by_kind(),
            request_bytes={
                **memory.used,
                MemoryKind.EMBEDDINGS: engine.encoder_cache.bytes + copies,
                MemoryKind.EXPOSED: account.used + account.abandoned,
            },
            host_memory=HostMemory(self.declared, self.resident()),
            native_kernels=self.native_kernels,
        )

    def _engine_stats(self) -> EngineStats:
        """The engine's statistics, with the refusals of calls that never reached it."""
        engine = self.engine.stats()
        refused = dict(engine.queue.refused)
        for kind, count in self.context.memory.num_refused.items():
            bound = _BOUNDS[kind]
            refused[bound] = refused.get(bound, 0) + count
        return dataclasses.replace(
            engine,
            invariant_violations=engine.invariant_violations + self.context.num_violations,
            queue=dataclasses.replace(engine.queue, refused=refused),
        )

    @property
    def unhealthy_reason(self) -> str | None:
        """Why this process must be restarted; None while it is healthy."""
        if (reason := self.engine.unhealthy_reason) is not None:
            return f"the engine cannot go on: {reason}"
        return self.context.unhealthy_reason

    @property
    def empty(self) -> bool:
        """Whether no call, lease or sequence is in flight."""
        return self.context.num_inflight == 0 and self.engine.stats().inflight == 0

    def hello(self, state: WorkerState) -> Hello:
        settings, context = state.settings, self.context
        layout, kv = context.kv_layout, self.engine.stats().kv
        return Hello(
            role=settings.role,
            stages=settings.stages,
            model=settings.served_name,
            model_revision=context.embed_layout.model_revision,
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
            grammars=self.engine.constraints is not None,
            min_tokens=True,
            prompt_logprobs=True,
            embed_layout=context.embed_layout,
        )

    def load(self, state: WorkerState) -> Load:
        stats = self.engine.stats()
        max_lent = state.settings.max_lent_requests
        return Load(
            num_inflight=max(stats.inflight, self.context.num_inflight),
            num_waiting=stats.num_waiting + stats.num_waiting_images,
            work_queued_seconds=stats.work_queued_seconds,
            kv_free_tokens=stats.kv.free_tokens + stats.kv.cached_tokens if stats.kv else 0,
            kv_capacity_tokens=stats.kv.capacity_tokens if stats.kv else 0,
            accepting=state.accepting,
            boot_id=state.boot_id,
            max_lent=max_lent,
            num_lent=stats.num_running + stats.num_waiting + stats.num_held if max_lent else 0,
            num_images=stats.num_unencoded_images if max_lent else 0,
            lent_queued_seconds=stats.lent_queued_seconds,
        )
