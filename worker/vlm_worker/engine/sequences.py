"""The sequences of the engine thread: submit, receive from a peer, adopt, end.

    submit --> waiting --> prefill --> [held --> adopt] --> decode --> finished
    reserve --> receive --> import_blocks or confirm_blocks --> start_decode --^

`finish` or `fail` frees everything that a sequence holds and sends its last event.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np

from vlm_worker.core.admission import MAX_CANDIDATES
from vlm_worker.core.block_kinds import BlockKinds
from vlm_worker.core.grammars import Matcher
from vlm_worker.core.kv_cache import BlockPool, is_visual_block
from vlm_worker.core.limits import Demand, QueueLimit
from vlm_worker.core.measurements import KVUsage
from vlm_worker.core.persistent_batch import PersistentBatch, max_total_tokens, stop_ids
from vlm_worker.core.pruning import kept_permille_of
from vlm_worker.core.request_validation import validate_request, validate_reservation
from vlm_worker.core.scheduler import Scheduler
from vlm_worker.core.sequence import Lane, Sequence, Status
from vlm_worker.core.step_time import StepTimeModel, retry_after
from vlm_worker.engine.attempts import (
    Attempt,
    BlockLoan,
    EngineContext,
    Held,
    ReadableBlocks,
    ReservedBlocks,
    ResourceKind,
    Track,
)
from vlm_worker.engine.constraints import matcher_of
from vlm_worker.engine.events import EventStream, PrefillEvent
from vlm_worker.engine.prompt_embeddings import PromptEmbeddings
from vlm_worker.engine.runner import Runner, run_device_copy
from vlm_worker.engine.settings import EngineSettings
from vlm_worker.errors import (
    CorruptTransferError,
    DrainingError,
    DuplicateError,
    EngineError,
    GoneError,
    OverloadedError,
    WorkerError,
)
from vlm_worker.types import FinishedEvent, FinishReason, ImageItem, Request, RequestKey
from vlm_worker.wire.buffers import Regions

Positions = Callable[[Seq[int], Seq[ImageItem]], tuple[np.ndarray, int]]
"""`(token_ids, items) -> ([P, T] positions, delta)`."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReceiveResult:
    """The first block that the peer delivers; earlier ones are in the prefix cache.

    `memory` is of the blocks from there on, lent to the receiver until `return_blocks`. It is None
    if the engine writes the blocks (`import_blocks`).
    """

    first_block: int
    memory: Regions | None = None


