"""Whole attacks of callers in the pod network, against workers with an identity.

    poison      Prefill(T1), then Decode(T2 with another tenant's salt, the KV of T1)
    oracle      Prefill of guessed text with another tenant's salt: how much of it is cached?
    blind       Reserve all KV, announce images, and name a listener of one's own as a source
    thief       fetch what honest requests left, over gRPC and over a data connection

The callers know more than they can: addresses, trust anchor, salts, ids and boot ids. Each step is
tried, though the one before failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path

import grpc
import pytest
from worker.answers import answer_alone
from worker.authority import Authority
from worker.server.pairs import IMAGES, Pair, about, request_of, until
from worker.server.serving import Serving, serving
from worker.server.test_secure_data_port import context_of

from vlm_worker.client import WorkerClient
from vlm_worker.errors import PeerLostError, UnauthorizedError
from vlm_worker.settings.timers import PRODUCTION
from vlm_worker.types import Request, RequestKey, Role, Source
from vlm_worker.wire.data_protocol import Fetch, request_to
from vlm_worker.wire.identity_store import IdentityStore
from vlm_worker.wire.messages import (
    Accepted,
    DecodeCall,
    EncodeCall,
    EncodeItem,
    FetchCall,
    FirstToken,
    PrefillCall,
    ReserveCall,
)
from vlm_worker.wire.rpc import channel_options

ALPHA = b"alpha".ljust(32, b"\0")
"""The salt of the tenant that is attacked, as if the attacker could compute it."""
SECONDS = 5.0
CALLERS = ("plaintext", "no certificate", "other service", "encoder", "prefill")
REFUSED = (UnauthorizedError, PeerLostError)


@dataclasses.dataclass
class Service:
    """Workers, the gateway's clients of them, and what an attacker has."""

    honest: Pair
    authority: Authority
    caller: str

    def attacker(self, worker: Serving) -> WorkerClient:
        """A client of ours on a channel that does not care whose the worker is."""
        role = worker.server.settings.role.value
        client = WorkerClient(worker.client.address)
        if self.caller == "plaintext":
            return client
        own = []
        if self.caller != "no certificate":
            directory = self._pair()
            own = [(directory / name).read_bytes() for name in ("tls.key", "tls.crt")]
        credentials = grpc.ssl_channel_credentials(self.authority.certificate.read_bytes(), *own)
        name = f"{role}.s.n.triptych.internal"
        options = [*channel_options(PRODUCTION), ("grpc.ssl_target_name_override", name)]
        client._channel = grpc.aio.secure_channel(client.address, credentials, options)
        return client

    @property
    def may_renew(self) -> bool:
        """Consumers may renew and release leases, of which they must know the secret ids."""
        return self.caller == "prefill"

    def _pair(self) -> Path:
        if self.caller == "other service":
            return self.authority.pair("gateway", service="t")
        return self.authority.pair(self.caller)

    def bytes_from(self, worker: Serving, request: bytes) -> bytes:
        """All that a data connection says."""
        trust = self.authority.certificate
        context = {
            "plaintext": lambda: None,
            "no certificate": lambda: context_of(None, trust),
        }.get(self.caller, lambda: context_of(self._pair(), trust))()
        data = b""
        with contextlib.suppress(OSError):
            raw = socket.create_connection(("127.0.0.1", worker.server.data_port), timeout=SECONDS)
            with raw, context.wrap_socket(raw) if context else raw as connection:
                connection.sendall(request)
                while part := connection.recv(4096):
                    data += part
        return data


@pytest.fixture(params=CALLERS)
async def service(request: pytest.FixtureRequest, authority: Authority) -> AsyncIterator[Service]:
    gateway = IdentityStore(authority.pair("gateway"), Role.GATEWAY)
    async with (
        serving("prefill", f"--identity-dir={authority.pair('prefill')}") as p,
        serving("decode", f"--identity-dir={authority.pair('decode')}") as d,
        WorkerClient(p.client.address, identity=gateway) as to_prefill,
        WorkerClient(d.client.address, identity=gateway) as to_decode,
    ):
        honest = Pair(
            dataclasses.replace(p, client=to_prefill), dataclasses.replace(d, client=to_decode)
        )
        yield Service(honest, authority, request.param)
        await honest.idle()


