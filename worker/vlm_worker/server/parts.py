"""What is there once the model is loaded: the engine, the host of the roles, the roles."""

from __future__ import annotations

import dataclasses
from typing import Final

from vlm_worker.core.leases import LeaseKind
from vlm_worker.core.memory import MemoryKind
from vlm_worker.engine.engine import Engine
from vlm_worker.engine.settings import Bound, EngineStats
from vlm_worker.roles.decode import DecodeRole
from vlm_worker.roles.encoder import EncoderRole
from vlm_worker.roles.host import Host
from vlm_worker.roles.prefill import PrefillRole
from vlm_worker.server.state import (
    LeaseCounts,
    MemoryCounts,
    Snapshot,
    TransferCounts,
    WorkerState,
)
from vlm_worker.wire.calls import Hello, Limits, Load

_BOUNDS: Final = {
    MemoryKind.UPLOADS: Bound.UPLOADS,
    MemoryKind.IMAGES: Bound.IMAGE_MEMORY,
    MemoryKind.EMBEDDINGS: Bound.EMBEDDINGS,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Parts:
    """A role is None where its stage is not loaded. `model_revision` is the one in the layouts.

    `num_embedding_copies` are made of each embedding that is held for a peer; `native_kernels` is
    the variant of the kernels in C++, or `none`.
    """

    engine: Engine
    host: Host
    model_revision: str
    max_model_len: int
    num_embedding_copies: int = 0
    native_kernels: str = "none"
    encoder: EncoderRole | None = None
    prefill: PrefillRole | None = None
    decode: DecodeRole | None = None

    def snapshot(self) -> Snapshot:
        """How it is now."""
        leases = self.host.offers.leases
        counts = LeaseCounts(
            held=leases.count(LeaseKind.HELD),
            reserved=leases.count(LeaseKind.RESERVED),
            quarantined=leases.count(LeaseKind.QUARANTINED),
            expired=sum(leases.num_expired.values()),
        )
        engine = self.engine.stats()
        violations = engine.invariant_violations + self.host.num_violations
        engine = dataclasses.replace(engine, invariant_violations=violations)
        ledger = self.host.transport.ledger
        transfers = TransferCounts(dict(self.host.num_refused), ledger.used, ledger.lost)
        return Snapshot(
            self._with_refusals(engine),
            counts,
            self.host.num_inflight,
            transfers,
            self._memory(engine),
            self.native_kernels,
        )

    def _memory(self, engine: EngineStats) -> MemoryCounts:
        memory, ledger = self.host.memory, self.host.transport.ledger
        copies = engine.held_embedding_bytes * self.num_embedding_copies
        used = {
            **memory.used,
            MemoryKind.EMBEDDINGS: engine.encoder_cache.bytes + copies,
            MemoryKind.EXPOSED: ledger.used + ledger.lost,
        }
        return MemoryCounts(memory.budget.total, memory.budget.by_kind(), used)

    def _with_refusals(self, engine: EngineStats) -> EngineStats:
        """The engine's refusals, and those of calls that never came to it."""
        refused = dict(engine.queue.refused)
        for kind, count in self.host.memory.num_refused.items():
            bound = _BOUNDS[kind]
            refused[bound] = refused.get(bound, 0) + count
        return dataclasses.replace(engine, queue=dataclasses.replace(engine.queue, refused=refused))

    @property
    def complaint(self) -> str | None:
        """Why this process cannot go on; None while it is well."""
        if not self.engine.healthy:
            return "the engine is stuck or has failed"
        return self.host.complaint

    @property
    def left(self) -> dict[str, int]:
        """All that has not come back, by what it is; empty at rest."""
        stats = self.engine.stats()
        kv = stats.kv
        counts = {
            **self.host.left,
            "sequences, reservations and pins": stats.inflight,
            "KV tokens in use": kv.running_tokens if kv else 0,
            "KV tokens reserved": kv.reserved_tokens if kv else 0,
        }
        return {name: count for name, count in counts.items() if count}

    @property
    def empty(self) -> bool:
        """Nothing is owed to anybody."""
        return self.host.num_inflight == 0 and self.engine.stats().inflight == 0

    def hello(self, state: WorkerState) -> Hello:
        """Who this is."""
        settings, host = state.settings, self.host
        layout, kv = host.kv_layout, self.engine.stats().kv
        return Hello(
            role=settings.role,
            stages=settings.stages,
            model=settings.served_name,
            model_revision=self.model_revision,
            pod_name=settings.identity.pod_name,
            pod_uid=state.pod_uid,
            boot_id=state.boot_id,
            layout_fingerprint=layout.fingerprint if layout else b"",
            embed_fingerprint=host.embed_layout.fingerprint,
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
        """How busy this is."""
        stats = self.engine.stats()
        return Load(
            num_inflight=max(stats.inflight, self.host.num_inflight),
            num_waiting=stats.num_waiting + stats.num_waiting_images,
            work_queued_seconds=stats.work_queued_seconds,
            kv_free_tokens=stats.kv.free_tokens + stats.kv.cached_tokens if stats.kv else 0,
            kv_capacity_tokens=stats.kv.capacity_tokens if stats.kv else 0,
            accepting=state.accepting,
            boot_id=state.boot_id,
        )
