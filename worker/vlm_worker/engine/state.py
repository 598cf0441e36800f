"""Everything that the engine thread owns, and one turn of it.

turn:  a batch of pictures (`encoder_queue`) -> a step of the language model (`stepping`)
rest:  what should have come back by now (`violations`)        any time:  the numbers (`snapshot`)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from vlm_worker.core.encoder_entries import Shelf
from vlm_worker.core.sequence import Lane
from vlm_worker.core.waves import AdmissionReason
from vlm_worker.engine.events import CancelOutcome
from vlm_worker.engine.handover import Handover
from vlm_worker.engine.outbox import Letter, Outbox
from vlm_worker.engine.pictures import Pictures
from vlm_worker.engine.prompt_images import PromptImages
from vlm_worker.engine.runner import Runner
from vlm_worker.engine.sequences import Positions, Sequences
from vlm_worker.engine.settings import (
    Bound,
    EncoderCacheStats,
    EngineSettings,
    EngineStats,
    KVStats,
    QueueStats,
    TierStats,
)
from vlm_worker.engine.stepping import Stepping
from vlm_worker.errors import DrainingError, WorkerError
from vlm_worker.types import RequestKey


class State:
    """Pictures, sequences and steps of one runner. Touched by the engine thread alone."""

    def __init__(
        self,
        runner: Runner,
        *,
        settings: EngineSettings,
        positions: Positions,
        clock: Callable[[], float],
        send: Callable[[Iterator[Letter]], None] | None = None,
    ) -> None:
        self.outbox = Outbox(send)
        self.pictures = Pictures(runner, settings=settings, outbox=self.outbox, clock=clock)
        self.images = PromptImages(runner, pictures=self.pictures, outbox=self.outbox)
        self.sequences = Sequences(
            runner,
            settings=settings,
            positions=positions,
            images=self.images,
            outbox=self.outbox,
            clock=clock,
        )
        self.handover = Handover(runner, self.sequences, outbox=self.outbox)
        self.stepping = Stepping(
            runner,
            self.sequences,
            images=self.images,
            settings=settings,
            outbox=self.outbox,
            clock=clock,
        )
        self.num_violations = 0
        self._settings = settings
        self._clock = clock

    @property
    def failing(self) -> bool:
        """The device is lost, or too many steps in a row computed nothing."""
        guard = self.stepping.guard
        lost = guard.device_lost or self.pictures.queue.device_lost
        return lost or guard.failures_in_a_row >= self._settings.max_step_failures

    @property
    def inflight(self) -> int:
        """See `EngineStats.inflight`."""
        sequences = self.sequences
        live, loans = sequences.live, self.handover.loans
        held = len(sequences.reservations) + loans.num_without(live) + self.pictures.num_pinned
        return len(live) + held

    def turn(self) -> bool:
        """One batch of pictures, one step; False when there is nothing to do but wait."""
        if len(self.pictures.queue):
            self.outbox.post()
        encoded = self.pictures.queue.turn(decoding=self.sequences.table.decode_rows.size > 0)
        return self.stepping.turn() or encoded

    def put_embedding(self, key: RequestKey, item: int, rows: memoryview) -> None:
        """See `Engine.put_embedding`."""
        if not self.sequences.has_ended(key):  # what comes too late is not needed any more
            self.images.put(self.sequences.get(key), item, rows)

    def cancel(self, key: RequestKey) -> CancelOutcome:
        """See `Engine.cancel`."""
        had_pictures = self.pictures.cancel(key)
        outcome = self.sequences.cancel(key)
        if had_pictures and outcome is CancelOutcome.NOT_FOUND:
            return CancelOutcome.CANCELLED_BEFORE_ADVERTISED
        return outcome

    def drain(self) -> int:
        """See `Engine.drain`."""
        error = DrainingError("this worker's drain deadline has come")
        return self.pictures.drain(error) + self.sequences.drain(error)

    def say_last_words(self, error: WorkerError) -> None:
        """The thread ends: everybody who listens is told. The books stay as they are."""
        self.pictures.say_last_words(error)
        self.sequences.say_last_words(error)

    def violations(self) -> list[str]:
        """What should have come back by now, and has not. Asked when there is nothing to do."""
        self.pictures.cache.expire(now=self._clock())
        if self.sequences.live or self.sequences.reservations or self.handover.loans:
            return []
        pool, index = self.sequences.pool, self.pictures.cache.index
        left = {
            "KV blocks in use": pool.num_used,
            "KV blocks promised": pool.num_promised,
            "KV blocks unread": self.sequences.scheduler.unread.num_blocks,
            "rows in use": len(self.sequences.table),
            "sequences queued": len(self.sequences.scheduler.waiting)
            + len(self.sequences.scheduler.entrance.ready),
            "embedding pins without owner": index.num_pins - self.pictures.num_pinned,
        }
        if self._settings.strict:
            pool.check()
            self.pictures.cache.check()
        return [f"{name}: {count}" for name, count in left.items() if count]

    def snapshot(self) -> EngineStats:
        """The numbers as of now."""
        sequences, pictures, stepping = self.sequences, self.pictures, self.stepping
        queued_tokens = stepping.queued_tokens
        queued_seconds = stepping.predict(queued_tokens) + pictures.queue.seconds
        return EngineStats(
            inflight=self.inflight,
            num_running=len(sequences.table),
            num_waiting=len(sequences.scheduler.waiting),
            num_waiting_images=len(pictures.queue),
            num_held=sequences.num_held,
            num_reserved=len(sequences.reservations),
            num_pinned_embeddings=pictures.num_pinned,
            held_embedding_bytes=pictures.held_bytes,
            max_held_embedding_bytes=self._settings.embedding_cache_bytes,
            queue=self._queue_stats(),
            work_queued_seconds=queued_seconds,
            work_admitted_seconds_total=stepping.admitted_seconds + pictures.queue.admitted_seconds,
            kv=self._kv_stats(queued_tokens),
            encoder_cache=self._encoder_cache_stats(),
            requests=sequences.num_requests,
            images=pictures.queue.num_images,
            patches=pictures.queue.num_patches,
            visual_tokens=pictures.queue.num_visual_tokens,
            output_tokens=stepping.num_output_tokens,
            preemptions=sequences.scheduler.num_preemptions,
            out_of_memory=stepping.guard.num_out_of_memory + pictures.queue.num_out_of_memory,
            prefix_cache_queries=stepping.prefix.queries,
            prefix_cache_hits=stepping.prefix.hits,
            prefix_cache_visual_queries=stepping.prefix.visual_queries,
            prefix_cache_visual_hits=stepping.prefix.visual_hits,
            prefix_cache_evictions=sequences.pool.num_evictions,
            kv_request_bytes=sequences.usage.buckets,
            busy={**pictures.queue.busy.sums, **stepping.busy.sums},
            steps=stepping.num_steps,
            step_failures=stepping.guard.num_failures,
            invariant_violations=self.num_violations,
        )

    def _queue_stats(self) -> QueueStats:
        scheduler = self.sequences.scheduler
        waiting, oldest = scheduler.waiting, scheduler.waiting.oldest
        limit = self.stepping.limit.limit
        return QueueStats(
            waiting={lane: waiting.count(lane) for lane in Lane},
            waiting_tokens=waiting.num_tokens,
            waiting_pixels=self.pictures.queue.num_pixels,
            oldest_wait_seconds=self._clock() - oldest.arrived_at if oldest else 0.0,
            admitted={reason: waiting.num_admitted[reason] for reason in AdmissionReason},
            refused={
                bound: self.sequences.room.num_refused[bound] + self.pictures.num_refused[bound]
                for bound in Bound
            },
            running_limit=limit.value,
            running_limit_reason=limit.reason,
        )

    def _encoder_cache_stats(self) -> EncoderCacheStats:
        index = self.pictures.cache.index
        hot, cold = _tier_stats(index.hot), _tier_stats(index.cold)
        return EncoderCacheStats(
            entries=hot.entries + cold.entries,
            bytes=hot.bytes + cold.bytes,
            hits=hot.hits + cold.hits,
            joins=index.num_joins,
            misses=index.num_misses,
            evictions=index.num_evictions,
            expirations=index.num_expirations,
            demotions=index.num_demotions,
            promotions=index.num_promotions,
            hot=hot,
            cold=cold,
        )

    def _kv_stats(self, queued_tokens: int) -> KVStats | None:
        """Whole blocks, in tokens. A promise is counted against empty blocks before cached ones."""
        pool = self.sequences.pool
        if not pool.capacity:
            return None
        empty = pool.num_free - pool.num_cached
        free = max(empty - pool.num_promised, 0)
        return KVStats(
            capacity_tokens=pool.capacity * pool.block_size,
            running_tokens=pool.num_used * pool.block_size,
            reserved_tokens=pool.num_promised * pool.block_size,
            cached_tokens=(pool.num_available - free) * pool.block_size,
            free_tokens=free * pool.block_size,
            queued_tokens=queued_tokens,
        )


def _tier_stats(shelf: Shelf) -> TierStats:
    return TierStats(
        entries=shelf.num_entries,
        bytes=shelf.num_bytes,
        capacity_bytes=shelf.max_bytes,
        hits=shelf.num_hits,
        evictions=shelf.num_evictions,
    )
