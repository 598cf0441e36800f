"""The engine's API for the roles: submit and cancel on the loop, compute on one thread.

      asyncio loop                         engine thread: scheduler and steps
      ------------                         ----------------------------------------------
      submit, cancel, import --commands--> execute, some copies -> encode a batch -> run a step
      EventStream, futures   <--events---- delivered before each call of the model
      export_blocks ------- a thread that only copies, while a step may run

The calls by role:

    encoder   encode -> ItemReady -> export_embedding -> release_embedding
    prefill   submit_prefill(for_peer=True) -> [NeedItems -> put_embedding]
              -> BlocksReady -> export_blocks -> TokenEvent -> release
    decode    reserve -> receive -> [a thread writes -> confirm_blocks, or import_blocks]
              -> start_decode -> TokenEvent ... FinishedEvent

If one engine prefills and decodes a request, `adopt_local` continues the held sequence without a
copy. Every submission gets a last event. A caller that stops waiting calls `cancel`.
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
from vlm_worker.engine.kv_handoff import ReceiveResult
from vlm_worker.engine.runner import Runner
from vlm_worker.engine.sequences import Positions
from vlm_worker.engine.settings import EngineSettings, EngineStats
from vlm_worker.engine.state import State
from vlm_worker.engine.thread import EngineThread
from vlm_worker.types import FailedEvent, PreparedImage, Request, RequestKey
from vlm_worker.wire.buffers import BufferViews

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
        """End the thread after its current turn; unfinished work fails with DrainingError.

        Raises:
            Exception: the error that ended the thread, if any.
        """
        await self._thread.stop()

    def stats(self) -> EngineStats:
        """The latest snapshot; safe from any thread."""
        return self._thread.stats

    @property
    def healthy(self) -> bool:
        """False if the thread failed, a step is stuck, or too many steps failed in a row."""
        return self.unhealthy_reason is None

    @property
    def unhealthy_reason(self) -> str | None:
        """Why it is not healthy; follows "the engine cannot go on: " in a sentence."""
        return self._thread.unhealthy_reason

    # ---- encoder ---------------------------------------------------------------------------------

    def encode(
        self, key: RequestKey, images: Sequence[PreparedImage], *, priority: int = 0
    ) -> EventStream[EncodeEvent]:
        """Encode images, or find them in the cache. Item numbers are positions in `images`.

        Images of a larger priority run first, except before images that waited too long.

        Each ready item stays pinned for (key, item) until `release_embedding` or `cancel`. The
        stream ends after one event per item. If a limit is reached, or while draining, each item
        fails with a typed error.
        """
        stream: EventStream[EncodeEvent] = EventStream(key)
        self._thread.post_command(
            lambda state: state.encode_requests.encode(
                key, tuple(images), stream, priority=priority
            ),
            refuse=lambda error: stream.close_with(
                *(ItemFailed(item, error) for item in range(len(images)))
            ),
        )
        return stream

    async def pin_cached(self, key: RequestKey, image_key: bytes, num_tokens: int) -> bool:
        """Pin a cached embedding for a later `encode` of the same key; False if it is not cached.

        `encode` needs no patches of such an image. `encode`, `unpin_cached` or `cancel` end it.
        """
        return await self._call(
            lambda state: state.encode_requests.pin_cached(key, image_key, num_tokens)
        )

    def unpin_cached(self, key: RequestKey) -> None:
        """Unpin what `pin_cached` pinned for this key; idempotent."""
        self._thread.post_command(
            lambda state: state.encode_requests.unpin_cached(key), refuse=lambda _: None
        )

    async def export_embedding(self, key: RequestKey, item: int) -> memoryview:
        """The rows of a ready item, `[num_tokens, row_bytes]`.

        Raises:
            GoneError: the item is not pinned for this key.
        """
        return await self._call(lambda state: state.encode_requests.export(key, item))

    def release_embedding(self, key: RequestKey, item: int) -> None:
        """Unpin an item; idempotent. It stays in the cache until it is evicted."""
        self._thread.post_command(
            lambda state: state.encode_requests.release(key, item), refuse=lambda _: None
        )

    # ---- prefill ---------------------------------------------------------------------------------

    def submit_prefill(self, request: Request, *, for_peer: bool) -> EventStream[PrefillEvent]:
        """Queue a request.

        With `for_peer`, the stream ends after the first token. The KV stays until `release` or
        `adopt_local`, and BlocksReady names the blocks that `export_blocks` may read meanwhile. If
        that token ends the answer, FinishedEvent follows it and nothing is held. Without it, the
        whole answer is generated here. It consumes a reservation under the same key.

        A refusal is a FailedEvent: ContextTooLongError, InvalidRequestError, OverloadedError,
        DuplicateError, DrainingError.
        """
        stream: EventStream[PrefillEvent] = EventStream(request.key)
        self._thread.post_command(
            lambda state: state.sequences.submit(request, stream, for_peer=for_peer),
            refuse=lambda error: stream.close_with(FailedEvent(error)),
        )
        return stream

    async def put_embedding(self, key: RequestKey, item: int, rows: memoryview) -> None:
        """Deliver the embedding of an item that NeedItems named; idempotent.

        Raises:
            GoneError: the request is no longer here.
            CorruptTransferError: the size differs from what the item needs.
        """
        await self._call(lambda state: state.put_embedding(key, item, rows), num_bytes=rows.nbytes)

    def export_blocks(
        self, key: RequestKey, first_block: int, num_blocks: int, out: memoryview | None = None
    ) -> memoryview:
        """A copy of announced blocks, `[num_blocks, block_bytes]`; made while a step may run.

        The calling thread copies, into `out` if given, which has exactly this size. The loop's
        thread must not call it.

        Raises:
            GoneError: the request is no longer here.
            InvalidRequestError: blocks that BlocksReady has not announced.
        """
        return self._thread.readable_blocks.copy(key, first_block, num_blocks, out)

    def read_blocks(
        self, key: RequestKey, first_block: int, num_blocks: int, out: memoryview
    ) -> memoryview | BufferViews:
        """As `export_blocks`, but views of the blocks instead of a copy if they are host memory."""
        return self._thread.readable_blocks.read(key, first_block, num_blocks, out)

    # ---- decode ----------------------------------------------------------------------------------

    async def reserve(self, key: RequestKey, num_tokens: int) -> None:
        """Reserve KV blocks; idempotent per key.

        `receive`, `submit_prefill` or `release` end the reservation.

        Raises:
            OverloadedError: too few blocks are available now.
            ContextTooLongError: the cache is too small.
        """
        await self._call(lambda state: state.handoff.reserve(key, num_tokens))

    async def receive(self, request: Request, *, in_place: bool = False) -> ReceiveResult:
        """Turn the reservation into blocks; returns the first block that a peer has to deliver.

        The request has `ceil(len(token_ids) / block_size)` blocks; if `first_block` equals this
        number, nothing is missing. With `in_place` the engine lends the memory of the blocks if the
        runner allows it: one thread of the caller writes there, the caller confirms the blocks, and
        it always returns the loan.

        Raises:
            GoneError: no such reservation.
            OverloadedError: the reservation was too small, and too few blocks are available.
        """
        return await self._call(lambda state: state.handoff.receive(request, in_place=in_place))

    async def import_blocks(self, key: RequestKey, first_block: int, data: memoryview) -> None:
        """Write whole blocks `first_block ...` that a peer sent; in any order.

        Raises:
            GoneError: nothing is being received under this key.
            CorruptTransferError: not whole blocks, or not blocks of this request.
        """
        await self._call(
            lambda state: state.handoff.import_blocks(key, first_block, data),
            num_bytes=data.nbytes,
        )

    async def confirm_blocks(self, key: RequestKey, first_block: int, num_blocks: int) -> None:
        """Confirm that lent blocks are written and checked; in any order.

        Raises:
            GoneError: nothing is being received under this key.
            CorruptTransferError: not blocks of this request, or confirmed before.
        """
        await self._call(lambda state: state.handoff.confirm_blocks(key, first_block, num_blocks))

    def return_blocks(self, key: RequestKey) -> None:
        """Return the loan of this key: no thread writes into its blocks. Idempotent.

        Until then the blocks are not reused, even if the request has ended.
        """
        self._thread.post_command(
            lambda state: state.handoff.return_loan(key), refuse=lambda _: None
        )

    async def start_decode(self, key: RequestKey, first_token_id: int) -> EventStream[PrefillEvent]:
        """Begin decoding after the last block: tokens from index `num_delivered_tokens + 1` on.

        Raises:
            GoneError: nothing is being received under this key.
            CorruptTransferError: blocks are missing, with their numbers.
        """
        stream: EventStream[PrefillEvent] = EventStream(key)
        await self._call(lambda state: state.handoff.start_decode(key, first_token_id, stream))
        return stream

    def adopt_local(self, request: Request) -> EventStream[PrefillEvent]:
        """Continue the sequence that this engine holds or prefills under the same key. No copy.

        Streams tokens from index `num_delivered_tokens + 1` on; FailedEvent(GoneError) if nothing
        is held.
        """
        stream: EventStream[PrefillEvent] = EventStream(request.key)
        self._thread.post_command(
            lambda state: state.handoff.adopt(request, stream),
            refuse=lambda error: stream.close_with(FailedEvent(error)),
        )
        return stream

    # ---- the end ---------------------------------------------------------------------------------

    async def cancel(self, key: RequestKey) -> CancelOutcome:
        """End everything under `key` and free it: sequence, reservation, pins, queued images.

        CANCEL_REQUESTED_IN_FLIGHT means that a peer has read some of the blocks and may continue.
        It reads copies, so the blocks are free.
        """
        return await self._call(lambda state: state.cancel(key))

    async def release(self, key: RequestKey) -> None:
        """Free what is held or reserved under `key`; idempotent, and no error for unknown keys."""
        await self._call(lambda state: state.sequences.release(key))

    async def drain(self) -> int:
        """At the drain deadline: end every sequence and refuse new work.

        Decoding sequences finish with FinishReason.DRAINED, the others fail with DrainingError.
        Returns the number of ended sequences and images.
        """
        return await self._call(lambda state: state.drain())

    def _call(self, work: Callable[[State], T], *, num_bytes: int = 0) -> Awaitable[T]:
        return self._thread.call(work, num_bytes=num_bytes)
