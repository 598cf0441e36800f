"""The engine: an API on the event loop, and one thread that computes (`engine_thread`).

      asyncio loop                         engine thread: scheduler and steps
      ------------                         ----------------------------------------------
      submit, cancel, import --commands--> all commands -> [flush -> some copies] -> turn -> ...
      EventStream, futures   <--events---- delivered before each call of the model
      readable_blocks ----- a thread that only copies, while a step may run

The calls by role:

    encoder   encode -> ItemReady -> export_embedding -> release_embedding
    prefill   submit_prefill(for_peer=True) -> [NeedItems -> put_embedding]
              -> BlocksReady -> readable_blocks -> TokenEvent -> release
              prefetch -> the whole blocks of a prompt are cached, if no request comes
    decode    reserve -> receive -> [a thread writes -> confirm_blocks, or import_blocks]
              -> start_decode -> TokenEvent ... FinishedEvent

If one engine prefills and decodes a request, `adopt_local` continues the held sequence without a
copy. Every submission gets a last event. A caller that stops waiting calls `cancel`.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Sequence

from vlm_worker.core.fair_order import FIRST_COME, Rank
from vlm_worker.core.grammars import Matcher
from vlm_worker.engine.attempts import BlockLoan
from vlm_worker.engine.constraints import Constraints
from vlm_worker.engine.embedding_files import EmbeddingFiles
from vlm_worker.engine.embedding_reads import READ_SECONDS
from vlm_worker.engine.engine_thread import Command, EngineThread, refuse
from vlm_worker.engine.events import EncodeEvent, EventStream, ItemFailed, PrefillEvent
from vlm_worker.engine.runner import Runner
from vlm_worker.engine.sequences import Positions, ReceiveResult
from vlm_worker.engine.settings import EngineSettings, EngineStats
from vlm_worker.engine.state import State
from vlm_worker.errors import EngineError, WorkerError
from vlm_worker.types import FailedEvent, PreparedImage, Request, RequestKey
from vlm_worker.wire.messages import CancelOutcome
from vlm_worker.wire.prefetch_messages import PrefetchResult


class Engine:
    """Continuous batching over one runner.

    All public methods are called on the loop given to `start`, except `stats` and the reads of
    blocks. `positions` is `Family.positions`. `files` is the disk tier of the encoder cache; the
    engine starts and closes it. Without `constraints` no request may have a grammar. A coroutine
    raises GoneError if its key has no such request, reservation or embedding here.

    Raises ValueError, with the numbers, if the settings cannot work with this runner.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        settings: EngineSettings,
        positions: Positions,
        clock: Callable[[], float] = time.monotonic,
        files: EmbeddingFiles | None = None,
        constraints: Constraints | None = None,
    ) -> None:
        self._files, self.constraints = files, constraints
        self._thread = EngineThread(
            runner,
            settings=settings,
            positions=positions,
            clock=clock,
            files=files,
            constraints=constraints,
        )
        self.readable_blocks = self._thread.state.sequences.readable_blocks

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the thread; events are delivered on `loop`."""
        self._thread.start(loop)

    async def stop(self) -> None:
        """End the thread after its current turn; unfinished work fails with DrainingError.

        Raises the error that ended the thread, if any.
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
        self,
        key: RequestKey,
        images: Sequence[PreparedImage],
        *,
        rank: Rank = FIRST_COME,
        pins_session: bool = False,
    ) -> EventStream[EncodeEvent]:
        """Encode images, or find them in the cache. Item numbers are positions in `images`.

        Images of a larger priority run first, except before images that waited too long. The
        weighted seconds of `rank` are those of each image. With `pins_session`, they are evicted
        after others for `session_pin_seconds`.

        Each ready item stays pinned for (key, item) until `release_embedding` or `cancel`. The
        stream ends after one event per item. If a limit is reached, or while draining, each item
        fails with a typed error.
        """
        stream: EventStream[EncodeEvent] = EventStream(key)

        def work(state: State) -> None:
            state.encode_requests.encode(
                key, tuple(images), stream, rank=rank, pins_session=pins_session
            )

        def refuse(error: EngineError) -> None:
            stream.close_with(*(ItemFailed(item, error) for item in range(len(images))))

        self._thread.post(Command(work, refuse))
        return stream

    async def pin_cached(self, key: RequestKey, image: PreparedImage) -> bool:
        """Pin a cached embedding for a later `encode` of the same key; False if it is not cached.

        An embedding on the disk is read first. `encode` needs no patches of such an image.
        `encode`, `unpin_cached` or `cancel` end it.
        """
        if await self._thread.call(lambda state: state.encode_requests.pin_cached(key, image)):
            return True
        if self._files is None:
            return False
        if await self._read_whole(key, image):
            return await self._thread.call(lambda state: state.encode_requests.pin_read(key, image))
        self._thread.post(Command(lambda state: state.encode_requests.unpin_whole(key, image)))
        return False

    async def _read_whole(self, key: RequestKey, image: PreparedImage) -> bool:
        """Read an image from the disk into memory, pinned for `key`; False if it is not there."""
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def work(state: State) -> None:
            answer = functools.partial(state.events.answer, future)
            state.encode_requests.read_whole(key, image, answer)

        self._thread.post(Command(work, functools.partial(refuse, future)))
        await asyncio.wait({future}, timeout=2 * READ_SECONDS)  # it may wait for an encoding
        return future.done() and future.result()

    def unpin_cached(self, key: RequestKey) -> None:
        """Unpin what `pin_cached` pinned for this key; idempotent."""
        self._thread.post(Command(lambda state: state.encode_requests.unpin_cached(key)))

    async def export_embedding(self, key: RequestKey, item: int) -> memoryview:
        """The rows of a ready item, `[num_tokens, row_bytes]`."""
        return await self._thread.call(lambda state: state.encode_requests.export(key, item))

    def release_embedding(self, key: RequestKey, item: int) -> None:
        """Unpin an item; idempotent. It stays in the cache until it is evicted."""
        self._thread.post(Command(lambda state: state.encode_requests.release(key, item)))

    # ---- prefill ---------------------------------------------------------------------------------

    def submit_prefill(
        self, request: Request, *, for_peer: bool, matcher: Matcher | None = None
    ) -> EventStream[PrefillEvent]:
        """Queue a request.

        With `for_peer`, the stream ends after the first token. The KV stays until `release` or
        `adopt_local`, and BlocksReady names the blocks that `readable_blocks` copies meanwhile. If
        that token ends the answer, FinishedEvent follows it and nothing is held. Without it, the
        whole answer is generated here. It consumes a reservation under the same key. If the last
        delivered token ends the answer, FinishedEvent is the only event.

        `matcher` is what `Constraints.prepare` made for this request. If it has a grammar and none
        is given, the engine thread compiles the grammar.

        A refusal is a FailedEvent: ContextTooLongError, InvalidRequestError, OverloadedError,
        DuplicateError, DrainingError.
        """
        return self._stream(
            request.key,
            lambda state, stream: state.sequences.submit(
                request, stream, for_peer=for_peer, matcher=matcher
            ),
        )

    async def prefetch(self, request: Request) -> PrefetchResult:
        """Compute the whole blocks of a prompt into the prefix cache while no request is here.

        It ends as soon as a request comes, and needs the embeddings of its images in memory.

        Raises:
            DrainingError: this worker takes no new work.
            WorkerError: the request cannot run here.
        """
        future: asyncio.Future[PrefetchResult] = asyncio.get_running_loop().create_future()

        def work(state: State) -> None:
            try:
                state.prefetch(request, functools.partial(state.events.answer, future))
            except WorkerError as error:
                state.events.answer(future, error)

        self._thread.post(Command(work, functools.partial(refuse, future)))
        try:
            return await future
        except asyncio.CancelledError:
            self._thread.post(Command(lambda state: state.prefetches.cancel(request.key)))
            raise

    async def put_embedding(self, key: RequestKey, item: int, rows: memoryview) -> None:
        """Deliver the embedding of an item that NeedItems named; idempotent.

        Raises CorruptTransferError if the size differs from what the item needs.
        """
        await self._thread.call(
            lambda state: state.put_embedding(key, item, rows), num_bytes=rows.nbytes
        )

    async def lend_blocks(
        self, key: RequestKey, first_block: int, end_block: int
    ) -> Callable[[], None]:
        """Keep announced blocks unchanged until the result is called, even if the request ends."""
        loans: list[BlockLoan] = []
        try:
            await self._thread.call(
                lambda state: state.sequences.lend(key, first_block, end_block, loans)
            )
        except BaseException:
            self._return(key, loans)  # the command may run after a cancel
            raise
        return functools.partial(self._return, key, loans)

    def _return(self, key: RequestKey, loans: list[BlockLoan]) -> None:
        self._thread.post(Command(lambda state: state.attempts.return_loans(key, loans)))

    # ---- decode ----------------------------------------------------------------------------------

    async def reserve(self, key: RequestKey, num_tokens: int) -> None:
        """Reserve KV blocks; idempotent per key.

        `receive`, `submit_prefill` or `release` end the reservation.

        Raises:
            OverloadedError: too few blocks are available now.
            ContextTooLongError: the cache is too small.
        """
        await self._thread.call(lambda state: state.sequences.reserve(key, num_tokens))

    async def receive(
        self, request: Request, *, in_place: bool = False, matcher: Matcher | None = None
    ) -> ReceiveResult:
        """Turn the reservation into blocks; returns the first block that a peer has to deliver.

        `BlockShape.num_blocks` is the number of the request's blocks; if `first_block` equals this
        number, nothing is missing. With `in_place` the engine lends the memory of the blocks if the
        runner allows it: one thread of the caller writes there, the caller confirms the blocks, and
        it always returns the loan. `matcher` is as in `submit_prefill`.

        Raises:
            OverloadedError: the reservation was too small, and too few blocks are available.
        """
        return await self._thread.call(
            lambda state: state.sequences.receive(request, in_place=in_place, matcher=matcher)
        )

    async def import_blocks(self, key: RequestKey, first_block: int, data: memoryview) -> None:
        """Write whole blocks `first_block ...` that a peer sent; in any order.

        Raises CorruptTransferError if they are not whole blocks, or not of this request.
        """
        await self._thread.call(
            lambda state: state.sequences.import_blocks(key, first_block, data),
            num_bytes=data.nbytes,
        )

    async def confirm_blocks(self, key: RequestKey, first_block: int, num_blocks: int) -> None:
        """Confirm that lent blocks are written and checked; in any order.

        Raises CorruptTransferError if they are not of this request, or were confirmed before.
        """
        await self._thread.call(
            lambda state: state.sequences.confirm_blocks(key, first_block, num_blocks)
        )

    def return_blocks(self, key: RequestKey) -> None:
        """Return the loan of this key: no thread writes into its blocks. Idempotent.

        Until then the blocks are not reused, even if the request has ended.
        """
        self._thread.post(Command(lambda state: state.sequences.return_loan(key)))

    async def start_decode(self, key: RequestKey, first_token_id: int) -> EventStream[PrefillEvent]:
        """Begin decoding after the last block: tokens from index `num_delivered_tokens + 1` on.

        Raises CorruptTransferError if blocks are missing.
        """
        stream: EventStream[PrefillEvent] = EventStream(key)
        await self._thread.call(
            lambda state: state.sequences.start_decode(key, first_token_id, stream)
        )
        return stream

    def adopt_local(self, request: Request) -> EventStream[PrefillEvent]:
        """Continue the sequence that this engine holds or prefills under the same key. No copy.

        Streams tokens from index `num_delivered_tokens + 1` on; FailedEvent(GoneError) if nothing
        is held.
        """
        return self._stream(
            request.key, lambda state, stream: state.sequences.adopt(request, stream)
        )

    # ---- the end ---------------------------------------------------------------------------------

    async def cancel(self, key: RequestKey) -> CancelOutcome:
        """End everything under `key` and free it: sequence, reservation, pins, queued images.

        CANCEL_REQUESTED_IN_FLIGHT means that a peer has read some of the blocks and may continue.
        It reads copies, so the blocks are free.
        """
        return await self._thread.call(lambda state: state.cancel(key))

    async def release(self, key: RequestKey) -> None:
        """Free what is held or reserved under `key`; idempotent, and no error for unknown keys."""
        await self._thread.call(lambda state: state.sequences.release(key))

    async def drain(self) -> int:
        """At the drain deadline: end every sequence and refuse new work.

        Decoding sequences finish with FinishReason.DRAINED, the others fail with DrainingError.
        Returns the number of ended sequences and images.
        """
        return await self._thread.call(lambda state: state.drain())

    def _stream(
        self, key: RequestKey, work: Callable[[State, EventStream[PrefillEvent]], None]
    ) -> EventStream[PrefillEvent]:
        """Queue a command whose results arrive through a stream."""
        stream: EventStream[PrefillEvent] = EventStream(key)

        def refuse(error: EngineError) -> None:
            stream.close_with(FailedEvent(error))

        self._thread.post(Command(lambda state: work(state, stream), refuse))
        return stream
