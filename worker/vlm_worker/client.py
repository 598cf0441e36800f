"""A typed client of one worker: values in, values out, errors raised. For gateway and consumers.

    async with WorkerClient("10.0.0.7:9000") as worker:
        reservation = await worker.reserve(call, timeout=2.0)
        async with aclosing(worker.prefill(call, timeout=60.0)) as replies:
            async for reply in replies: ...

Streams are asynchronous generators. Leave them through `contextlib.aclosing`, so that an abandoned
call is cancelled at once: grpc.aio never cancels a call that is only dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from typing import Any, Self, TypeVar

import grpc

from vlm_worker.errors import InvalidRequestError, PeerLostError
from vlm_worker.pb import worker_pb2 as pb
from vlm_worker.settings.options import MAX_PORT
from vlm_worker.settings.timers import PRODUCTION, Timers
from vlm_worker.types import RequestKey, Role
from vlm_worker.wire import messages, prefetch_messages
from vlm_worker.wire.codec import Codec
from vlm_worker.wire.data_protocol import Fetch
from vlm_worker.wire.identity import IdentityError, ServiceIdentity
from vlm_worker.wire.identity_store import IdentityStore
from vlm_worker.wire.prefetch_messages import PrefetchResult
from vlm_worker.wire.rpc import DATA_PORT, METHODS, SEND_IMAGES, SENT_CHUNK_BYTES
from vlm_worker.wire.sockets import identity_at, open_channel, open_secure_channel
from vlm_worker.wire.status import error_of_call

T = TypeVar("T")


class WorkerClient:
    """One worker at `address` (host:port); connects at first use, and again after a loss.

    A control call without a `timeout` uses `timers.control`. `data_port` is the port that the last
    fetch reported.

    With `identity`, the first call learns the worker's identity from a handshake. After a rotation,
    new calls use a new channel; calls in flight end on the old one.
    """

    def __init__(
        self,
        address: str,
        *,
        timers: Timers = PRODUCTION,
        identity: IdentityStore | None = None,
    ) -> None:
        self.address = address
        self.timers = timers
        self.data_port: int | None = None
        self._identity = identity
        self._peer: ServiceIdentity | None = None
        self._generation = 0
        self._opening = asyncio.Lock()
        self._retired: set[asyncio.Task[None]] = set()
        self._channel: Any = open_channel(address, timers) if identity is None else None
        self._stubs: dict[str, Any] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection and end its calls."""
        for task in self._retired:
            task.cancel()
        await asyncio.gather(*self._retired, return_exceptions=True)
        if self._channel is not None:
            await self._channel.close()

    @property
    def peer(self) -> ServiceIdentity | None:
        """The identity in the worker's certificate; None without mutual TLS."""
        return self._peer

    @property
    def certified_role(self) -> Role | None:
        """The role in the worker's certificate; None without mutual TLS."""
        return self._peer.role if self._peer else None

    # ---- identity and load ---------------------------------------------------------------------

    async def hello(self, *, timeout: float | None = None) -> messages.Hello:
        """The worker's identity; IncompatibleError if it uses another protocol version."""
        request = pb.HelloRequest(protocol_version=messages.PROTOCOL_VERSION)
        return self._read(
            messages.HELLO.decode, await self._unary("Hello", request, timeout=timeout)
        )

    def watch_load(self) -> AsyncGenerator[messages.Load]:
        """Its load, once a second, until the caller closes; PeerLostError if it is lost."""
        return self._replies("WatchLoad", pb.WatchLoadRequest(), messages.LOAD, None)

    # ---- a request -----------------------------------------------------------------------------

    async def encode(
        self, call: messages.EncodeCall, images: Sequence[bytes | bytearray], *, timeout: float
    ) -> AsyncGenerator[messages.Reply[messages.EncodeEvent]]:
        """Send images; yields Decoded once, then ItemReady or ItemFailed for each."""
        may_send = asyncio.get_running_loop().create_future()
        upload = _upload(call, images, may_send)

        def decide(metadata: Mapping[str, Any]) -> None:
            may_send.set_result(SEND_IMAGES in metadata)

        try:
            async with aclosing(self._stream("Encode", upload, timeout, decide)) as replies:
                async for message in replies:
                    yield self._read(messages.ENCODE_REPLY.decode, message)
        finally:
            if not may_send.done():
                may_send.set_result(False)

    async def reserve(
        self, call: messages.ReserveCall, *, timeout: float | None = None
    ) -> messages.Reservation:
        """Reserve KV blocks; `renew` keeps them until `decode`, `release` frees them."""
        reply = await self._unary("Reserve", messages.RESERVE_CALL.encode(call), timeout=timeout)
        return self._read(messages.RESERVATION.decode, reply)

    def prefill(
        self, call: messages.PrefillCall, *, timeout: float
    ) -> AsyncGenerator[messages.Reply[messages.PrefillEvent]]:
        """Compute a prompt; yields Accepted, FirstToken, PrefillDone."""
        return self._replies(
            "Prefill", messages.PREFILL_CALL.encode(call), messages.PREFILL_REPLY, timeout
        )

    async def prefetch(
        self, call: prefetch_messages.PrefetchCall, *, timeout: float
    ) -> PrefetchResult:
        """Compute the beginning of a prompt while the worker is idle; returns how that ended."""
        request = prefetch_messages.PREFETCH_CALL.encode(call)
        reply = await self._unary("Prefetch", request, timeout=timeout)
        return self._read(prefetch_messages.PREFETCH_REPLY.decode, reply)

    def decode(
        self, call: messages.DecodeCall, *, timeout: float
    ) -> AsyncGenerator[messages.Reply[messages.DecodeEvent]]:
        """Continue an answer after its first token; yields Tokens, then Finished."""
        return self._replies(
            "Decode", messages.DECODE_CALL.encode(call), messages.DECODE_REPLY, timeout
        )

    async def cancel(
        self, key: RequestKey, *, timeout: float | None = None
    ) -> messages.CancelOutcome:
        """End an attempt on the worker and free it; idempotent. Attempt 0 means all attempts."""
        reply = await self._unary("Cancel", messages.CANCEL.encode(key), timeout=timeout)
        return self._read(messages.CANCEL_REPLY.decode, reply).outcome

    # ---- transfers -----------------------------------------------------------------------------

    async def renew(
        self, boot_id: bytes, transfer_ids: Iterable[str], *, timeout: float | None = None
    ) -> frozenset[str]:
        """Renew leases and reservations; returns those that are gone."""
        request = messages.RENEW.encode(messages.RenewCall(tuple(transfer_ids), boot_id))
        reply = await self._unary("RenewLeases", request, timeout=timeout)
        return self._read(messages.RENEW_REPLY.decode, reply).gone

    async def release(
        self, boot_id: bytes, transfer_id: str, *, timeout: float | None = None
    ) -> None:
        """Release a lease or a reservation; idempotent."""
        request = messages.RELEASE.encode(messages.ReleaseCall(transfer_id, boot_id))
        await self._unary("ReleaseLease", request, timeout=timeout)

    async def fetch(
        self, fetch: Fetch, call: messages.FetchCall, *, timeout: float
    ) -> AsyncGenerator[bytes]:
        """The raw frames of an embedding or of KV blocks; `wire.frame_reader` reads them.

        They arrive while prefill still writes the blocks.
        """
        metadata: dict[str, Any] = {}
        request = messages.FETCH_CALL.encode(call)
        stream = self._stream(fetch.method, request, timeout, metadata.update)
        async with aclosing(stream) as frames:
            async for frame in frames:
                port = str(metadata.get(DATA_PORT, ""))  # a call that fails has no metadata
                is_port = port.isdecimal() and 0 < int(port) <= MAX_PORT
                self.data_port = int(port) if is_port else None
                yield frame

    # ---- gRPC ----------------------------------------------------------------------------------

    async def _secure(self, identity: IdentityStore) -> None:
        """Open a channel with the newest credentials; the one before ends after its last call.

        Raises:
            PeerLostError: there is no channel yet, and none could be opened.
        """
        async with self._opening:
            credentials = identity.now
            if self._generation == credentials.generation:
                return
            try:
                async with asyncio.timeout(self.timers.hello):
                    peer = await identity_at(self.address, credentials)
            except (OSError, IdentityError) as error:  # TimeoutError is one
                if self._channel is not None:
                    return  # the old channel still serves; the next call tries again
                raise PeerLostError(f"{self.address}: no mutual TLS: {error}") from None
            if self._channel is not None:
                task = asyncio.create_task(self._channel.close(grace=self.timers.decode))
                self._retired.add(task)
                task.add_done_callback(self._retired.discard)
            self._channel = open_secure_channel(self.address, self.timers, credentials, peer)
            self._stubs = {}
            self._peer, self._generation = peer, credentials.generation

    def _stub(self, name: str) -> Any:
        stub = self._stubs.get(name)
        if stub is None:
            method = METHODS[name]
            kinds = {
                (False, False): self._channel.unary_unary,
                (False, True): self._channel.unary_stream,
                (True, True): self._channel.stream_stream,
            }
            stub = kinds[method.client_streaming, method.server_streaming](
                method.path,
                request_serializer=method.request_to_bytes,
                response_deserializer=method.response_from_bytes,
            )
            self._stubs[name] = stub
        return stub

    def _read(self, convert: Callable[[Any], T], message: Any) -> T:
        """Convert a reply; a worker that sends invalid values counts as lost."""
        try:
            return convert(message)
        except InvalidRequestError as error:
            raise PeerLostError(f"{self.address} replied what cannot be: {error}") from error

    async def _replies(
        self, name: str, request: Any, reply: Codec[T], timeout: float | None
    ) -> AsyncGenerator[T]:
        async with aclosing(self._stream(name, request, timeout)) as replies:
            async for message in replies:
                yield self._read(reply.decode, message)

    async def _call(self, name: str, request: Any, timeout: float | None) -> Any:
        identity = self._identity
        if identity is not None and self._generation != identity.now.generation:
            await self._secure(identity)
        try:
            return self._stub(name)(request, timeout=timeout)
        except grpc.aio.UsageError as error:
            raise PeerLostError(f"{self.address}: {error}") from None

    @contextlib.contextmanager
    def _running(self, call: Any) -> Iterator[None]:
        """Convert the errors of a call, and cancel it at the end."""
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise error_of_call(error, peer=self.address) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or not task.cancelling():  # grpc.aio also cancels on close
                raise PeerLostError(f"{self.address}: the channel was closed") from None
            raise
        finally:
            call.cancel()

    async def _unary(self, name: str, request: Any, *, timeout: float | None) -> Any:
        call = await self._call(name, request, self.timers.control if timeout is None else timeout)
        with self._running(call):
            return await call

    async def _stream(
        self,
        name: str,
        request: Any,
        timeout: float | None,
        on_metadata: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> AsyncGenerator[Any]:
        """The messages of a call; `on_metadata` gets the initial metadata before the first."""
        call = await self._call(name, request, timeout)
        with self._running(call):
            if on_metadata is not None:
                on_metadata(dict(await call.initial_metadata()))
            async for message in call:
                yield message


async def _upload(
    call: messages.EncodeCall, images: Sequence[bytes | bytearray], may_send: asyncio.Future[bool]
) -> AsyncIterator[pb.EncodeRequest]:
    """The call, then its images if `may_send` becomes True.

    Images wait for it because grpc.aio loses the status of a call that ends while it writes.
    """
    yield pb.EncodeRequest(begin=messages.ENCODE_CALL.encode(call))
    if not await may_send:
        return
    for item, image in enumerate(images):
        view = memoryview(image)
        for start in range(0, len(view), SENT_CHUNK_BYTES):
            data = bytes(view[start : start + SENT_CHUNK_BYTES])
            yield pb.EncodeRequest(chunk=pb.EncodeChunk(item=item, data=data))
