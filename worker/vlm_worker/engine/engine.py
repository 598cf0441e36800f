"""The engine, as the roles see it: submit and cancel here, work on one thread of its own.

      asyncio loop                         engine thread, alone with scheduler and steps
      ------------                         ----------------------------------------------
      submit, cancel, import --commands--> do them, some copies -> encode a batch -> run a step
      EventStream, futures   <--events---- delivered before each call of the model
      export_blocks ------- a thread that only copies, while a step may run

Three ways through it, by role:

    encoder   encode -> ItemReady -> export_embedding -> release_embedding
    prefill   submit_prefill(hold=True) -> [NeedItems -> put_embedding]
              -> BlocksReady -> export_blocks -> TokenEvent -> release
    decode    reserve -> receive -> [a thread writes -> confirm_blocks, or import_blocks]
              -> start_decode -> TokenEvent ... FinishedEvent

Where prefill and decode of a request meet in one engine, `adopt_local` continues what is held,
without a copy. Every submission gets its last word; whoever gives up says so with `cancel`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from vlm_worker.engine.events import (
    CancelOutcome,
    EncodeEvent,
    EventStream,
    ItemFailed,
    PrefillEvent,
)
from vlm_worker.engine.handover import Receipt
from vlm_worker.engine.runner import Runner
from vlm_worker.engine.sequences import Positions
from vlm_worker.engine.settings import EngineSettings, EngineStats
from vlm_worker.engine.state import State
from vlm_worker.engine.thread import EngineThread
from vlm_worker.types import FailedEvent, PreparedImage, Request, RequestKey
from vlm_worker.wire.copying import Lying

T = TypeVar("T")


class Engine:
    """Continuous batching over one runner.

    All methods are called on the loop given to `start`. `positions(token_ids, items)` returns the
    rotary positions `[P, T]` of a prompt (P is 1, or 3 for M-RoPE) and the delta that its
    continuation adds to a token's index; `core.families` has them.

    Raises:
        ValueError: the settings cannot work with this runner, with the numbers.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        settings: EngineSettings,
        positions: Positions,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._thread = EngineThread(runner, settings=settings, positions=positions, clock=clock)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the thread; events are delivered on `loop`."""
        self._thread.start(loop)

    async def stop(self) -> None:
        """End the thread after its present turn; what is unfinished fails with DrainingError.

        Raises:
            Exception: what killed the thread, where something did.
        """
        await self._thread.stop()

    def stats(self) -> EngineStats:
        """The latest snapshot; safe from any thread."""
        return self._thread.stats

    @property
    def healthy(self) -> bool:
        """False when the thread died, a step is stuck, or too many steps failed in a row."""
        return self._thread.healthy

    # ---- encoder ---------------------------------------------------------------------------------

    def encode(
        self, key: RequestKey, images: Sequence[PreparedImage], *, priority: int = 0
    ) -> EventStream[EncodeEvent]:
        """Encode pictures, or find them in the cache. Item numbers are positions in `images`.

        Those of a larger priority go first, until others have waited for too long.

        Each ready item stays pinned for (key, item) until `release_embedding` or `cancel`. The
        stream ends after one event per item. Without room, or while draining, each fails with a
        typed error.
        """
        stream: EventStream[EncodeEvent] = EventStream(key)
        self._thread.tell(
            lambda state: state.pictures.encode(key, tuple(images), stream, priority=priority),
            refuse=lambda error: stream.close_with(
                *(ItemFailed(item, error) for item in range(len(images)))
            ),
        )
        return stream

    async def hold_known(self, key: RequestKey, image_key: bytes, num_tokens: int) -> bool:
        """Keep an embedding that is in the cache for `encode` of the same key; False: it is not.

        `encode` needs no patches of such a picture. Ends with it, `release_known` or `cancel`.
        """
        return await self._ask(lambda state: state.pictures.hold_known(key, image_key, num_tokens))

    def release_known(self, key: RequestKey) -> None:
        """Let go what `hold_known` kept for this key; idempotent."""
        self._thread.tell(lambda state: state.pictures.release_known(key), refuse=lambda _: None)

    async def export_embedding(self, key: RequestKey, item: int) -> memoryview:
        """The rows of a ready item, `[num_tokens, row_bytes]`.

        Raises:
            GoneError: the item is not pinned for this key.
        """
        return await self._ask(lambda state: state.pictures.export(key, item))

    def release_embedding(self, key: RequestKey, item: int) -> None:
        """Unpin an item; idempotent. It stays in the cache until room is needed."""
        self._thread.tell(lambda state: state.pictures.release(key, item), refuse=lambda _: None)

    # ---- prefill ---------------------------------------------------------------------------------

    def submit_prefill(self, request: Request, *, hold: bool) -> EventStream[PrefillEvent]:
        """Queue a request.

        With `hold`, the stream ends after the first token: the KV stays, until `release` or
        `adopt_local`, and BlocksReady tells what `export_blocks` may read meanwhile. If that token
        ends the answer, FinishedEvent follows it and nothing is held. Without `hold`, the answer is
        generated to its end here. A reservation under the same key is used up by it.

        A refusal is a FailedEvent: ContextTooLongError, InvalidRequestError, OverloadedError,
        DuplicateError, DrainingError.
        """
        stream: EventStream[PrefillEvent] = EventStream(request.key)
        self._thread.tell(
            lambda state: state.sequences.submit(request, stream, hold=hold),
            refuse=lambda error: stream.close_with(FailedEvent(error)),
        )
        return stream

    async def put_embedding(self, key: RequestKey, item: int, rows: memoryview) -> None:
        """Deliver the embedding of an item that NeedItems named; idempotent.

        Raises:
            GoneError: the request is no longer here.
            CorruptTransferError: the size differs from what the item needs.
        """
        await self._ask(lambda state: state.put_embedding(key, item, rows), num_bytes=rows.nbytes)

    def export_blocks(
        self, key: RequestKey, first_block: int, num_blocks: int, out: memoryview | None = None
    ) -> memoryview:
        """A copy of announced blocks, `[num_blocks, block_bytes]`; made while a step may run.

        It is made in `out`, of just so many bytes, where that is given, by the thread that calls:
        any but the loop's, which is not to wait for it.

        Raises:
            GoneError: the request is no longer here.
            InvalidRequestError: blocks that BlocksReady has not announced.
        """
        return self._thread.exports.copy(key, first_block, num_blocks, out)

    def read_blocks(
        self, key: RequestKey, first_block: int, num_blocks: int, out: memoryview
    ) -> memoryview | Lying:
        """As `export_blocks`, where they lie instead of a copy if that is host memory."""
        return self._thread.exports.read(key, first_block, num_blocks, out)

    # ---- decode ----------------------------------------------------------------------------------

    async def reserve(self, key: RequestKey, num_tokens: int) -> None:
        """Promise KV room; idempotent per key. Ends with `receive`, `submit_prefill` or `release`.

        Raises:
            OverloadedError: no room now.
            ContextTooLongError: there never will be.
        """
        await self._ask(lambda state: state.handover.reserve(key, num_tokens))

    async def receive(self, request: Request, *, in_place: bool = False) -> Receipt:
        """Turn the reservation into blocks; tells which of them a peer has to deliver.

        The request has `ceil(len(token_ids) / block_size)` blocks; where that is the first one to
        be delivered, nothing is missing. With `in_place` their memory is lent where that can be:
        the caller has one thread write there, confirms, and returns the loan in any case.

        Raises:
            GoneError: no such reservation.
            OverloadedError: the reservation was too small, and there is no more room.
        """
        return await self._ask(lambda state: state.handover.receive(request, in_place=in_place))

    async def import_blocks(self, key: RequestKey, first_block: int, data: memoryview) -> None:
        """Write whole blocks `first_block ...` that a peer sent; they may come in any order.

        Raises:
            GoneError: nothing is being received under this key.
            CorruptTransferError: not whole blocks, or not blocks of this request.
        """
        await self._ask(
            lambda state: state.handover.import_blocks(key, first_block, data),
            num_bytes=data.nbytes,
        )

    async def confirm_blocks(self, key: RequestKey, first_block: int, num_blocks: int) -> None:
        """Blocks whose memory was lent are written, and were checked; in any order.

        Raises:
            GoneError: nothing is being received under this key.
            CorruptTransferError: not blocks of this request, or they came before.
        """
        await self._ask(lambda state: state.handover.confirm_blocks(key, first_block, num_blocks))

    def return_blocks(self, key: RequestKey) -> None:
        """Nobody writes into memory that was lent under this key any more; idempotent.

        Until then it is given to nobody else, even where the request has ended.
        """
        self._thread.tell(lambda state: state.handover.loans.give_back(key), refuse=lambda _: None)

    async def start_decode(self, key: RequestKey, first_token_id: int) -> EventStream[PrefillEvent]:
        """Begin decoding after the last block: tokens from index `num_delivered_tokens + 1` on.

        Raises:
            GoneError: nothing is being received under this key.
            CorruptTransferError: blocks are missing, with their numbers.
        """
        stream: EventStream[PrefillEvent] = EventStream(key)
        await self._ask(lambda state: state.handover.start_decode(key, first_token_id, stream))
        return stream

    def adopt_local(self, request: Request) -> EventStream[PrefillEvent]:
        """Continue what this engine holds, or still prefills, under the same key. No copy.

        Streams tokens from index `num_delivered_tokens + 1` on; FailedEvent(GoneError) where
        nothing is held.
        """
        stream: EventStream[PrefillEvent] = EventStream(request.key)
        self._thread.tell(
            lambda state: state.handover.adopt(request, stream),
            refuse=lambda error: stream.close_with(FailedEvent(error)),
        )
        return stream

    # ---- the end ---------------------------------------------------------------------------------

    async def cancel(self, key: RequestKey) -> CancelOutcome:
        """End everything under `key` and free it: sequence, reservation, pins, queued pictures.

        CANCEL_REQUESTED_IN_FLIGHT says that a peer has read some of the blocks and may be reading
        on; it reads copies, so the blocks are free all the same.
        """
        return await self._ask(lambda state: state.cancel(key))

    async def release(self, key: RequestKey) -> None:
        """Free what is held or reserved under `key`; idempotent, and no error for unknown keys."""
        await self._ask(lambda state: state.sequences.release(key))

    async def drain(self) -> int:
        """The drain deadline has come: end every answer here, refuse all that comes after.

        Decoding sequences finish with FinishReason.DRAINED, the rest fails with DrainingError.
        Returns how many ended.
        """
        return await self._ask(lambda state: state.drain())

    def _ask(self, work: Callable[[State], T], *, num_bytes: int = 0) -> Awaitable[T]:
        return self._thread.ask(work, num_bytes=num_bytes)
