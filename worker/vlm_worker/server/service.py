"""The gRPC services of a worker: a message in, a role, messages out, and one last word each.

METHODS ─▶ handler ─▶ wire: message -> call ─▶ role ─▶ wire: reply -> message
└ an error becomes its status, once, here
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing
from typing import Any, TypeVar

import grpc

from vlm_worker.errors import (
    CancelledError,
    DrainingError,
    IncompatibleError,
    InvalidRequestError,
    PeerLostError,
    WorkerError,
)
from vlm_worker.pb import worker_pb2 as pb
from vlm_worker.roles.times import CallClock
from vlm_worker.server.parts import Parts
from vlm_worker.server.state import WorkerState
from vlm_worker.wire import checks, decode, encode, identity, prefill
from vlm_worker.wire.calls import DecodeCall, DecodeEvent, FetchCall, Reply
from vlm_worker.wire.data import Fetch
from vlm_worker.wire.errors import status_of
from vlm_worker.wire.frames import Runs
from vlm_worker.wire.joining import joined
from vlm_worker.wire.methods import METHODS, PACKAGE, Method
from vlm_worker.wire.options import CHUNK_BYTES, DATA_PORT, SEND_PICTURES

logger = logging.getLogger(__name__)

T = TypeVar("T")
Handler = Callable[[Any, Any], Awaitable[Any]]


class Service:
    """All services of one process. `parts` is set when the model is loaded.

    `live` counts the calls that are being answered, by name. `data_port` is what a fetch tells its
    consumer, for the next ones; 0 where there is none.
    """

    def __init__(self, state: WorkerState) -> None:
        self._state = state
        self.parts: Parts | None = None
        self.data_port = 0
        self.live: Counter[str] = Counter()

    def handlers(self) -> tuple[Any, ...]:
        """What `grpc.aio.Server.add_generic_rpc_handlers` takes."""
        by_service: dict[str, dict[str, Any]] = {}
        for method in METHODS.values():
            handler = self._guarded(method, getattr(self, f"_{method.name}"))
            by_service.setdefault(method.service, {})[method.name] = _rpc_handler(method, handler)
        return tuple(
            grpc.method_handlers_generic_handler(f"{PACKAGE}.{service}", handlers)
            for service, handlers in by_service.items()
        )

    async def decode(self, call: DecodeCall, deliver: Callable[[Reply[DecodeEvent]], None]) -> None:
        """A Decode of a gateway in this process, counted as one that came over the wire."""
        with self._counted("Decode"):
            role = _loaded(self._ready().decode, "decode")
            async with aclosing(role.decode(call, CallClock())) as replies:
                async for reply in replies:
                    deliver(reply)

    def _guarded(self, method: Method, handler: Handler) -> Handler:
        """Turn whatever goes wrong into the call's last word."""

        async def guarded(request: Any, context: Any) -> Any:
            try:
                with self._counted(method.name):
                    return await handler(request, context)
            except asyncio.CancelledError:
                raise
            except Exception as error:  # noqa: BLE001  whatever it is, its caller is told
                return await context.abort(*status_of(error))

        return guarded

    @contextlib.contextmanager
    def _counted(self, name: str) -> Iterator[None]:
        """Count a call while it is answered, and how it ended."""
        counted = name in ("Encode", "Prefill", "Decode")
        ending: BaseException | None = None
        self.live[name] += 1
        try:
            yield
        except BaseException as error:
            ending = error
            if isinstance(error, WorkerError):
                if counted:
                    logger.info("call ended", extra={"call": name, "error": str(error)})
            elif isinstance(error, Exception):
                logger.exception("call failed", extra={"call": name})
            raise
        finally:
            self.live[name] -= 1
            if counted:
                self._state.count(ending)

    def _ready(self) -> Parts:
        if self.parts is None:
            raise DrainingError(f"this worker is not ready: {self._state.message}")
        return self.parts

    # ---- Worker --------------------------------------------------------------------------------

    async def _Hello(self, _: pb.HelloRequest, __: Any) -> pb.HelloReply:  # noqa: N802
        return identity.hello_to(self._ready().hello(self._state))

    async def _WatchLoad(self, _: pb.WatchLoadRequest, context: Any) -> None:  # noqa: N802
        parts = self._ready()
        while True:
            await context.write(identity.load_to(parts.load(self._state)))
            await asyncio.sleep(self._state.settings.timers.load)

    async def _Cancel(self, request: pb.CancelRequest, _: Any) -> pb.CancelReply:  # noqa: N802
        key = identity.cancel_call_of(request)
        outcome = await self._ready().host.cancel(key.request_id, key.attempt)
        return pb.CancelReply(outcome=pb.CancelOutcome.Name(outcome.value))

    async def _RenewLeases(  # noqa: N802
        self, request: pb.RenewLeasesRequest, _: Any
    ) -> pb.RenewLeasesReply:
        boot_id, lease_ids = identity.renew_call_of(request)
        return pb.RenewLeasesReply(gone=self._ready().host.offers.renew(boot_id, lease_ids))

    async def _ReleaseLease(  # noqa: N802
        self, request: pb.ReleaseLeaseRequest, _: Any
    ) -> pb.ReleaseLeaseReply:
        boot_id, lease_id = identity.release_call_of(request)
        self._ready().host.offers.release(boot_id, lease_id)
        return pb.ReleaseLeaseReply()

    # ---- Encoder -------------------------------------------------------------------------------

    async def _Encode(self, requests: AsyncIterator[pb.EncodeRequest], context: Any) -> None:  # noqa: N802
        clock = CallClock()
        role = _loaded(self._ready().encoder, "encoder")
        within = self._state.settings.timers.no_progress
        first = await _next(requests, within)
        if first is None:  # it cancelled: gRPC ends the stream before it cancels this task
            raise CancelledError("the caller ended the Encode stream before its first message")
        if first.WhichOneof("kind") != "begin":
            raise InvalidRequestError("an Encode stream starts with `begin`")
        call = encode.encode_call_of(first.begin)
        replies = role.encode(call, _chunks(requests, context, within), clock)
        await _write_all(replies, encode.encode_reply_to, context)

    async def _FetchEmbedding(self, request: pb.FetchRequest, context: Any) -> None:  # noqa: N802
        await self._send(self._fetched(Fetch.EMBEDDING, identity.fetch_call_of(request)), context)

    async def _send(self, runs: Runs, context: Any) -> None:
        """Frames, as long as their consumer takes them: its lease does not outlive this."""
        timers = self._state.settings.timers
        within = timers.no_progress + timers.lease
        if self.data_port:
            await context.send_initial_metadata(((DATA_PORT, str(self.data_port)),))
        async with aclosing(joined(runs)) as frames:
            async for frame in frames:
                try:
                    async with asyncio.timeout(within):
                        await context.write(frame)
                except TimeoutError:
                    raise PeerLostError(f"no frame was taken for {within:g} s") from None

    def _fetched(self, fetch: Fetch, call: FetchCall, *, large: bool = False) -> Runs:
        match fetch:
            case Fetch.EMBEDDING:
                return _loaded(self._ready().encoder, "encoder").fetch(call, large=large)
            case Fetch.KV:
                return _loaded(self._ready().prefill, "prefill").fetch(call, large=large)

    async def fetched(self, fetch: Fetch, call: FetchCall) -> Runs:
        """What a consumer asks for over a data connection."""
        name = fetch.method
        self.live[name] += 1
        try:
            async with aclosing(self._fetched(fetch, call, large=True)) as runs:
                async for run in runs:
                    yield run
        finally:
            self.live[name] -= 1

    # ---- Prefill -------------------------------------------------------------------------------

    async def _Prefill(self, request: pb.PrefillRequest, context: Any) -> None:  # noqa: N802
        clock = CallClock()
        role = _loaded(self._ready().prefill, "prefill")
        replies = role.prefill(prefill.prefill_call_of(request), clock)
        await _write_all(replies, prefill.prefill_reply_to, context)

    async def _FetchKV(self, request: pb.FetchRequest, context: Any) -> None:  # noqa: N802
        await self._send(self._fetched(Fetch.KV, identity.fetch_call_of(request)), context)

    # ---- Decode --------------------------------------------------------------------------------

    async def _Reserve(self, request: pb.ReserveRequest, _: Any) -> pb.ReserveReply:  # noqa: N802
        role = _loaded(self._ready().decode, "decode")
        reservation = await role.reserve(decode.reserve_call_of(request))
        return pb.ReserveReply(
            reservation_id=reservation.reservation_id,
            boot_id=reservation.boot_id,
            lease_milliseconds=round(reservation.lease_seconds * 1000),
        )

    async def _Decode(self, request: pb.DecodeRequest, context: Any) -> None:  # noqa: N802
        clock = CallClock()
        role = _loaded(self._ready().decode, "decode")
        replies = role.decode(decode.decode_call_of(request), clock)
        await _write_all(replies, decode.decode_reply_to, context)