def of_alpha(request: Request) -> Request:
    return dataclasses.replace(request, cache_salt=ALPHA)


def prompt(number: int, name: str) -> Request:
    return request_of(61, RequestKey(name, 1), first=100 * number)


async def refused(call: Callable[[], Awaitable[object]]) -> None:
    with pytest.raises(REFUSED):
        await call()


async def all_of(replies) -> list[object]:  # type: ignore[no-untyped-def]
    async with aclosing(replies):
        return [reply async for reply in replies]


async def first_token(worker: Serving, request: Request, transfer_id: str) -> tuple[Source, int]:
    """A prefill of the gateway: its KV, held by its lease, and how many tokens were cached."""
    call = PrefillCall(request, transfer_id, ())
    events = [one.event for one in await all_of(worker.client.prefill(call, timeout=SECONDS))]  # type: ignore[attr-defined]
    (accepted,) = [event for event in events if isinstance(event, Accepted)]
    (first,) = [event for event in events if isinstance(event, FirstToken)]
    kv = Source(worker.client.address, accepted.boot_id, transfer_id, accepted.layout_fingerprint)
    return kv, first.num_cached_tokens


# ---- the attacks ---------------------------------------------------------------------------------


async def test_no_caller_poisons_the_cache_of_a_tenant(service: Service) -> None:
    prefill, decode = service.honest.prefill, service.honest.decode
    poison, target = prompt(1, "r-1"), of_alpha(prompt(2, "r-2"))
    kv, _ = await first_token(prefill, poison, "t-1")
    granted = await decode.client.reserve(ReserveCall(target.key, len(target.token_ids) + 1))
    async with service.attacker(prefill) as to_prefill, service.attacker(decode) as to_decode:
        steal = PrefillCall(dataclasses.replace(poison, key=RequestKey("r-9", 1)), "t-9", ())
        await refused(lambda: all_of(to_prefill.prefill(steal, timeout=SECONDS)))
        reserve = ReserveCall(RequestKey("r-8", 1), len(target.token_ids) + 1)
        await refused(lambda: to_decode.reserve(reserve, timeout=SECONDS))
        call = DecodeCall(target, granted.reservation_id, kv, granted.boot_id)
        await refused(lambda: all_of(to_decode.decode(call, timeout=SECONDS)))
        await refused(lambda: to_decode.cancel(target.key, timeout=SECONDS))
        if not service.may_renew:
            await refused(lambda: to_decode.release(granted.boot_id, granted.reservation_id))
    for worker, boot_id, lease in (
        (decode, granted.boot_id, granted.reservation_id),
        (prefill, kv.boot_id, kv.transfer_id),
    ):
        assert await worker.client.renew(boot_id, [lease]) == frozenset(), "nobody released it"
        await worker.client.release(boot_id, lease)
    honest = of_alpha(prompt(2, "r-3"))
    assert await service.honest.answer(honest) == answer_alone(honest)


async def test_no_caller_learns_what_a_tenant_has_cached(service: Service) -> None:
    prefill, secret = service.honest.prefill, of_alpha(prompt(3, "r-1"))
    kv, _ = await first_token(prefill, secret, "t-1")
    await prefill.client.release(kv.boot_id, kv.transfer_id)
    await prefill.until_idle()
    before = prefill.components.engine.stats().kv
    async with service.attacker(prefill) as attacker:
        for number, salt in enumerate((ALPHA, b"", bytes(32))):
            guess = dataclasses.replace(secret, key=RequestKey(f"g-{number}", 1), cache_salt=salt)
            call = PrefillCall(guess, f"t-{number}", ())
            async with aclosing(attacker.prefill(call, timeout=SECONDS)) as replies:
                with pytest.raises(REFUSED):
                    await anext(replies)
    assert prefill.components.engine.stats().kv == before, "no guess reached the cache"
    again = dataclasses.replace(secret, key=RequestKey("r-2", 1))
    kv, num_cached = await first_token(prefill, again, "t-2")
    assert num_cached > 0, "there was something to learn"
    await prefill.client.release(kv.boot_id, kv.transfer_id)


