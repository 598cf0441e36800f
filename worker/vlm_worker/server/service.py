"""The gRPC services of a worker: they convert messages, call roles and map errors.

METHODS ─▶ handler ─▶ wire: message -> call ─▶ role ─▶ wire: reply -> message
└ converts an error to its gRPC status
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing
from typing import Any, TypeVar

import grpc

from vlm_worker.client import WorkerClient
from vlm_worker.engine.events import EventStream
from vlm_worker.errors import (
    CancelledError,
    DrainingError,
    InvalidRequestError,
    PeerLostError,
    UnauthorizedError,
    WorkerError,
)
from vlm_worker.pb import worker_pb2 as pb
from vlm_worker.roles.context import CallTimer
from vlm_worker.roles.registry import FETCHED_FROM, ROLES
from vlm_worker.server.components import WorkerComponents
from vlm_worker.server.state import WorkerState
from vlm_worker.settings.timers import Timers
from vlm_worker.telemetry import CALL, REQUEST_ID, SpanExporter, WorkerCall
from vlm_worker.types import Stage
from vlm_worker.wire import messages, prefetch_messages
from vlm_worker.wire.codec import Codec
from vlm_worker.wire.data_protocol import Fetch
from vlm_worker.wire.frames import FrameBatches, join_frames
from vlm_worker.wire.identity import IdentityError, refusal
from vlm_worker.wire.identity_store import IdentityStore
from vlm_worker.wire.messages import DecodeCall, DecodeEvent, FetchCall, Reply
from vlm_worker.wire.rpc import DATA_PORT, METHODS, PACKAGE, SEND_IMAGES, Method
from vlm_worker.wire.sockets import peer_of
from vlm_worker.wire.status import error_of, status_of

logger = logging.getLogger(__name__)

T = TypeVar("T")
Handler = Callable[[Any, Any], Awaitable[Any]]


class Service:
    """All services of one process. `components` is set when the model is loaded.

    `live` counts the calls in flight, by name. `tracer` exports spans; None without a collector. A
    fetch over gRPC sends `data_port` to its consumer, for later fetches; 0 = no data port. With
    `identity`, each call is authorised by its caller's.
    """

    def __init__(self, state: WorkerState, identity: IdentityStore | None = None) -> None:
        self._state = state
        self._identity = identity
        self.components: WorkerComponents | None = None
        self.data_port = 0
        self.live: Counter[str] = Counter()
        self.tracer: SpanExporter | None = None

    def handlers(self) -> tuple[Any, ...]:
        """The argument of `grpc.aio.Server.add_generic_rpc_handlers`."""
        by_service: dict[str, dict[str, Any]] = {}
        shared = {fetch.method: self._sends(fetch) for fetch in FETCHED_FROM}
        for stage, role in ROLES.items():
            shared |= {name: self._streams(stage, name, *rpc) for name, rpc in role.rpcs.items()}
        for method in METHODS.values():
            handler = shared.get(method.name) or getattr(self, f"_{method.name}")
            handler = self._with_status(method, handler)
            by_service.setdefault(method.service, {})[method.name] = _rpc_handler(method, handler)
        return tuple(
            grpc.method_handlers_generic_handler(f"{PACKAGE}.{service}", handlers)
            for service, handlers in by_service.items()
        )

    async def decode(self, call: DecodeCall, deliver: Callable[[Reply[DecodeEvent]], None]) -> None:
        """Run a Decode for a gateway in this process, with the same counts as over gRPC."""
        traced = WorkerCall.begin(call.request.key)
        with self._counted("Decode"):
            role = self._ready().role(Stage.DECODE)
            async with aclosing(role.decode(call, CallTimer())) as replies:
                async for reply in replies:
                    traced.report(reply.spans)
                    deliver(reply)

    def _with_status(self, method: Method, handler: Handler) -> Handler:
        async def answered(request: Any, context: Any) -> Any:
            try:
                self._authorize(method.name, context)
                with self._counted(method.name):
                    return await handler(request, context)
            except asyncio.CancelledError:
                raise
            except Exception as error:  # noqa: BLE001  the caller gets its status
                return await context.abort(*status_of(error))

        return answered

    def _authorize(self, method: str, context: Any) -> None:
        """Raises UnauthorizedError if the certificate of the caller does not allow the method."""
        if self._identity is None:
            return
        try:
            reason = refusal(method, peer_of(context), self._identity.now.identity)
        except IdentityError as error:
            reason = f"{method}: {error}"
        if reason is not None:
            logger.warning("call refused", extra={"call": method, "reason": reason})
            raise UnauthorizedError(reason)

    async def authorize_health(self, context: Any) -> None:
        """End a call of grpc.health.v1 by a caller of another service; all roles may call it."""
        if self._identity is None:
            return
        try:
            peer = peer_of(context)
            if peer.is_same_service(self._identity.now.identity):
                return
            reason = f"{peer.uri} is no identity of this service"
        except IdentityError as error:
            reason = str(error)
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, f"health: {reason}")

    @contextlib.contextmanager
    def _counted(self, name: str) -> Iterator[None]:
        """Count a call while it is in flight. At its end count, log and trace its outcome."""
        counted = name == "Encode" or any(name in role.rpcs for role in ROLES.values())
        ending: BaseException | None = None
        self.live[name] += 1
        try:
            yield
        except BaseException as error:
            ending = error
            if isinstance(error, Exception) and not isinstance(error, WorkerError):
                logger.exception("call failed", extra={"call": name})
            raise
        finally:
            self.live[name] -= 1
            if counted:
                self._ended(name, ending)

    def _ended(self, name: str, error: BaseException | None) -> None:
        outcome = self._state.count(error)
        reason = "" if error is None else f"{type(error).__name__}: {error}"
        call = CALL.get()
        if call is None:  # it ended before its request was read
            logger.info("call", extra={"call": name, "outcome": outcome, "error": reason})
            return
        extra = {"call": name, "attempt": call.key.attempt, "outcome": outcome}
        seconds = round(time.monotonic() - call.began, 4)
        logger.info("call", extra={**extra, "seconds": seconds, "error": reason})
        if self.tracer is not None:
            self.tracer.call(call, name.lower(), error=reason)

    def _ready(self) -> WorkerComponents:
        if self.components is None:
            raise DrainingError(f"this worker is not ready: {self._state.message}")
        return self.components

    # ---- Worker --------------------------------------------------------------------------------

    async def _Hello(self, _: pb.HelloRequest, __: Any) -> Any:  # noqa: N802
        return messages.HELLO.encode(self._ready().hello(self._state))

    async def _WatchLoad(self, _: pb.WatchLoadRequest, context: Any) -> None:  # noqa: N802
        components = self._ready()
        while True:
            await context.write(messages.LOAD.encode(components.load(self._state)))
            await asyncio.sleep(self._state.settings.timers.load)

    async def _Cancel(self, request: pb.CancelRequest, _: Any) -> Any:  # noqa: N802
        key = messages.CANCEL.decode(request)
        outcome = await self._ready().context.attempts.cancel(key.request_id, key.attempt)
        return messages.CANCEL_REPLY.encode(messages.CancelReply(outcome))

    async def _RenewLeases(self, request: pb.RenewLeasesRequest, _: Any) -> Any:  # noqa: N802
        call = messages.RENEW.decode(request)
        gone = self._ready().context.attempts.renew(call.boot_id, call.transfer_ids)
        return messages.RENEW_REPLY.encode(messages.RenewReply(frozenset(gone)))

    async def _ReleaseLease(self, request: pb.ReleaseLeaseRequest, _: Any) -> Any:  # noqa: N802
        call = messages.RELEASE.decode(request)
        self._ready().context.attempts.release(call.boot_id, call.transfer_id)
        return pb.ReleaseLeaseReply()

    # ---- Encoder -------------------------------------------------------------------------------

    async def _Encode(self, _: Any, context: Any) -> None:  # noqa: N802
        timer = CallTimer()
        role = self._ready().role(Stage.ENCODER)
        within = self._state.settings.timers.no_progress
        first = await _next(context, within)
        if first is None:  # cancelled: gRPC ends the stream before it cancels this task
            raise CancelledError("the caller ended the Encode stream before its first message")
        if first.WhichOneof("kind") != "begin":
            raise InvalidRequestError("an Encode stream starts with `begin`")
        call = messages.ENCODE_CALL.decode(first.begin)
        WorkerCall.begin(call.key)
        replies = role.encode(call, _chunks(context, within), timer)
        await _write_all(replies, messages.ENCODE_REPLY.encode, context)

    # ---- calls of the registry -----------------------------------------------------------------

    def _streams(self, stage: Stage, name: str, call: Codec[Any], reply: Codec[Any]) -> Handler:
        async def handler(request: Any, context: Any) -> None:
            timer = CallTimer()
            run = getattr(self._ready().role(stage), name.lower())
            decoded = call.decode(request)
            WorkerCall.begin(decoded.request.key)
            await _write_all(run(decoded, timer), reply.encode, context)

        return handler

    def _sends(self, fetch: Fetch) -> Handler:
        async def handler(request: pb.FetchRequest, context: Any) -> None:
            await self._send(self._batches(fetch, messages.FETCH_CALL.decode(request)), context)

        return handler

    async def _send(self, batches: FrameBatches, context: Any) -> None:
        """Send frames over gRPC.

        Raises:
            PeerLostError: the consumer took no frame for longer than its lease can last.
        """
        timers = self._state.settings.timers
        within = timers.no_progress + timers.lease
        if self.data_port:
            await context.send_initial_metadata(((DATA_PORT, str(self.data_port)),))
        async with aclosing(join_frames(batches)) as frames:
            async for frame in frames:
                try:
                    async with asyncio.timeout(within):
                        await context.write(frame)
                except TimeoutError:
                    raise PeerLostError(f"no frame was taken for {within:g} s") from None

    def _batches(self, fetch: Fetch, call: FetchCall, *, large: bool = False) -> FrameBatches:
        batches: FrameBatches = self._ready().role(FETCHED_FROM[fetch]).fetch(call, large=large)
        return batches

    async def fetch(self, fetch: Fetch, call: FetchCall) -> FrameBatches:
        """Yield the frame batches of a fetch over a data connection."""
        self.live[fetch.method] += 1
        try:
            async with aclosing(self._batches(fetch, call, large=True)) as batches:
                async for batch in batches:
                    yield batch
        finally:
            self.live[fetch.method] -= 1

    # ---- Prefill -------------------------------------------------------------------------------

    async def _Prefetch(self, request: pb.PrefetchRequest, _: Any) -> Any:  # noqa: N802
        role = self._ready().role(Stage.PREFILL)
        call = prefetch_messages.PREFETCH_CALL.decode(request)
        REQUEST_ID.set(call.request.key.request_id)
        return prefetch_messages.PREFETCH_REPLY.encode(await role.prefetch(call))

    # ---- Decode --------------------------------------------------------------------------------

    async def _Reserve(self, request: pb.ReserveRequest, context: Any) -> Any:  # noqa: N802
        role = self._ready().role(Stage.DECODE)
        peer = _host_of(context.peer())
        call = messages.RESERVE_CALL.decode(request)
        REQUEST_ID.set(call.key.request_id)
        reservation = await role.reserve(call, peer=peer)
        return messages.RESERVATION.encode(reservation)


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


def _host_of(peer: str) -> str:
    """The host of gRPC's peer name: `ipv4:10.0.0.1:40312` without the port."""
    return peer.rpartition(":")[0]