class Sequences:
    """The generations of one engine. Engine thread only. `Engine` documents the commands.

    The step loop updates `work`, the step time model. `on_new` is called before a new request takes
    blocks.
    """

    def __init__(
        self, context: EngineContext, positions: Positions, prompt_embeddings: PromptEmbeddings
    ) -> None:
        runner, settings = context.runner, context.settings
        self.pool = _make_pool(runner, settings)
        self.batch = PersistentBatch(
            settings.max_num_seqs,
            max_model_len=settings.max_model_len if runner.kv_layout else 1,
            block_size=self.pool.block_size,
            kinds=self.pool.kinds,
            eos_token_ids=settings.eos_token_ids,
        )
        self.scheduler = Scheduler(
            self.pool,
            self.batch,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            watermark_blocks=self.pool.capacity * settings.watermark_percent // 100,
            max_pending_blocks=self.pool.capacity * settings.max_unread_percent // 100,
            whole_images=settings.whole_images,
            long_prefill_tokens=settings.long_prefill_tokens,
            settings=settings.admission,
        )
        self.attempts = context.attempts
        self.settings = settings
        self.readable_blocks = ReadableBlocks(runner)
        self.num_requests = 0
        self.usage = KVUsage(runner.kv_layout)
        self.work = StepTimeModel()
        self.on_new: Callable[[], None] = lambda: None
        self._limits = context.limits
        self._positions, self._runner = positions, runner
        self._prompt_embeddings, self._constraints = prompt_embeddings, context.constraints
        self._events, self._clock = context.events, context.clock
        self._draining, self._arrivals = False, 0

    # ---- in --------------------------------------------------------------------------------------
    def submit(
        self,
        request: Request,
        stream: EventStream[PrefillEvent],
        *,
        for_peer: bool,
        matcher: Matcher | None = None,
    ) -> None:
        try:
            self.check_new(request.key)
            self._check_limits(len(request.token_ids), for_peer=for_peer)
            sequence = self.make(request, for_peer=for_peer, matcher=matcher)
        except WorkerError as error:
            self._events.fail(stream, error)
            return
        attempt = self.start(sequence)
        attempt.stream, attempt.first_only, attempt.supplied = stream, for_peer, True
        sequence.reserved_blocks = self._redeem(attempt, sequence)
        if request.num_delivered_tokens and self._is_stop(request.token_ids[-1], sequence):
            self.scheduler.add(sequence)
            self.finish(sequence, FinishReason.STOP)  # its pod was lost before it could say so
            return
        start = self.scheduler.look_up(sequence)
        if not self._prompt_embeddings.is_cached(sequence, start):
            sequence.lane = Lane.VISION
        if (
            len(self.scheduler.waiting) < MAX_CANDIDATES  # else the steps ask, in the queue's order
            and self._prompt_embeddings.needs(sequence, start)
            and self.scheduler.admission.can_request_embeddings(sequence)
        ):
            self.request_embeddings(sequence, start)
        self.scheduler.add(sequence)

    def check_new(self, key: RequestKey) -> None:
        """Raise if no sequence or reservation may begin under this key."""
        self.check_loaded()
        if self._draining:
            raise DrainingError("this worker is draining")
        self.on_new()
        attempt = self.attempts.get(key)
        in_use = attempt is not None and attempt.sequence is not None
        if in_use or self.attempts.has_ended(key):
            raise DuplicateError(f"{key.request_id} attempt {key.attempt} was used already")

    def check_loaded(self) -> None:
        """Raise EngineError if this engine has no KV."""
        if not self.pool.capacity:
            raise EngineError("neither prefill nor decode is loaded here")

    def _check_limits(self, num_tokens: int, *, for_peer: bool) -> None:
        """Raise OverloadedError if a prompt may not wait.

        With `for_peer`, it may not wait either while peers leave too much KV unread.
        """
        waiting, max_tokens = self.scheduler.waiting, self.settings.max_waiting_tokens
        demands = [
            Demand(QueueLimit.REQUESTS, len(waiting), 1, self.settings.max_waiting),
            Demand(QueueLimit.TOKENS, waiting.num_tokens, num_tokens, max_tokens),
        ]
        if for_peer:
            pending = self.scheduler.pending_transfers
            unread = Demand(QueueLimit.UNREAD, pending.num_held_blocks, 0, pending.max_blocks)
            demands.append(unread)
        self._limits.check(demands, retry_after_seconds=self.retry_after_seconds)

    def predict(self, num_tokens: int) -> float:
        """Predicted seconds to compute `num_tokens` prompt tokens."""
        return self.work.predict(num_tokens, units_per_step=self.settings.max_num_batched_tokens)

    def retry_after_seconds(self) -> float:
        """Predicted seconds until the queue is computed and a running sequence has ended."""
        seconds = self.batch.min_steps_to_finish * self.predict(len(self.batch))
        return retry_after(self.predict(self.scheduler.waiting.num_tokens) + seconds)

    def make(self, request: Request, *, for_peer: bool, matcher: Matcher | None = None) -> Sequence:
        """Make and count a sequence; raises the error of a request that cannot run here."""
        arrival = self._arrivals + 1
        sequence = self.build(request, arrival=arrival, for_peer=for_peer, matcher=matcher)
        self._arrivals += 1
        self.num_requests += 1
        return sequence

    def build(
        self, request: Request, *, arrival: int, for_peer: bool, matcher: Matcher | None = None
    ) -> Sequence:
        """Build a sequence; raises the error of a request that cannot run here."""
        settings = self.settings
        bounds = settings.prompt_bounds
        validate_request(request, **bounds, vocab_size=self._runner.vocab_size)
        try:
            positions, delta = self._positions(request.token_ids, request.items)
        except WorkerError:
            raise
        except Exception as error:  # nothing that a request says may end the thread
            raise EngineError(f"the positions of the prompt failed: {error!r}") from error
        return Sequence(
            request=request,
            arrival=arrival,
            arrived_at=self._clock(),
            token_ids=np.array(request.token_ids, np.int32),
            positions=positions,
            position_delta=delta,
            for_peer=for_peer,
            whole_prompt=settings.whole_prompts,
            kept_permille=kept_permille_of(request, settings.kv_prune_text),
            embeddings=[None] * len(request.items),
            matcher=matcher_of(request, self._constraints, matcher),
        )

    def _is_stop(self, token_id: int, sequence: Sequence) -> bool:
        return token_id in stop_ids(sequence, eos_token_ids=self.settings.eos_token_ids)

    def start(self, sequence: Sequence) -> Attempt:
        """Let the attempt of its key own a new sequence."""
        attempt = self.attempts.open(sequence.request.key)
        attempt.sequence, sequence.output = sequence, attempt
        attempt.acquire(Held(ResourceKind.SEQUENCE, functools.partial(self._discard, sequence)))
        return attempt

    def _redeem(self, attempt: Attempt, sequence: Sequence) -> int:
        """The number of reserved blocks; a reservation that is too small for the prompt ends."""
        needed = self.pool.kinds.of(sequence).num_blocks(sequence.num_tokens)
        for reserved in attempt.of(ReservedBlocks):
            if reserved.num_blocks >= needed:
                attempt.confirm(reserved)  # the sequence has them now
                return reserved.num_blocks
            attempt.release(reserved)
        return 0

    @property
    def num_held(self) -> int:
        """Sequences that are held for a peer or received from one."""
        scheduler = self.scheduler
        queued = len(scheduler.waiting) + len(scheduler.admission.ready)
        return self.attempts.totals[ResourceKind.SEQUENCE].count - queued - len(self.batch)

    def get(self, key: RequestKey, *, status: Status | None = None) -> Sequence:
        """The live sequence of a key, in the given status, or GoneError."""
        attempt = self.attempts.get(key)
        sequence = attempt.sequence if attempt is not None else None
        if sequence is None or (status is not None and sequence.status is not status):
            raise GoneError(f"{key.request_id} attempt {key.attempt} is not here")
        return sequence

    def publish(self, sequence: Sequence, num_blocks: int) -> None:
        """Let peers read the first blocks of a sequence."""
        attempt: Attempt = sequence.output
        self.readable_blocks.publish(attempt.key, sequence.blocks[:num_blocks])
        kind = ResourceKind.READABLE_BLOCKS
        if all(resource.kind is not kind for resource in attempt.resources):
            forget = functools.partial(self.readable_blocks.forget, attempt.key)
            attempt.acquire(Held(kind, forget))

    def request_embeddings(self, sequence: Sequence, start: int) -> None:
        """Request embeddings for the tokens from `start` on.

        If a missing embedding has no source, the sequence finishes as DRAINED, to be continued on
        another worker.
        """
        if not self._prompt_embeddings.request_embeddings(sequence, start):
            self.finish(sequence, FinishReason.DRAINED)

    def release_pins(self, sequence: Sequence) -> None:
        """Release the embeddings of a preempted sequence.

        If it could not request them again, it finishes as DRAINED; see `request_embeddings`.
        """
        if self._prompt_embeddings.can_supply(sequence, self.scheduler.num_cached_tokens(sequence)):
            self._prompt_embeddings.release_pins(sequence)
        else:
            self.finish(sequence, FinishReason.DRAINED)

    # ---- KV from a peer, or from prefill here ----------------------------------------------------
    def reserve(self, key: RequestKey, num_tokens: int) -> None:
        attempt = self.attempts.get(key)
        if attempt is not None and (attempt.sequence is not None or attempt.of(ReservedBlocks)):
            return
        self.check_new(key)
        validate_reservation(num_tokens, max_model_len=self.settings.max_model_len)
        count = self.pool.most_blocks_for(num_tokens)  # its images are not known yet
        available = self.pool.num_available
        if not self.pool.reserve(count, keep=self.scheduler.admission.withheld_blocks):
            raise OverloadedError(
                f"{num_tokens} tokens need {count} KV blocks; {available} are available",
                retry_after_seconds=self.retry_after_seconds(),
            )
        self.attempts.open(key).acquire(ReservedBlocks(self.pool, count))

    def receive(
        self, request: Request, *, in_place: bool, matcher: Matcher | None = None
    ) -> ReceiveResult:
        key, pool = request.key, self.pool
        reserved = next(iter(self.attempts.of(key, ReservedBlocks)), None)
        if reserved is None:
            raise GoneError(f"{key.request_id} attempt {key.attempt} has no reservation here")
        sequence = self.make(request, for_peer=False, matcher=matcher)
        num_tokens = sequence.num_tokens
        self.scheduler.look_up(sequence)
        # the first token is known already, so that a hit may cover the whole prompt here
        shared = pool.match(sequence.hashes)
        needed = pool.kinds.of(sequence).num_blocks(num_tokens)
        blocks = pool.take(needed - len(shared), shared=shared, reserved=reserved.num_blocks)
        if blocks is None:
            raise OverloadedError(
                f"{reserved.num_blocks} KV blocks are reserved, the request needs {needed}",
                retry_after_seconds=self.retry_after_seconds(),
            )
        pool.count_used(shared)
        sequence.status = Status.RECEIVING
        sequence.blocks = shared + blocks
        sequence.num_computed_tokens = num_tokens
        attempt = self.start(sequence)
        attempt.missing_blocks = set(range(len(shared), needed))
        attempt.confirm(reserved)  # the sequence has them now
        memory = self._runner.block_memory(blocks, to_write=True) if in_place else None
        if memory is not None:
            self.pool.take(0, shared=blocks)
            attempt.acquire(BlockLoan(self.pool, blocks, to_write=True))
        return ReceiveResult(len(shared), memory)

    def return_loan(self, key: RequestKey) -> None:
        loans = self.attempts.of(key, BlockLoan)
        self.attempts.return_loans(key, [loan for loan in loans if loan.to_write])

    def lend(
        self, key: RequestKey, first_block: int, end_block: int, loans: list[BlockLoan]
    ) -> None:
        """Append a loan to `loans`."""
        blocks = self.readable_blocks.lookup(key, first_block, end_block - first_block)
        self.pool.take(0, shared=blocks)
        loans.append(BlockLoan(self.pool, blocks, to_write=False))
        self.attempts.by_key[key].acquire(loans[-1])

    def import_blocks(self, key: RequestKey, first_block: int, data: memoryview) -> None:
        sequence = self.get(key, status=Status.RECEIVING)
        layout = self._runner.kv_layout
        assert layout is not None
        count, rest = divmod(data.nbytes, layout.block_bytes)
        numbers = range(first_block, first_block + count)
        if rest:
            raise CorruptTransferError(
                f"{data.nbytes} bytes came; a block has {layout.block_bytes}"
            )
        _check_missing(sequence, numbers)
        blocks = [sequence.blocks[number] for number in numbers]
        run_device_copy("writing KV blocks", lambda: self._runner.import_blocks(blocks, data))
        self._record_blocks(sequence, numbers)

    def confirm_blocks(self, key: RequestKey, first_block: int, num_blocks: int) -> None:
        sequence = self.get(key, status=Status.RECEIVING)
        numbers = range(first_block, first_block + num_blocks)
        _check_missing(sequence, numbers)
        self._record_blocks(sequence, numbers)

    def start_decode(
        self, key: RequestKey, first_token_id: int, stream: EventStream[PrefillEvent]
    ) -> None:
        sequence = self.get(key, status=Status.RECEIVING)
        attempt, vocab_size = sequence.output, self._runner.vocab_size
        if attempt.stream is not None:
            raise DuplicateError(f"{key.request_id} attempt {key.attempt} decodes already")
        if attempt.missing_blocks:
            raise CorruptTransferError(f"blocks {sorted(attempt.missing_blocks)} never came")
        if not 0 <= first_token_id < vocab_size:
            raise CorruptTransferError(
                f"the first token is {first_token_id}; the model's ids are below {vocab_size}"
            )
        attempt.stream = stream
        sequence.token_ids = np.append(sequence.token_ids, np.int32(first_token_id))
        max_tokens = max_total_tokens(sequence, max_model_len=self.settings.max_model_len)
        if self._is_stop(first_token_id, sequence):
            self.finish(sequence, FinishReason.STOP)
        elif sequence.num_tokens >= max_tokens:
            self.finish(sequence, FinishReason.LENGTH)
        else:
            self.scheduler.resume(sequence)

    def _record_blocks(self, sequence: Sequence, numbers: range) -> None:
        """Mark blocks as complete and publish them in the prefix cache."""
        sequence.output.missing_blocks.difference_update(numbers)
        for number in numbers:
            if number < len(sequence.hashes):
                end = self.pool.kinds.of(sequence).num_tokens(number + 1)
                is_visual = is_visual_block(sequence.items, end=end)
                block, block_hash = sequence.blocks[number], sequence.hashes[number]
                self.pool.publish(block, block_hash, is_visual=is_visual)

    def adopt(self, request: Request, stream: EventStream[PrefillEvent]) -> None:
        attempt = self.attempts.get(request.key)
        sequence = attempt.sequence if attempt is not None else None
        if sequence is None or not sequence.for_peer:
            self._events.fail(stream, GoneError(f"{request.key.request_id} is not held here"))
            return
        sequence.for_peer = False
        self.scheduler.pending_transfers.discard(sequence)
        if sequence.status is Status.HELD:
            sequence.output.stream = stream
            self.scheduler.resume(sequence)
        else:
            sequence.output.successor_stream = stream

    # ---- out -------------------------------------------------------------------------------------
    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence with FinishedEvent."""
        sequence.output.end(Track.GENERATION)
        if reason is not FinishReason.DRAINED:
            self.usage.add(sequence)
        num_tokens = sequence.num_tokens - sequence.request.num_prompt_tokens
        for stream in (sequence.output.stream, sequence.output.successor_stream):
            self._events.emit(stream, FinishedEvent(reason, num_tokens))
            self._events.end(stream)

    def fail(self, sequence: Sequence, error: WorkerError) -> None:
        """End a sequence with an error."""
        sequence.output.end(Track.GENERATION)
        for stream in (sequence.output.stream, sequence.output.successor_stream):
            self._events.fail(stream, error)

    def release(self, key: RequestKey) -> None:
        attempt = self.attempts.get(key)
        if attempt is not None and attempt.stream is None:
            attempt.end(Track.GENERATION)

    def drain(self, error: DrainingError) -> int:
        """KV held for a peer stays until its lease ends."""
        self._draining = True
        ending = []
        for attempt in list(self.attempts.by_key.values()):
            if attempt.sequence is None:
                attempt.end(Track.GENERATION)
            elif attempt.stream is not None:
                ending.append(attempt.sequence)
        for sequence in ending:
            if sequence.output.first_only:
                self.fail(sequence, error)
            else:
                self.finish(sequence, FinishReason.DRAINED)
        return len(ending)

    def fail_pending(self, error: WorkerError) -> None:
        """End every stream; nothing is freed."""
        for sequence in self.attempts.sequences():
            self._events.fail(sequence.output.stream, error)
            self._events.fail(sequence.output.successor_stream, error)

    def _discard(self, sequence: Sequence) -> None:
        """Free what scheduler and encoder cache hold for a sequence; its key is not used again."""
        attempt: Attempt = sequence.output
        self._prompt_embeddings.drop_all(sequence)
        if sequence.status is not Status.FINISHED:  # the scheduler ends those that it finishes
            self.scheduler.remove(sequence)
        attempt.sequence = None
        self.attempts.remember(attempt.key)


def _make_pool(runner: Runner, settings: EngineSettings) -> BlockPool:
    """The pool of the runner's KV blocks; an empty one if it has no KV."""
    layout = runner.kv_layout
    if layout is None:
        return BlockPool(1, block_size=1)
    pool = BlockPool(
        runner.num_blocks,
        block_size=layout.block_size,
        kinds=BlockKinds.of_layout(layout),
        visual_percent=settings.kv_visual_percent,
    )
    num_tokens = pool.capacity * pool.block_size
    if num_tokens < settings.max_model_len:
        raise ValueError(
            f"the KV buffer holds {num_tokens} tokens, fewer than max_model_len "
            f"({settings.max_model_len}): give it more memory, or lower max_model_len"
        )
    pool.kinds.check_chunks(settings.min_prompt_tokens)
    return pool


def _check_missing(sequence: Sequence, numbers: range) -> None:
    missing = sequence.output.missing_blocks
    if not numbers or not missing.issuperset(numbers):
        raise CorruptTransferError(
            f"blocks {numbers.start} to {numbers.stop} came, and {sorted(missing)} are missing"
        )
