"""The prefetch of one prompt while the engine has no request. Engine thread only.

    start ─▶ turn: one chunk ─▶ turn: one chunk ─▶ ... ─▶ its blocks stay in the prefix cache
                └─ give_way: a request came; blocks and pins are freed before it takes any

A prefetch has its own scheduler and batch of one row over the engine's block pool. So no queue, no
limit, no counter of requests and no step of a request ever contains it: a request waits for at most
the chunk that is being computed. It encodes nothing: an embedding that no cache in memory has ends
it (docs/decisions/0045).

    prompt   |b b b b|b b b b|b b . .      whole blocks only: a hit covers no others
    image            ^^^^^^^^^^^^          a block that ends inside an image is left out

Laws (tests/worker/engine/test_prefetches.py):

    P1  a request has the same tokens with prefetches as without
    P2  from a request's arrival on, at most one chunk of a prefetch is computed before its step
    P3  whenever a prefetch ends, its blocks and its pins are free
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Final

from vlm_worker.core.block_kinds import BlockKinds
from vlm_worker.core.encoder_cache import Entry
from vlm_worker.core.persistent_batch import PersistentBatch
from vlm_worker.core.scheduler import Scheduler
from vlm_worker.core.sequence import Sequence, Status
from vlm_worker.core.step_inputs import BatchBuilder
from vlm_worker.core.step_values import StepPlan
from vlm_worker.engine.attempts import EngineContext
from vlm_worker.engine.encode_requests import EncodeRequests
from vlm_worker.engine.sequences import Sequences
from vlm_worker.errors import DrainingError
from vlm_worker.types import Request, RequestKey, SamplingParams
from vlm_worker.wire.prefetch_messages import PrefetchOutcome, PrefetchResult

logger = logging.getLogger(__name__)

CHUNK_TOKENS: Final = 256
"""Tokens of a prefetch per step: a request that arrives meanwhile waits for them."""

Answer = Callable[[PrefetchResult], None]


@dataclasses.dataclass(eq=False, slots=True)
class _Running:
    """The prefetch that runs. `hit_blocks` were cached before it."""

    sequence: Sequence
    answer: Answer
    hit_blocks: int
    num_computed: int
    pins: dict[int, Entry] = dataclasses.field(default_factory=dict)


class Prefetches:
    """At most one prefetch of an engine. `State` gives it turns without other work."""

    def __init__(
        self, context: EngineContext, sequences: Sequences, encode_requests: EncodeRequests
    ) -> None:
        settings = context.settings
        self._context = context
        self._sequences = sequences
        self._encode_requests = encode_requests
        self._chunk_tokens = settings.max_num_batched_tokens
        if not settings.whole_images:  # else an image must fit into a chunk
            self._chunk_tokens = min(self._chunk_tokens, CHUNK_TOKENS)
        self._steps: tuple[Scheduler, BatchBuilder] | None = None
        self._running: _Running | None = None
        self._draining = False

    @property
    def num_blocks(self) -> int:
        """Blocks that the running prefetch has."""
        return len(self._running.sequence.blocks) if self._running is not None else 0

    def start(self, request: Request, answer: Answer, *, is_idle: bool) -> None:
        """Start a prefetch if `is_idle` and no other runs. `answer` gets its end, once.

        Raises:
            DrainingError: this worker takes no new work.
            WorkerError: the request cannot run here (`Sequences.build`).
        """
        if self._draining:
            raise DrainingError("this worker is draining")
        pool = self._sequences.pool
        cut = whole_blocks(request, kinds=pool.kinds)
        if cut is None:
            answer(PrefetchResult(PrefetchOutcome.CACHED))
            return
        if self._running is not None or not is_idle:
            answer(PrefetchResult(PrefetchOutcome.BUSY))
            return
        sequence = self._sequences.build(cut, arrival=0, for_peer=False)
        scheduler, _ = self._scheduler()
        scheduler.look_up(sequence)
        num_hits = len(pool.match(sequence.hashes))
        num_cached = pool.kinds.of(sequence).num_tokens(num_hits)
        if num_cached == sequence.num_tokens:
            answer(PrefetchResult(PrefetchOutcome.CACHED, num_cached))
            return
        scheduler.add(sequence)
        self._running = _Running(sequence, answer, num_hits, num_cached)

    def turn(self) -> bool:
        """Compute one chunk; False if no prefetch runs."""
        running = self._running
        if running is None:
            return False
        scheduler, builder = self._scheduler()
        if not self._supply(running):
            self._end(PrefetchOutcome.NO_EMBEDDING)
            return True
        schedule = scheduler.schedule(now=self._context.clock())
        if schedule.plan is None:
            self._end(PrefetchOutcome.NO_BLOCKS)
        elif not self._compute(running, schedule.plan, scheduler, builder):
            self._end(PrefetchOutcome.FAILED)
        elif running.sequence.status is Status.FINISHED:
            self._end(PrefetchOutcome.COMPUTED)
        return True

    def give_way(self) -> None:
        """End the running prefetch, because a request came."""
        if self._running is not None:
            self._end(PrefetchOutcome.YIELDED)

    def cancel(self, key: RequestKey) -> None:
        """End the prefetch of this key, if it runs."""
        if self._running is not None and self._running.sequence.request.key == key:
            self._end(PrefetchOutcome.YIELDED)

    def drain(self) -> None:
        """End the running prefetch and refuse new ones."""
        self._draining = True
        self.give_way()

    def _scheduler(self) -> tuple[Scheduler, BatchBuilder]:
        """Scheduler and builder of prefetches; a process without any makes none."""
        if self._steps is None:
            settings, pool = self._context.settings, self._sequences.pool
            batch = PersistentBatch(
                1,
                max_model_len=settings.max_model_len,
                block_size=pool.block_size,
                kinds=pool.kinds,
            )
            scheduler = Scheduler(
                pool,
                batch,
                max_num_batched_tokens=self._chunk_tokens,
                whole_images=settings.whole_images,
            )
            builder = BatchBuilder(
                batch,
                max_num_batched_tokens=self._chunk_tokens,
                whole_images=settings.whole_images,
            )
            self._steps = scheduler, builder
        return self._steps

    def _supply(self, running: _Running) -> bool:
        """Pin the embeddings of the next chunk and unpin those before; False if one is missing."""
        sequence, start = running.sequence, running.num_computed
        for number, item in enumerate(sequence.items):
            if item.end <= start:
                self._unpin(running, number)
            elif item.offset < start + self._chunk_tokens and number not in running.pins:
                entry = self._encode_requests.cached(
                    item, (sequence.request.key, "prefetch", number)
                )
                if entry is None:
                    return False
                running.pins[number] = entry
                sequence.embeddings[number] = entry.buffer
        return True

    def _compute(
        self, running: _Running, plan: StepPlan, scheduler: Scheduler, builder: BatchBuilder
    ) -> bool:
        """Run one step; False if it fails. The sampled token is dropped."""
        inputs = builder.build(plan)
        self._context.events.flush()
        try:
            output = self._context.runner.execute(inputs)
        except Exception as error:  # a model may raise anything; only the prefetch ends
            logger.exception("prefetch failed")
            self._context.device_errors.record(error)
            return False
        if not output.has_shape(len(inputs.sample_rows), inputs.scored):
            logger.error("prefetch failed: the runner did not answer for its rows")
            return False
        running.num_computed += plan.num_tokens
        # The blocks are marked while they have an owner: `update` frees those of a complete prompt.
        blocks = running.sequence.blocks
        outcome = scheduler.update(plan, output.token_ids)
        shape = scheduler.pool.kinds.of(running.sequence)
        num_written = shape.num_full(running.num_computed)
        if not outcome.failed:
            scheduler.pool.count_prefetched(blocks[running.hit_blocks : num_written])
        return not outcome.failed

    def _unpin(self, running: _Running, number: int) -> None:
        running.sequence.embeddings[number] = None
        entry = running.pins.pop(number, None)
        if entry is not None:
            key = running.sequence.request.key
            self._encode_requests.unpin(entry, (key, "prefetch", number))

    def _end(self, outcome: PrefetchOutcome) -> None:
        """Free everything that the prefetch holds, and answer."""
        running, self._running = self._running, None
        assert running is not None
        for number in tuple(running.pins):
            self._unpin(running, number)
        if running.sequence.status is not Status.FINISHED:
            self._scheduler()[0].remove(running.sequence)
        shape = self._sequences.pool.kinds.of(running.sequence)
        num_cached = shape.num_tokens(running.hit_blocks)
        running.answer(PrefetchResult(outcome, num_cached, running.num_computed - num_cached))


def whole_blocks(request: Request, *, kinds: BlockKinds) -> Request | None:
    """The request cut to the whole blocks that it shares with every continuation; None if none.

    The cut is before an image that does not end within these blocks.
    """
    shape = kinds.of_items(request.items)
    end = shape.num_tokens(shape.num_full(len(request.token_ids)))
    items = request.items
    while True:  # without an image, the blocks before it may end elsewhere
        for item in reversed(items):
            if item.offset < end < item.end:
                end = shape.num_tokens(shape.num_full(item.offset))
        kept = tuple(item for item in items if item.end <= end)
        if len(kept) == len(items):
            break
        items, shape = kept, kinds.of_items(kept)
        end = shape.num_tokens(shape.num_full(end))
    if not end:
        return None
    return dataclasses.replace(
        request,
        token_ids=request.token_ids[:end],
        num_prompt_tokens=end,
        items=items,
        sampling=SamplingParams(max_tokens=1),
    )