async def _write_all(
    replies: AsyncGenerator[Reply[Any]], to_message: Callable[[Reply[Any]], Any], context: Any
) -> None:
    call = CALL.get()
    async with aclosing(replies):
        async for reply in replies:
            if call is not None and reply.spans:
                call.report(reply.spans)
            await context.write(to_message(reply))


async def _chunks(context: Any, within: float) -> AsyncIterator[tuple[int, bytes]]:
    """Yield the chunks of an upload as (item, bytes).

    The client sends images after the initial metadata. The metadata is sent when the role asks for
    the first chunk, after it has accepted the call. Each chunk is deleted before the next read,
    because its bytes would not be accounted for.
    """
    await context.send_initial_metadata(((SEND_IMAGES, "1"),))
    while (chunk := _chunk_of(await _next(context, within))) is not None:
        yield chunk
        del chunk


def _chunk_of(message: pb.EncodeRequest | None) -> tuple[int, bytes] | None:
    if message is None:
        return None
    if message.WhichOneof("kind") != "chunk":
        raise InvalidRequestError("an Encode stream goes on with chunks")
    chunk = messages.CHUNK.decode(message.chunk, "chunk.")
    return chunk.item, chunk.data


async def _next(context: Any, within: float) -> pb.EncodeRequest | None:
    """The next message of an upload; None at its end.

    It reads from the call, because gRPC's iterator keeps a message until it has the next one.

    Raises:
        PeerLostError: no message arrived within `within` seconds.
    """
    try:
        async with asyncio.timeout(within):
            message = await context.read()
            return None if message is grpc.aio.EOF else message
    except TimeoutError:
        raise PeerLostError(f"no bytes of the images arrived for {within:g} s") from None


