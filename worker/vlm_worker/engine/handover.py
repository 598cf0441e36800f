"""KV that passes from one engine to another, or from prefill to decode within one.

prefill side   `exports` (while prefill runs, and while held)
decode side    reserve -> receive -> import_blocks or confirm_blocks ... -> start_decode
both in one    adopt: what is held goes on here, without a copy
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Seq

import numpy as np

from vlm_worker.core.admission import check_reservation
from vlm_worker.core.sequence import Sequence, Status
from vlm_worker.core.table import answer_limit, stop_ids
from vlm_worker.engine.events import EventStream, PrefillEvent
from vlm_worker.engine.guard import guarded
from vlm_worker.engine.loans import Loans
from vlm_worker.engine.outbox import Outbox
from vlm_worker.engine.runner import Runner
from vlm_worker.engine.sequences import Sequences
from vlm_worker.engine.sink import Sink
from vlm_worker.errors import (
    CorruptTransferError,
    DuplicateError,
    GoneError,
    OverloadedError,
)
from vlm_worker.types import FinishReason, Request, RequestKey


@dataclasses.dataclass(frozen=True, slots=True)
class Receipt:
    """What `receive` says.

    Attributes:
        first_block: that a peer has to deliver; those before it are in the local prefix cache.
        memory: of each block from there on, lent to whoever receives them, until `return_blocks`;
            None where the engine writes (`import_blocks`).
    """

    first_block: int
    memory: Seq[memoryview] | None = None


class Handover:
    """Moves sequences between engines. Lives on the engine thread."""

    def __init__(self, runner: Runner, sequences: Sequences, *, outbox: Outbox) -> None:
        self._runner = runner
        self._sequences = sequences
        self._outbox = outbox
        self._pool = sequences.pool
        self.loans = Loans(runner, sequences.pool)

    def reserve(self, key: RequestKey, num_tokens: int) -> None:
        """See `Engine.reserve`."""
        sequences = self._sequences
        if key in sequences.reservations or key in sequences.live:
            return
        sequences.check_new(key)
        check_reservation(num_tokens, max_model_len=sequences.settings.max_model_len)
        count = self._pool.blocks_for(num_tokens)
        available = self._pool.num_available
        if not self._pool.promise(count, keep=sequences.scheduler.kept_blocks):
            raise OverloadedError(
                f"{num_tokens} tokens need {count} KV blocks; {available} are available",
                retry_after_seconds=sequences.room.retry_after_seconds,
            )
        sequences.reservations[key] = count

    def receive(self, request: Request, *, in_place: bool) -> Receipt:
        """See `Engine.receive`."""
        key, sequences, pool = request.key, self._sequences, self._pool
        reserved = sequences.reservations.get(key)
        if reserved is None:
            raise GoneError(f"{key.request_id} attempt {key.attempt} has no reservation here")
        sequence = sequences.make(request, hold=False)
        num_tokens = sequence.num_tokens
        sequences.scheduler.look_up(sequence)
        # the first token is known already, so that a hit may cover the whole prompt here
        shared = pool.match(sequence.hashes)
        needed = pool.blocks_for(num_tokens)
        blocks = pool.take(needed - len(shared), shared=shared, promised=reserved)
        if blocks is None:
            raise OverloadedError(
                f"the reservation is of {reserved} KV blocks, the request needs {needed}",
                retry_after_seconds=sequences.room.retry_after_seconds,
            )
        del sequences.reservations[key]
        sequence.status = Status.RECEIVING
        sequence.blocks = shared + blocks
        sequence.num_computed_tokens = num_tokens
        sequence.sink = Sink(missing=set(range(len(shared), needed)))
        sequences.live[key] = sequence
        memory = self.loans.lend(key, blocks) if in_place else None
        return Receipt(len(shared), memory)

    def import_blocks(self, key: RequestKey, first_block: int, data: memoryview) -> None:
        """See `Engine.import_blocks`."""
        sequence = self._sequences.get(key, status=Status.RECEIVING)
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
        guarded("writing KV blocks", lambda: self._runner.import_blocks(blocks, data))
        self._note(sequence, numbers)

    def confirm_blocks(self, key: RequestKey, first_block: int, num_blocks: int) -> None:
        """See `Engine.confirm_blocks`."""
        sequence = self._sequences.get(key, status=Status.RECEIVING)
        numbers = range(first_block, first_block + num_blocks)
        _check_missing(sequence, numbers)
        self._note(sequence, numbers)

    def start_decode(
        self, key: RequestKey, first_token_id: int, stream: EventStream[PrefillEvent]
    ) -> None:
        """See `Engine.start_decode`."""
        settings = self._sequences.settings
        sequence = self._sequences.get(key, status=Status.RECEIVING)
        if sequence.sink.stream is not None:
            raise DuplicateError(f"{key.request_id} attempt {key.attempt} decodes already")
        if sequence.sink.missing:
            raise CorruptTransferError(f"blocks {sorted(sequence.sink.missing)} never came")
        if not 0 <= first_token_id < self._runner.vocab_size:
            raise CorruptTransferError(
                f"the first token is {first_token_id}; the model's ids are below "
                f"{self._runner.vocab_size}"
            )
        sequence.sink.stream = stream
        sequence.token_ids = np.append(sequence.token_ids, np.int32(first_token_id))
        if first_token_id in stop_ids(sequence, eos_token_ids=settings.eos_token_ids):
            self._sequences.finish(sequence, FinishReason.STOP)
        elif sequence.num_tokens >= answer_limit(sequence, max_model_len=settings.max_model_len):
            self._sequences.finish(sequence, FinishReason.LENGTH)
        else:
            self._sequences.scheduler.resume(sequence)

    def _note(self, sequence: Sequence, numbers: range) -> None:
        """These blocks are whole: whoever has the same tokens may share them."""
        sequence.sink.missing.difference_update(numbers)
        for number in numbers:
            if number < len(sequence.hashes):
                self._pool.publish(sequence.blocks[number], sequence.hashes[number])

    def adopt(self, request: Request, stream: EventStream[PrefillEvent]) -> None:
        """See `Engine.adopt_local`."""
        sequence = self._sequences.live.get(request.key)
        if sequence is None or not sequence.hold:
            self._outbox.fail(stream, GoneError(f"{request.key.request_id} is not held here"))
            return
        sequence.hold = False
        self._sequences.scheduler.unread.discard(sequence)
        if sequence.status is Status.HELD:
            sequence.sink.stream = stream
            self._sequences.scheduler.resume(sequence)
        else:
            sequence.sink.adopter = stream


def _check_missing(sequence: Sequence, numbers: range) -> None:
    missing = sequence.sink.missing
    if not numbers or not missing.issuperset(numbers):
        raise CorruptTransferError(
            f"blocks {numbers.start} to {numbers.stop} came, and {sorted(missing)} are missing"
        )
