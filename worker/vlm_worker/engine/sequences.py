"""The sequences of the engine thread: how they come in, are found, and end.

    submit --> waiting --> prefill --> [held --> adopt] --> decode --> finished     (here)
    reserve --> receive --> import_blocks --> start_decode ----^                    (`handover`)

Whichever way one ends, `finish` or `fail` frees all it had and says the last word.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Final

import numpy as np

from vlm_worker.core.admission import check_request
from vlm_worker.core.blocks import BlockPool
from vlm_worker.core.entrance import MAX_TRIES
from vlm_worker.core.scheduler import Scheduler
from vlm_worker.core.sequence import Lane, Sequence, Status
from vlm_worker.core.table import SequenceTable
from vlm_worker.engine.events import CancelOutcome, EventStream, PrefillEvent
from vlm_worker.engine.exports import Exports
from vlm_worker.engine.outbox import Outbox
from vlm_worker.engine.prompt_images import PromptImages
from vlm_worker.engine.room import Room
from vlm_worker.engine.runner import Runner
from vlm_worker.engine.settings import EngineSettings
from vlm_worker.engine.sink import Sink
from vlm_worker.engine.usage import KVUsage
from vlm_worker.errors import (
    CancelledError,
    DrainingError,
    DuplicateError,
    EngineError,
    GoneError,
    WorkerError,
)
from vlm_worker.types import FinishedEvent, FinishReason, ImageItem, Request, RequestKey

Positions = Callable[[Seq[int], Seq[ImageItem]], tuple[np.ndarray, int]]
"""`(token_ids, items) -> ([P, T] positions, delta)`."""

NUM_REMEMBERED: Final = 4096
"""Keys of ended sequences that are still told apart from unknown ones."""


class Sequences:
    """All sequences and reservations of one engine. Lives on the engine thread."""

    def __init__(
        self,
        runner: Runner,
        *,
        settings: EngineSettings,
        positions: Positions,
        images: PromptImages,
        outbox: Outbox,
        clock: Callable[[], float],
    ) -> None:
        self.pool = _make_pool(runner, settings)
        self.table = SequenceTable(
            settings.max_num_seqs,
            max_model_len=settings.max_model_len if runner.kv_layout else 1,
            block_size=self.pool.block_size,
            eos_token_ids=settings.eos_token_ids,
        )
        self.scheduler = Scheduler(
            self.pool,
            self.table,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            watermark_blocks=self.pool.capacity * settings.watermark_percent // 100,
            max_unread_blocks=self.pool.capacity * settings.max_unread_percent // 100,
            whole_images=settings.whole_images,
            long_prefill_tokens=settings.long_prefill_tokens,
            rules=settings.admission,
        )
        self.settings = settings
        self.live: dict[RequestKey, Sequence] = {}
        self.reservations: dict[RequestKey, int] = {}
        self.exports = Exports(runner)
        self.num_requests = 0
        self.usage = KVUsage(runner.kv_layout)
        self.room = Room(self.scheduler, settings=settings)
        self._positions = positions
        self._vocab_size = runner.vocab_size
        self._images = images
        self._outbox = outbox
        self._clock = clock
        self._draining = False
        self._arrivals = 0
        self._ended: collections.OrderedDict[RequestKey, None] = collections.OrderedDict()

    # ---- in --------------------------------------------------------------------------------------
    def submit(self, request: Request, stream: EventStream[PrefillEvent], *, hold: bool) -> None:
        """See `Engine.submit_prefill`."""
        try:
            self.check_new(request.key)
            self.room.check(len(request.token_ids), hold=hold)
            sequence = self.make(request, hold=hold)
        except WorkerError as error:
            self._outbox.fail(stream, error)
            return
        sequence.promised = self._claim(request.key, num_tokens=sequence.num_tokens)
        sequence.sink = Sink(stream=stream, first_only=hold, supplied=True)
        self.live[request.key] = sequence
        start = self.scheduler.look_up(sequence)
        if not self._images.on_hand(sequence, start):
            sequence.lane = Lane.VISION
        if (
            len(self.scheduler.waiting) < MAX_TRIES  # else the steps ask, in the queue's order
            and self._images.needs(sequence, start)
            and self.scheduler.entrance.may_ask(sequence)
        ):
            self.gather(sequence, start)
        self.scheduler.add(sequence)

    def check_new(self, key: RequestKey) -> None:
        """Raise where nothing may begin under this key."""
        if not self.pool.capacity:
            raise EngineError("neither prefill nor decode is loaded here")
        if self._draining:
            raise DrainingError("this worker is draining")
        if key in self.live or key in self._ended:
            raise DuplicateError(f"{key.request_id} attempt {key.attempt} was used already")

    def make(self, request: Request, *, hold: bool) -> Sequence:
        """A sequence for a request that can run here, or the error that says why it cannot."""
        settings = self.settings
        check_request(
            request,
            max_model_len=settings.max_model_len,
            max_image_tokens=settings.min_prompt_tokens if settings.whole_images else None,
            vocab_size=self._vocab_size,
        )
        try:
            positions, delta = self._positions(request.token_ids, request.items)
        except WorkerError:
            raise
        except Exception as error:  # nothing that a request says may end the thread
            raise EngineError(f"the positions of the prompt failed: {error!r}") from error
        self._arrivals += 1
        self.num_requests += 1
        return Sequence(
            request=request,
            arrival=self._arrivals,
            arrived_at=self._clock(),
            token_ids=np.array(request.token_ids, np.int32),
            positions=positions,
            position_delta=delta,
            hold=hold,
            embeddings=[None] * len(request.items),
        )

    def _claim(self, key: RequestKey, *, num_tokens: int) -> int:
        """Blocks that a reservation set aside; one too small for the prompt is given back."""
        promised = self.reservations.pop(key, 0)
        if promised < self.pool.blocks_for(num_tokens):
            self.pool.unpromise(promised)
            return 0
        return promised

    @property
    def num_held(self) -> int:
        """Sequences that nobody listens to: held for a peer, or being received."""
        scheduler = self.scheduler
        queued = len(scheduler.waiting) + len(scheduler.entrance.ready)
        return len(self.live) - queued - len(self.table)

    def get(self, key: RequestKey, *, status: Status | None = None) -> Sequence:
        """The live sequence of a key, in the given status, or GoneError."""
        sequence = self.live.get(key)
        if sequence is None or (status is not None and sequence.status is not status):
            raise GoneError(f"{key.request_id} attempt {key.attempt} is not here")
        return sequence

    def has_ended(self, key: RequestKey) -> bool:
        """Whether a sequence of this key was here, and is over."""
        return key in self._ended

    def gather(self, sequence: Sequence, start: int) -> None:
        """Bring embeddings for the tokens from `start` on, or ask for them.

        Where there is nobody to ask, the sequence is handed over: it finishes as DRAINED, to be
        continued elsewhere.
        """
        if not self._images.gather(sequence, start):
            self.finish(sequence, FinishReason.DRAINED)

    def let_go(self, sequence: Sequence) -> None:
        """Hold no embedding for a sequence that was preempted; it is handed over where that fails.

        See `gather`.
        """
        if self._images.can_gather(sequence, self.scheduler.num_cached_tokens(sequence)):
            self._images.let_go(sequence)
        else:
            self.finish(sequence, FinishReason.DRAINED)

    # ---- out -------------------------------------------------------------------------------------
    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence with its answer's last word."""
        self._end(sequence)
        if reason is not FinishReason.DRAINED:
            self.usage.add(sequence)
        num_tokens = sequence.num_tokens - sequence.request.num_prompt_tokens
        for stream in (sequence.sink.stream, sequence.sink.adopter):
            self._outbox.emit(stream, FinishedEvent(reason, num_tokens))
            self._outbox.end(stream)

    def fail(self, sequence: Sequence, error: WorkerError) -> None:
        """End a sequence with an error."""
        self._end(sequence)
        for stream in (sequence.sink.stream, sequence.sink.adopter):
            self._outbox.fail(stream, error)

    def cancel(self, key: RequestKey) -> CancelOutcome:
        """See `Engine.cancel`; pictures apart."""
        reserved = self.reservations.pop(key, 0)
        self.pool.unpromise(reserved)
        sequence = self.live.get(key)
        if sequence is None:
            if reserved:
                return CancelOutcome.CANCELLED_BEFORE_ADVERTISED
            known = key in self._ended
            return CancelOutcome.ALREADY_COMPLETE if known else CancelOutcome.NOT_FOUND
        being_read = sequence.hold and self.exports.was_read(key)
        self.fail(sequence, CancelledError("the request was cancelled"))
        if being_read:
            return CancelOutcome.CANCEL_REQUESTED_IN_FLIGHT
        return CancelOutcome.CANCELLED_BEFORE_ADVERTISED

    def release(self, key: RequestKey) -> None:
        """See `Engine.release`."""
        self.pool.unpromise(self.reservations.pop(key, 0))
        sequence = self.live.get(key)
        if sequence is not None and sequence.sink.stream is None:
            self._end(sequence)

    def drain(self, error: DrainingError) -> int:
        """See `Engine.drain`. What is held for a peer stays until its lease ends."""
        self._draining = True
        for key in list(self.reservations):
            self.release(key)
        ending = [s for s in self.live.values() if s.sink.stream is not None]
        for sequence in ending:
            if sequence.sink.first_only:
                self.fail(sequence, error)
            else:
                self.finish(sequence, FinishReason.DRAINED)
        return len(ending)

    def say_last_words(self, error: WorkerError) -> None:
        """End every stream without touching the books."""
        for sequence in self.live.values():
            self._outbox.fail(sequence.sink.stream, error)
            self._outbox.fail(sequence.sink.adopter, error)

    def _end(self, sequence: Sequence) -> None:
        """Free everything; the caller says the last word."""
        self._images.drop_all(sequence)
        self.exports.forget(sequence.request.key)
        if sequence.status is not Status.FINISHED:  # the scheduler ends those that it finishes
            self.scheduler.remove(sequence)
        del self.live[sequence.request.key]
        self._ended[sequence.request.key] = None
        if len(self._ended) > NUM_REMEMBERED:
            self._ended.popitem(last=False)


def _make_pool(runner: Runner, settings: EngineSettings) -> BlockPool:
    """The pool over the runner's KV buffer; an empty one where it has none."""
    layout = runner.kv_layout
    if layout is None:
        return BlockPool(1, block_size=1)
    pool = BlockPool(runner.num_blocks, block_size=layout.block_size)
    num_tokens = pool.capacity * pool.block_size
    if num_tokens < settings.max_model_len:
        raise ValueError(
            f"the KV buffer holds {num_tokens} tokens, fewer than max_model_len "
            f"({settings.max_model_len}): give it more memory, or lower max_model_len"
        )
    return pool