def _rpc_handler(method: Method, handler: Handler) -> Any:
    kinds = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    return kinds[method.client_streaming, method.server_streaming](
        handler,
        request_deserializer=method.request_from_bytes,
        response_serializer=method.response_to_bytes,
    )


def _loaded(role: T | None, stage: str) -> T:
    if role is None:
        raise IncompatibleError(f"the stage {stage} is not loaded here")
    return role


async def _write_all(
    replies: AsyncGenerator[T], to_message: Callable[[T], Any], context: Any
) -> None:
    async with aclosing(replies):
        async for reply in replies:
            await context.write(to_message(reply))


async def _chunks(
    requests: AsyncIterator[pb.EncodeRequest], context: Any, within: float
) -> AsyncIterator[tuple[int, bytes]]:
    """The chunks; they are asked for when the first one is, which is when the call is taken."""
    await context.send_initial_metadata(((SEND_PICTURES, "1"),))
    while (message := await _next(requests, within)) is not None:
        if message.WhichOneof("kind") != "chunk":
            raise InvalidRequestError("an Encode stream goes on with chunks")
        yield message.chunk.item, checks.at_most(message.chunk.data, "chunk.data", CHUNK_BYTES)


async def _next(
    requests: AsyncIterator[pb.EncodeRequest], within: float
) -> pb.EncodeRequest | None:
    """The next message of an upload, None at its end; PeerLostError after so many seconds."""
    try:
        async with asyncio.timeout(within):
            return await anext(aiter(requests), None)
    except TimeoutError:
        raise PeerLostError(f"no bytes of the pictures came for {within:g} s") from None
