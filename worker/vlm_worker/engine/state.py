"""Everything that the engine thread owns, and one turn of it.

turn:  a batch of images (`encoder_batches`) -> a step of the language model (`step_loop`)
       without a request, a chunk of a prefetch (`prefetches`)
       with `images_first`, no step while images are left, apart from one every MAX_YIELD_SECONDS
idle:  resources that were not freed (`check_idle`)        any time:  statistics (`snapshot`)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Final

from vlm_worker.core.admission_policy import AdmissionReason
from vlm_worker.core.encoder_cache import EncoderCache
from vlm_worker.core.kv_cache import BlockPool, PrefixCounts
from vlm_worker.core.limits import QueueLimit
from vlm_worker.core.sequence import Lane
from vlm_worker.core.session_pins import DropReason
from vlm_worker.engine.attempts import EngineContext, Track
from vlm_worker.engine.constraints import Constraints
from vlm_worker.engine.embedding_files import EmbeddingFiles
from vlm_worker.engine.encode_requests import EncodeRequests
from vlm_worker.engine.events import EventBuffer, OutputEvent
from vlm_worker.engine.prefetches import Prefetches
from vlm_worker.engine.prompt_embeddings import PromptEmbeddings
from vlm_worker.engine.runner import Runner
from vlm_worker.engine.sequences import Positions, Sequences
from vlm_worker.engine.settings import (
    DiskStats,
    EncoderCacheStats,
    EngineSettings,
    EngineStats,
    KVStats,
    QueueStats,
    SessionPinStats,
    TierStats,
)
from vlm_worker.engine.step_loop import StepLoop
from vlm_worker.errors import CancelledError, DrainingError, WorkerError
from vlm_worker.metrics import COUNTER, GAUGE, Metric
from vlm_worker.types import Request, RequestKey
from vlm_worker.wire.messages import CancelOutcome
from vlm_worker.wire.prefetch_messages import PrefetchResult

logger = logging.getLogger(__name__)

MAX_YIELD_SECONDS: Final = 1.0
"""Steps wait no longer for images, so that a stream of images stops no answer. A decode step takes
tens of milliseconds, so images lose a few percent of their time to it; a chunk of a prompt takes
longer."""


class State:
    """Images, sequences and steps of one runner. Engine thread only."""

    def __init__(
        self,
        runner: Runner,
        *,
        settings: EngineSettings,
        positions: Positions,
        clock: Callable[[], float],
        send: Callable[[Iterator[OutputEvent]], None] | None = None,
        files: EmbeddingFiles | None = None,
        constraints: Constraints | None = None,
    ) -> None:
        self.context = EngineContext(
            runner, settings, clock, EventBuffer(send), constraints=constraints
        )
        self.events, self.attempts = self.context.events, self.context.attempts
        self.encode_requests = EncodeRequests(self.context, files)
        self.prompt_embeddings = PromptEmbeddings(self.context, self.encode_requests)
        self.sequences = Sequences(self.context, positions, self.prompt_embeddings)
        self.step_loop = StepLoop(self.context, self.sequences, self.prompt_embeddings)
        self.prefetches = Prefetches(self.context, self.sequences, self.encode_requests)
        self.sequences.on_new = self.prefetches.give_way
        self.num_violations = 0
        self._yields_since: float | None = None
        self._settings = settings
        self._clock = clock

    @property
    def unhealthy_reason(self) -> str | None:
        """Why no step can succeed; None while one may."""
        num_failures = self.step_loop.failures_in_a_row
        if self.context.device_errors.is_lost:
            return "the device is lost"
        if num_failures >= self._settings.max_step_failures:
            return f"{num_failures} steps in a row failed"
        return None

    def turn(self) -> bool:
        """Take one turn of the requests, or of a prefetch; False if there is no work."""
        if not self.is_idle:
            self.prefetches.give_way()
        return self._turn() or self.prefetches.turn()

    @property
    def is_idle(self) -> bool:
        """Whether no request is here, in any state."""
        return not self.attempts.by_key and not self.encode_requests.queue.num_unencoded

    def prefetch(self, request: Request, answer: Callable[[PrefetchResult], None]) -> None:
        """Start a prefetch; raises as `Prefetches.start` does."""
        self.sequences.check_loaded()
        self.prefetches.start(request, answer, is_idle=self.is_idle)

    def _turn(self) -> bool:
        """Take what was read, run one batch of images and one step; False if there is no work."""
        is_read = self.encode_requests.reads.turn()
        if len(self.encode_requests.queue):
            self.events.flush()
        decoding = self.sequences.batch.decode_rows.size > 0
        # A step that waits for images needs no short encoder calls.
        encoded = self.encode_requests.queue.turn(
            decoding=decoding and not self._settings.images_first
        )
        if self._settings.images_first and self._yields():
            return encoded or is_read
        return self.step_loop.turn() or encoded or is_read

    def _yields(self) -> bool:
        """Whether this turn runs no step because images are left to encode."""
        if not self.encode_requests.queue.num_unencoded:
            self._yields_since = None
            return False
        now = self._clock()
        if self._yields_since is None:
            self._yields_since = now
        if now - self._yields_since < MAX_YIELD_SECONDS:
            return True
        self._yields_since = now
        return False

    def put_embedding(self, key: RequestKey, item: int, rows: memoryview) -> None:
        if not self.attempts.has_ended(key):  # an embedding that arrives late is dropped
            self.prompt_embeddings.put(self.sequences.get(key), item, rows)

    def cancel(self, key: RequestKey) -> CancelOutcome:
        attempt = self.attempts.get(key)
        if attempt is None:
            has_ended = self.attempts.has_ended(key)
            return CancelOutcome.ALREADY_COMPLETE if has_ended else CancelOutcome.NOT_FOUND
        is_read = self.sequences.readable_blocks.was_read(key)
        sequence = attempt.sequence
        attempt.end(Track.ENCODE)
        if sequence is None:
            if self.attempts.has_ended(key):
                return CancelOutcome.ALREADY_COMPLETE
            attempt.end(Track.GENERATION)
            return CancelOutcome.CANCELLED_BEFORE_ADVERTISED
        in_flight = sequence.for_peer and is_read
        self.sequences.fail(sequence, CancelledError("the request was cancelled"))
        if in_flight:
            return CancelOutcome.CANCEL_REQUESTED_IN_FLIGHT
        return CancelOutcome.CANCELLED_BEFORE_ADVERTISED

    def drain(self) -> int:
        error = DrainingError("this worker's drain deadline has come")
        self.prefetches.drain()
        return self.encode_requests.drain(error) + self.sequences.drain(error)

    def fail_pending(self, error: WorkerError) -> None:
        """End all streams with an error; the thread ends. The accounting stays as it is."""
        self.prefetches.give_way()
        self.encode_requests.fail_pending(error)
        self.sequences.fail_pending(error)

    def check_idle(self) -> None:
        """Count and log the resources that were not freed; if `strict`, fail."""
        if violations := self.violations():
            self.num_violations += len(violations)
            logger.error("resources not freed", extra={"violations": violations})
            assert not self._settings.strict, f"resources not freed: {violations}"

    def violations(self) -> list[str]:
        """Resources that are held although no request is in flight. Called while idle."""
        self.encode_requests.cache.expire(now=self._clock())
        if self.prefetches.num_blocks:
            return []
        if any(attempt.holds(Track.GENERATION) for attempt in self.attempts.by_key.values()):
            return []
        pool, index = self.sequences.pool, self.encode_requests.cache
        held = {
            "KV blocks in use": pool.num_used,
            "KV blocks promised": pool.num_reserved,
            "KV blocks unread": self.sequences.scheduler.pending_transfers.num_blocks,
            "rows in use": len(self.sequences.batch),
            "sequences queued": len(self.sequences.scheduler.waiting)
            + len(self.sequences.scheduler.admission.ready),
            "embedding pins without owner": index.num_pins
            - self.encode_requests.held.count
            - self.encode_requests.num_whole_pins,
        }
        if self._settings.strict:
            pool.check()
            self.attempts.check()
            self.encode_requests.cache.check()
            self.encode_requests.reads.check()
        return [f"{name}: {count}" for name, count in held.items() if count]

    def snapshot(self) -> EngineStats:
        sequences, encode_requests, step_loop = self.sequences, self.encode_requests, self.step_loop
        queued_tokens = sequences.scheduler.waiting.num_tokens
        prompt_seconds, started_seconds = (
            sequences.predict(queued_tokens),
            step_loop.admitted_seconds,
        )
        lent_seconds = 0.0
        if self._settings.images_first:  # the autoscaler sizes a pool that lends by its images
            prompt_seconds, started_seconds, lent_seconds = 0.0, 0.0, prompt_seconds
        return EngineStats(
            inflight=len(self.attempts.by_key),
            num_running=len(sequences.batch),
            num_waiting=len(sequences.scheduler.waiting),
            num_waiting_images=len(encode_requests.queue),
            num_unencoded_images=encode_requests.queue.num_unencoded,
            num_held=sequences.num_held,
            num_pinned_embeddings=encode_requests.held.count,
            held_embedding_bytes=encode_requests.held.num_bytes,
            max_held_embedding_bytes=self._settings.embedding_cache_bytes,
            queue=self._queue_stats(),
            work_queued_seconds=prompt_seconds + encode_requests.queue.seconds,
            lent_queued_seconds=lent_seconds,
            work_admitted_seconds_total=started_seconds + encode_requests.queue.admitted_seconds,
            kv=_kv_stats(sequences.pool, queued_tokens, prefetching=self.prefetches.num_blocks),
            encoder_cache=_encoder_cache_stats(encode_requests.cache, encode_requests.reads.stats),
            session_pins=self._session_pin_stats(),
            requests=sequences.num_requests,
            kv_request_bytes=sequences.usage.buckets,
            busy=self.context.busy.sums,
            invariant_violations=self.num_violations,
            counters={metric.stats or metric.name: metric.value(self) for metric in COUNTERS},
        )

    def _session_pin_stats(self) -> SessionPinStats | None:
        if not self._settings.session_pin_seconds:
            return None
        requests = self.encode_requests
        memory, disk = requests.cache.session_pins, requests.reads.session_pins
        return SessionPinStats(
            entries={"memory": len(memory), "disk": len(disk)},
            bytes={"memory": memory.num_bytes, "disk": disk.num_bytes},
            dropped={
                reason.value: memory.num_dropped[reason] + disk.num_dropped[reason]
                for reason in DropReason
            },
        )

    def _queue_stats(self) -> QueueStats:
        scheduler = self.sequences.scheduler
        waiting, oldest = scheduler.waiting, scheduler.waiting.oldest
        limit = self.step_loop.limit.limit
        return QueueStats(
            waiting={lane: waiting.count(lane) for lane in Lane},
            waiting_tokens=waiting.num_tokens,
            oldest_wait_seconds=self._clock() - oldest.arrived_at if oldest else 0.0,
            admitted={reason: waiting.num_admitted[reason] for reason in AdmissionReason},
            refused={limit: self.context.limits.num_refused[limit] for limit in QueueLimit},
            running_limit=limit.value,
            running_limit_reason=limit.reason,
        )


def _encoder_cache_stats(cache: EncoderCache, disk: DiskStats) -> EncoderCacheStats:
    hot, cold = (
        TierStats(
            tier.num_entries, tier.num_bytes, tier.max_bytes, tier.num_hits, tier.num_evictions
        )
        for tier in (cache.hot, cache.cold)
    )
    return EncoderCacheStats(
        entries=hot.entries + cold.entries,
        bytes=hot.bytes + cold.bytes,
        hits=hot.hits + cold.hits + disk.hits,
        joins=cache.num_joins,
        misses=cache.num_misses,
        evictions=cache.num_evictions,
        expirations=cache.num_expirations,
        demotions=cache.num_demotions,
        promotions=cache.num_promotions,
        hot=hot,
        cold=cold,
        disk=disk,
    )


def _kv_stats(pool: BlockPool, queued_tokens: int, *, prefetching: int) -> KVStats | None:
    """Whole blocks, in tokens. Reservations count against empty blocks before cached ones.

    The blocks of a prefetch count as cached: a request takes them.
    """
    if not pool.capacity:
        return None
    free = max(pool.num_free - pool.num_cached - pool.num_reserved, 0)
    return KVStats(
        capacity_tokens=pool.capacity * pool.block_size,
        running_tokens=(pool.num_used - prefetching) * pool.block_size,
        reserved_tokens=pool.num_reserved * pool.block_size,
        cached_tokens=(pool.num_available - free + prefetching) * pool.block_size,
        free_tokens=free * pool.block_size,
        queued_tokens=queued_tokens,
        visual_cached_tokens=pool.num_cached_visual * pool.block_size,
        text_evictions=pool.num_evictions - pool.num_visual_evictions,
        visual_evictions=pool.num_visual_evictions,
    )


COUNTERS: Final[tuple[Metric[State], ...]] = (
    Metric("triptych_images_total", COUNTER, "Images encoded.",
           lambda state: state.encode_requests.queue.num_images, stats="images"),
    Metric("triptych_patches_total", COUNTER, "Patches encoded.",
           lambda state: state.encode_requests.queue.num_patches, stats="patches"),
    Metric("triptych_visual_tokens_total", COUNTER, "Visual tokens encoded.",
           lambda state: state.encode_requests.queue.num_visual_tokens, stats="visual_tokens"),
    Metric("triptych_output_tokens_total", COUNTER, "Tokens sampled.",
           lambda state: state.step_loop.num_output_tokens, stats="output_tokens"),
    Metric("triptych_preemptions_total", COUNTER, "Sequences preempted.",
           lambda state: state.sequences.scheduler.num_preemptions, stats="preemptions"),
    Metric("triptych_kv_pruned_sequences_total", COUNTER, "Sequences that dropped KV of text.",
           lambda state: state.sequences.scheduler.pruner.counts.sequences,
           stats="kv_pruned_sequences"),
    Metric("triptych_kv_pruned_tokens_total", COUNTER, "Text tokens whose KV was dropped.",
           lambda state: state.sequences.scheduler.pruner.counts.tokens, stats="kv_pruned_tokens"),
    Metric("triptych_kv_prune_seconds_total", COUNTER, "Time to drop KV of text.",
           lambda state: state.step_loop.pruning.seconds, stats="kv_prune_seconds"),
    Metric("triptych_out_of_memory_total", COUNTER, "Calls that ran out of memory.",
           lambda state: state.context.device_errors.num_out_of_memory, stats="out_of_memory"),
    Metric("triptych_prefix_cache_queries_total", COUNTER, "Prompt tokens looked up.",
           lambda state: _by_kind(state.step_loop.prefix, "queries"),
           label="kind", stats="prefix_cache_queries"),
    Metric("triptych_prefix_cache_hits_total", COUNTER, "Prompt tokens found.",
           lambda state: _by_kind(state.step_loop.prefix, "hits"),
           label="kind", stats="prefix_cache_hits"),
    Metric("triptych_grammars_compiled_total", COUNTER, "Grammars compiled.",
           lambda state: _constrained(state, "num_compiled")),
    Metric("triptych_grammar_compile_seconds_total", COUNTER, "Time to compile grammars.",
           lambda state: _constrained(state, "compile_seconds")),
    Metric("triptych_token_masks_total", COUNTER, "Masks of constrained tokens.",
           lambda state: _constrained(state, "num_masks")),
    Metric("triptych_token_mask_seconds_total", COUNTER, "Time to fill masks.",
           lambda state: _constrained(state, "mask_seconds")),
    Metric("triptych_prefetched_tokens_total", COUNTER, "Tokens that prefetches computed.",
           lambda state: _prefetched(state.sequences.pool),
           label="use", stats="prefetched_tokens"),
    Metric("triptych_window_cache_bytes", GAUGE, "Bytes of cached states of windows.",
           lambda state: _of_windows(state, "num_bytes")),
    Metric("triptych_window_cache_hits_total", COUNTER, "Windows whose state was cached.",
           lambda state: _of_windows(state, "num_hits")),
    Metric("triptych_window_cache_misses_total", COUNTER, "Windows whose state was computed.",
           lambda state: _of_windows(state, "num_misses")),
)  # fmt: skip


def _constrained(state: State, field: str) -> float:
    constraints = state.context.constraints
    return 0.0 if constraints is None else float(getattr(constraints, field))


def _prefetched(pool: BlockPool) -> dict[str, float]:
    """Prefetched tokens by use: those that a request hit, those evicted before, and the rest."""
    used, wasted = pool.num_prefetched_used, pool.num_prefetched_wasted
    blocks = {"used": used, "wasted": wasted, "computed": pool.num_prefetched}
    return {use: count * pool.block_size for use, count in blocks.items()}


def _of_windows(state: State, field: str) -> float | None:
    """A count of the cache of windows; None without one."""
    windows = state.context.runner.windows
    return None if windows is None else getattr(windows, field)


def _by_kind(prefix: PrefixCounts, field: str) -> dict[str, float]:
    visual = getattr(prefix, f"visual_{field}")
    return {"text": getattr(prefix, field) - visual, "visual": visual}