class LocalClient(WorkerClient):
    """Client for a gateway in this process: the tokens of a Decode do not pass gRPC.

    Over gRPC, each token is serialized and parsed, passes two sockets, and wakes threads on the
    cores that run the kernels.
    """

    def __init__(self, address: str, *, timers: Timers, service: Service) -> None:
        super().__init__(address, timers=timers)
        self._service = service
        self._calls: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        for task in self._calls:
            task.cancel()
        await super().close()

    async def decode(
        self, call: DecodeCall, *, timeout: float
    ) -> AsyncGenerator[Reply[DecodeEvent]]:
        """Decode with the same replies, errors and deadline as gRPC; closing cancels the call."""
        replies: EventStream[Reply[DecodeEvent]] = EventStream(call.request.key)
        task = asyncio.create_task(self._service.decode(call, replies.push))
        self._calls.add(task)
        task.add_done_callback(self._ended)
        task.add_done_callback(lambda _: replies.close_with())
        deadline = asyncio.get_running_loop().call_later(timeout, task.cancel)
        try:
            async for reply in replies:
                yield reply
            if task.cancelled():
                raise PeerLostError(f"{self.address}: the call ended before its answer")
            if error := task.exception():
                assert isinstance(error, Exception)
                raise error_of(*status_of(error), peer=self.address)
        finally:
            deadline.cancel()
            task.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._calls.discard(task)
        if not task.cancelled():
            task.exception()  # marks the error as retrieved if the caller has disconnected
