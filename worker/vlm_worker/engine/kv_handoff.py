"""KV handoff from one engine to another, or from prefill to decode within one engine.

prefill side   `readable_blocks` (while prefill runs, and while held)
decode side    reserve -> receive -> import_blocks or confirm_blocks ... -> start_decode
both in one    adopt: the held sequence continues here, without a copy
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Seq

import numpy as np

from vlm_worker.core.kv_cache import BlockPool
from vlm_worker.core.persistent_batch import max_total_tokens, stop_ids
from vlm_worker.core.request_validation import validate_reservation
from vlm_worker.core.sequence import Sequence, Status
from vlm_worker.engine.attempts import ReservedBlocks, ResourceKind
from vlm_worker.engine.events import EventBuffer, EventStream, PrefillEvent
from vlm_worker.engine.runner import Runner, run_device_copy
from vlm_worker.engine.sequences import Sequences
from vlm_worker.errors import (
    CorruptTransferError,
    DuplicateError,
    GoneError,
    OverloadedError,
)
from vlm_worker.types import FinishReason, Request, RequestKey


@dataclasses.dataclass(frozen=True, slots=True)
class ReceiveResult:
    """The result of `receive`.

    Attributes:
        first_block: first block that the peer delivers; earlier ones are in the prefix cache.
        memory: of each block from `first_block` on, lent to the receiver until `return_blocks`;
            None if the engine writes the blocks (`import_blocks`).
    """

    first_block: int
    memory: Seq[memoryview] | None = None


@dataclasses.dataclass(eq=False, slots=True)
class BlockLoan:
    """KV blocks lent to a transfer, whose thread writes into them while steps run.

    A loan holds a separate reference to each block: if the attempt ends, no other sequence gets the
    blocks until the transfer has returned the loan.
    """

    pool: BlockPool
    blocks: Seq[int]
    is_returned: bool = False
    kind = ResourceKind.BLOCK_LOAN
    num_bytes = 0

    def release(self) -> bool:
        if self.is_returned:
            self.pool.release(self.blocks)
        return self.is_returned


class KVHandoff:
    """Moves sequences between engines. Engine thread only."""

    def __init__(self, runner: Runner, sequences: Sequences, *, events: EventBuffer) -> None:
        self._runner = runner
        self._sequences = sequences
        self._events = events
        self._pool = sequences.pool
        self._attempts = sequences.attempts

    def reserve(self, key: RequestKey, num_tokens: int) -> None:
        """See `Engine.reserve`."""
        sequences = self._sequences
        attempt = self._attempts.get(key)
        if attempt is not None and (attempt.sequence is not None or attempt.of(ReservedBlocks)):
            return
        sequences.check_new(key)
        validate_reservation(num_tokens, max_model_len=sequences.settings.max_model_len)
        count = self._pool.blocks_for(num_tokens)
        available = self._pool.num_available
        if not self._pool.reserve(count, keep=sequences.scheduler.withheld_blocks):
            raise OverloadedError(
                f"{num_tokens} tokens need {count} KV blocks; {available} are available",
                retry_after_seconds=sequences.retry_after_seconds(),
            )
        self._attempts.open(key).acquire(ReservedBlocks(self._pool, count))

    def receive(self, request: Request, *, in_place: bool) -> ReceiveResult:
        """See `Engine.receive`."""
        key, sequences, pool = request.key, self._sequences, self._pool
        reservations = self._attempts.of(key, ReservedBlocks)
        if not reservations:
            raise GoneError(f"{key.request_id} attempt {key.attempt} has no reservation here")
        [reserved] = reservations
        sequence = sequences.make(request, for_peer=False)
        num_tokens = sequence.num_tokens
        sequences.scheduler.look_up(sequence)
        # the first token is known already, so that a hit may cover the whole prompt here
        shared = pool.match(sequence.hashes)
        needed = pool.blocks_for(num_tokens)
        blocks = pool.take(needed - len(shared), shared=shared, reserved=reserved.num_blocks)
        if blocks is None:
            raise OverloadedError(
                f"{reserved.num_blocks} KV blocks are reserved, the request needs {needed}",
                retry_after_seconds=sequences.retry_after_seconds(),
            )
        sequence.status = Status.RECEIVING
        sequence.blocks = shared + blocks
        sequence.num_computed_tokens = num_tokens
        attempt = sequences.start(sequence)
        attempt.missing_blocks = set(range(len(shared), needed))
        attempt.confirm(reserved)  # the sequence has them now
        memory = self._runner.block_memory(blocks, to_write=True) if in_place else None
        if memory is not None:
            self._pool.take(0, shared=blocks)
            attempt.acquire(BlockLoan(self._pool, blocks))
        return ReceiveResult(len(shared), memory)

    def return_loan(self, key: RequestKey) -> None:
        """See `Engine.return_blocks`."""
        for loan in self._attempts.of(key, BlockLoan):
            loan.is_returned = True
            self._attempts.by_key[key].release(loan)

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
        run_device_copy("writing KV blocks", lambda: self._runner.import_blocks(blocks, data))
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
        if sequence.output.stream is not None:
            raise DuplicateError(f"{key.request_id} attempt {key.attempt} decodes already")
        if sequence.output.missing_blocks:
            raise CorruptTransferError(
                f"blocks {sorted(sequence.output.missing_blocks)} never came"
            )
        if not 0 <= first_token_id < self._runner.vocab_size:
            raise CorruptTransferError(
                f"the first token is {first_token_id}; the model's ids are below "
                f"{self._runner.vocab_size}"
            )
        sequence.output.stream = stream
        sequence.token_ids = np.append(sequence.token_ids, np.int32(first_token_id))
        if first_token_id in stop_ids(sequence, eos_token_ids=settings.eos_token_ids):
            self._sequences.finish(sequence, FinishReason.STOP)
        elif sequence.num_tokens >= max_total_tokens(
            sequence, max_model_len=settings.max_model_len
        ):
            self._sequences.finish(sequence, FinishReason.LENGTH)
        else:
            self._sequences.scheduler.resume(sequence)

    def _note(self, sequence: Sequence, numbers: range) -> None:
        """Mark blocks as complete and publish them in the prefix cache."""
        sequence.output.missing_blocks.difference_update(numbers)
        for number in numbers:
            if number < len(sequence.hashes):
                self._pool.publish(sequence.blocks[number], sequence.hashes[number])

    def adopt(self, request: Request, stream: EventStream[PrefillEvent]) -> None:
        """See `Engine.adopt_local`."""
        attempt = self._attempts.get(request.key)
        sequence = attempt.sequence if attempt is not None else None
        if sequence is None or not sequence.for_peer:
            self._events.fail(stream, GoneError(f"{request.key.request_id} is not held here"))
            return
        sequence.for_peer = False
        self._sequences.scheduler.pending_transfers.discard(sequence)
        if sequence.status is Status.HELD:
            sequence.output.stream = stream
            self._sequences.scheduler.resume(sequence)
        else:
            sequence.output.successor_stream = stream


def _check_missing(sequence: Sequence, numbers: range) -> None:
    missing = sequence.output.missing_blocks
    if not numbers or not missing.issuperset(numbers):
        raise CorruptTransferError(
            f"blocks {numbers.start} to {numbers.stop} came, and {sorted(missing)} are missing"
        )