async def test_no_caller_takes_memory_or_sends_a_worker_to_its_own_listener(
    service: Service, authority: Authority
) -> None:
    prefill, decode = service.honest.prefill, service.honest.decode
    visited = asyncio.Event()

    async def visit(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        visited.set()
        writer.close()

    listener = await asyncio.start_server(visit, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    lure = Source(f"127.0.0.1:{port}", b"b" * 16, "t-9", b"f" * 16)
    image = EncodeItem("e-1", 256 << 20, 4096, 4096, 1024, 0, "PNG")
    async with (
        listener,
        serving("encoder", f"--identity-dir={authority.pair('encoder')}") as encoder,
        service.attacker(decode) as to_decode,
        service.attacker(prefill) as to_prefill,
        service.attacker(encoder) as to_encoder,
    ):
        for number in range(20):
            call = ReserveCall(RequestKey(f"b-{number}", 1), 500)
            await refused(lambda: to_decode.reserve(call, timeout=SECONDS))  # noqa: B023
        for number in range(3):
            encode = EncodeCall(RequestKey(f"e-{number}", 1), (image, image))
            await refused(
                lambda: all_of(to_encoder.encode(encode, [b"x", b"x"], timeout=SECONDS))  # noqa: B023
            )
        asked = prompt(4, "r-9")
        decoding = DecodeCall(asked, "reservation", lure, b"b" * 16)
        await refused(lambda: all_of(to_decode.decode(decoding, timeout=SECONDS)))
        pulling = PrefillCall(about(IMAGES[:1], asked.key), "t-8", (lure,))
        await refused(lambda: all_of(to_prefill.prefill(pulling, timeout=SECONDS)))
        for worker in (prefill, decode, encoder):
            await worker.until_idle()
        assert not visited.is_set()
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.wait_for(visited.wait(), SECONDS)  # it would have been seen
        writer.close()
        whole = await decode.client.reserve(ReserveCall(RequestKey("r-1", 1), 500))
        await decode.client.release(whole.boot_id, whole.reservation_id)


async def test_no_caller_fetches_the_kv_of_others(service: Service) -> None:
    prefill, secret = service.honest.prefill, of_alpha(prompt(5, "r-1"))
    kv, _ = await first_token(prefill, secret, "t-1")
    call = FetchCall(kv.transfer_id, kv.boot_id, kv.fingerprint, secret.key)
    served = prefill.server._service.live
    async with service.attacker(prefill) as attacker:
        for fetch in (Fetch.KV,) if service.may_renew else Fetch:
            await refused(lambda: all_of(attacker.fetch(fetch, call, timeout=SECONDS)))  # noqa: B023
            request = request_to(fetch, call)
            data = await asyncio.to_thread(service.bytes_from, prefill, request)
            if service.caller == "prefill":  # it may fetch embeddings: it is told why not this
                assert b"may not call FetchKV" in data
                assert len(data) < 512
            else:
                assert len(data) < 10, "at most the alert of TLS"
        if not service.may_renew:
            await refused(lambda: attacker.renew(kv.boot_id, [kv.transfer_id], timeout=SECONDS))
            await refused(lambda: attacker.release(kv.boot_id, kv.transfer_id))
    assert not served["FetchKV"]
    await until(lambda: prefill.server._data.num_connections == 0)
    assert await prefill.client.renew(kv.boot_id, [kv.transfer_id]) == frozenset()
    await prefill.client.release(kv.boot_id, kv.transfer_id)
