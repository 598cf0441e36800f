"""Data connections with mutual TLS: what attackers get, and that rotation fails no fetch."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest
from worker.authority import Authority, Mount
from worker.transfer.fetching import (
    PATIENT,
    SECONDS,
    SHORT,
    ProducerSide,
    call_of,
    fetched,
    linked,
    listening,
    transfer_of,
    until,
)

from vlm_worker.errors import UnauthorizedError
from vlm_worker.server.data_port import DataPort
from vlm_worker.transfer.data_connections import MAX_IDLE, DataConnectionPool, UnreachableError
from vlm_worker.types import Role
from vlm_worker.wire.data_protocol import Fetch, request_to
from vlm_worker.wire.identity import Certificate, ServiceIdentity
from vlm_worker.wire.identity_store import DATA_PROTOCOL, IdentityStore

pytestmark = pytest.mark.usefixtures("clean")

ONE = transfer_of("t-1")
BIG = transfer_of("t-2", unit_bytes=1 << 20, num_units=9)
REQUEST = request_to(Fetch.KV, call_of(ONE))
PREFILL = ServiceIdentity("n", "s", Role.PREFILL)
ALERT = 0x15
"""The type of a TLS record that tells why a handshake failed."""


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates") / "foreign")


@pytest.fixture(scope="module")
def prefill(authority: Authority) -> IdentityStore:
    return IdentityStore(authority.pair("prefill"), Role.PREFILL)


@pytest.fixture(scope="module")
def decode(authority: Authority) -> IdentityStore:
    return IdentityStore(authority.pair("decode"), Role.DECODE)


# ---- fetches -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("unit_bytes", "num_units"), [(1, 2), (400, 30), (99_991, 7), (1 << 20, 9)]
)
async def test_a_fetch_with_tls_equals_one_without(
    prefill: IdentityStore, decode: IdentityStore, unit_bytes: int, num_units: int
) -> None:
    transfer = transfer_of("t-1", unit_bytes=unit_bytes, num_units=num_units)
    secure, plain = ProducerSide(transfer), ProducerSide(transfer)
    async with (
        listening(secure.serve, identity=prefill) as (served, one),
        listening(plain.serve) as (_, two),
        linked(one, identity=decode, peer=PREFILL) as over_tls,
        linked(two) as without,
    ):
        for _ in range(3):
            assert await fetched(over_tls, transfer) == await fetched(without, transfer)
        assert served.num_connections == 1, "it is used again"
        got = await asyncio.gather(*(fetched(over_tls, transfer) for _ in range(MAX_IDLE + 2)))
        assert got == [transfer.data] * (MAX_IDLE + 2)
        await until(lambda: served.num_connections == MAX_IDLE)


async def test_a_fetch_that_is_cancelled_or_ends_in_the_middle_leaves_nothing(
    prefill: IdentityStore, decode: IdentityStore
) -> None:
    producer = ProducerSide(BIG)
    producer.go.clear()
    async with (
        listening(producer.serve, identity=prefill) as (served, port),
        linked(port, identity=decode, peer=PREFILL) as link,
    ):
        fetching = asyncio.create_task(fetched(link, BIG))
        await until(lambda: producer.num_open == 1)
        fetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetching
        await until(lambda: producer.num_open == served.num_connections == 0)
        async with aclosing(link.units(Fetch.KV, call_of(BIG), BIG.reader())) as units:
            await anext(units)
        await until(lambda: producer.num_open == served.num_connections == 0)
        producer.go.set()
        assert await fetched(link, BIG) == BIG.data


# ---- attackers of the port -----------------------------------------------------------------------


def context_of(directory: Path | None, trust: Path, **changes: object) -> ssl.SSLContext:
    """A client that does not care who the server is."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(trust)
    context.set_alpn_protocols([DATA_PROTOCOL])
    if directory is not None:
        context.load_cert_chain(directory / "tls.crt", directory / "tls.key")
    for name, value in changes.items():
        if name == "alpn":
            context.set_alpn_protocols([str(value)])
        else:
            setattr(context, name, value)
    return context


def asked(port: int, context: ssl.SSLContext | None) -> bytes:
    """All that an attacker gets for a request: nothing, if the port ends the connection."""
    data = b""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)) as raw:
        raw.settimeout(SECONDS)
        with (
            contextlib.suppress(OSError),
            context.wrap_socket(raw) if context is not None else raw as connection,
        ):
            connection.sendall(REQUEST)
            while part := connection.recv(4096):
                data += part
    return data


@pytest.mark.parametrize(
    "caller",
    [
        "no certificate", "foreign CA", "other service", "other namespace", "encoder", "gateway",
        "expired", "TLS 1.2", "another protocol", "plaintext",
    ],
)  # fmt: skip
async def test_who_may_not_fetch_gets_no_byte_and_reaches_no_producer(
    authority: Authority,
    foreign: Authority,
    prefill: IdentityStore,
    caplog: pytest.LogCaptureFixture,
    caller: str,
) -> None:
    trust, own = authority.certificate, authority.pair("decode")
    context = {
        "no certificate": lambda: context_of(None, trust),
        "foreign CA": lambda: context_of(foreign.pair("decode"), trust),
        "other service": lambda: context_of(authority.pair("decode", service="t"), trust),
        "other namespace": lambda: context_of(authority.pair("decode", namespace="m"), trust),
        "encoder": lambda: context_of(authority.pair("encoder"), trust),
        "gateway": lambda: context_of(authority.pair("gateway"), trust),
        "expired": lambda: context_of(authority.expired("decode"), trust),
        "TLS 1.2": lambda: context_of(own, trust, maximum_version=ssl.TLSVersion.TLSv1_2),
        "another protocol": lambda: context_of(own, trust, alpn="h2"),
        "plaintext": lambda: None,
    }[caller]()
    producer = ProducerSide(ONE)
    async with listening(producer.serve, identity=prefill) as (served, port):
        data = await asyncio.to_thread(asked, port, context)
        await until(lambda: served.num_connections == 0)
        assert producer.num_begun == 0
        assert data == b"" or (caller == "plaintext" and data[0] == ALERT and len(data) < 10)
        refused = [one for one in caplog.records if one.message == "data connection refused"]
        assert len(refused) == 1
        reason = vars(refused[0])["reason"]
        assert reason
        if caller in ("encoder", "gateway", "other service", "other namespace"):
            assert "may not call FetchEmbedding: it needs the role" in reason
        honest = IdentityStore(own, Role.DECODE)
        async with linked(port, identity=honest, peer=PREFILL) as link:
            assert await fetched(link, ONE) == ONE.data


async def test_a_role_gets_only_what_it_may_fetch_over_grpc(
    authority: Authority, prefill: IdentityStore, caplog: pytest.LogCaptureFixture
) -> None:
    """A prefill worker may have embeddings and no KV."""
    producer = ProducerSide(ONE)
    peer = IdentityStore(authority.pair("prefill"), Role.PREFILL)
    async with (
        listening(producer.serve, identity=prefill) as (served, port),
        linked(port, identity=peer, peer=PREFILL) as link,
    ):
        assert await fetched(link, ONE, fetch=Fetch.EMBEDDING) == ONE.data
        with pytest.raises(UnauthorizedError, match="prefill may not call FetchKV"):
            await fetched(link, ONE)
        assert producer.fetches == [Fetch.EMBEDDING]
        await until(lambda: served.num_connections == 0)
        assert [one.message for one in caplog.records].count("call refused") == 1


@pytest.mark.parametrize("said", [b"", b"\x16\x03\x01\x02\x00\x01"], ids=["silent", "half a hello"])
async def test_a_handshake_that_does_not_end_holds_its_place_for_a_short_time(
    prefill: IdentityStore, said: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with listening(ProducerSide(ONE).serve, timers=SHORT, identity=prefill) as (served, port):
        with socket.create_connection(("127.0.0.1", port)) as silent:
            silent.sendall(said)
            await until(lambda: served.num_connections == 1)
            await until(lambda: served.num_connections == 0)
    assert "no handshake within 0.04 s" in vars(caplog.records[-1])["reason"]


async def test_connections_without_a_handshake_make_way_before_any_other(
    prefill: IdentityStore, decode: IdentityStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vlm_worker.server.data_port.MAX_CONNECTIONS", 2)
    producer = ProducerSide(ONE)
    async with (
        listening(producer.serve, identity=prefill) as (served, port),
        linked(port, identity=decode, peer=PREFILL) as link,
    ):
        assert await fetched(link, ONE) == ONE.data
        with contextlib.ExitStack() as silent:
            for _ in range(5):
                silent.enter_context(socket.create_connection(("127.0.0.1", port)))
            await until(lambda: served.num_connections == 2)
            assert await fetched(link, ONE) == ONE.data, "the first connection is still there"
            async with linked(port, identity=decode, peer=PREFILL) as another:
                assert await fetched(another, ONE) == ONE.data, "the silent ones made way"


@pytest.mark.parametrize("command", [b"R", b"K"], ids=["renegotiation", "new keys for ever"])
async def test_no_peer_renegotiates_or_makes_the_port_answer_without_end(
    authority: Authority, prefill: IdentityStore, command: bytes
) -> None:
    """By `openssl s_client` of an allowed role. KeyUpdate is TLS 1.3's only renegotiation."""
    own = authority.pair("decode")
    async with listening(ProducerSide(ONE).serve, identity=prefill) as (served, port):
        client = await asyncio.create_subprocess_exec(
            "openssl", "s_client", "-connect", f"127.0.0.1:{port}", "-alpn", DATA_PROTOCOL,
            "-cert", own / "tls.crt", "-key", own / "tls.key", "-CAfile", own / "ca.crt",
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        assert client.stdin is not None
        await until(lambda: bool(served._idle))
        async with asyncio.timeout(SECONDS):
            while client.returncode is None:
                with contextlib.suppress(OSError):  # it has ended meanwhile
                    client.stdin.write(command + b"\n")
                    await client.stdin.drain()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(client.wait(), 0.005)
        await until(lambda: served.num_connections == 0)


# ---- attackers that answer -----------------------------------------------------------------------


@pytest.mark.parametrize("liar", ["foreign CA", "other service", "other role", "expired"])
async def test_a_consumer_asks_only_the_identity_that_it_knows_from_grpc(
    authority: Authority,
    foreign: Authority,
    decode: IdentityStore,
    monkeypatch: pytest.MonkeyPatch,
    liar: str,
) -> None:
    directory, role = {
        "foreign CA": lambda: (foreign.pair("prefill"), Role.PREFILL),
        "other service": lambda: (authority.pair("prefill", service="t"), Role.PREFILL),
        "other role": lambda: (authority.pair("encoder"), Role.ENCODER),
        "expired": lambda: (authority.expired("prefill"), Role.PREFILL),
    }[liar]()
    with monkeypatch.context() as changed:
        # a liar starts with a pair that has expired, too
        changed.setattr(Certificate, "problem", lambda *_, **__: None)
        store = IdentityStore(directory, role)
    producer = ProducerSide(ONE)
    async with (
        listening(producer.serve, identity=store) as (_, port),
        linked(port, identity=decode, peer=PREFILL) as link,
    ):
        with pytest.raises(UnreachableError):
            await fetched(link, ONE)
        assert producer.num_begun == 0
        assert not link.is_usable, "it is not asked again for a while"


async def test_a_consumer_with_an_identity_never_speaks_plaintext(decode: IdentityStore) -> None:
    heard = bytearray()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.extend(await reader.read(4096))
        writer.write(b"\0" * 64)
        with contextlib.suppress(OSError):
            await writer.drain()
        writer.close()

    thief = await asyncio.start_server(listen, "127.0.0.1", 0)
    async with thief:
        port = thief.sockets[0].getsockname()[1]
        async with linked(port, identity=decode, peer=PREFILL) as link:
            with pytest.raises(UnreachableError):
                await fetched(link, ONE)
        async with linked(port, identity=decode) as stranger:
            assert not stranger.is_usable, "nobody told whom to expect"
    assert heard[0] == 0x16, "a ClientHello"
    for secret in (b"t-1", b"r-1", b"b" * 16):
        assert secret not in heard


# ---- rotation ------------------------------------------------------------------------------------


@dataclasses.dataclass
class Rotating:
    """Both ends, with mounted pairs."""

    producer: ProducerSide
    served: DataPort
    link: DataConnectionPool
    mounts: dict[str, Mount]
    stores: dict[str, IdentityStore]
    authorities: tuple[Authority, Authority]

    def rotate(self, *roles: str, authority: int = 0) -> None:
        for role in roles:
            generation = self.stores[role].now.generation
            self.mounts[role].update(_trusting(self.authorities, authority, role))
            self.stores[role].reload()
            assert self.stores[role].now.generation == generation + 1


def _trusting(authorities: tuple[Authority, Authority], number: int, role: str) -> Path:
    directory = authorities[number].pair(role)
    (directory / "ca.crt").write_bytes(
        b"".join(one.certificate.read_bytes() for one in authorities)
    )
    return directory


@contextlib.asynccontextmanager
async def rotating(
    authority: Authority, foreign: Authority, tmp_path: Path
) -> AsyncIterator[Rotating]:
    authorities = authority, foreign
    mounts = {
        role: Mount(tmp_path / role, _trusting(authorities, 0, role))
        for role in ("prefill", "decode")
    }
    stores = {role: IdentityStore(mount.path, Role(role)) for role, mount in mounts.items()}
    producer = ProducerSide(BIG)
    async with (
        listening(producer.serve, identity=stores["prefill"]) as (served, port),
        linked(port, identity=stores["decode"], peer=PREFILL) as link,
    ):
        yield Rotating(producer, served, link, mounts, stores, authorities)


@pytest.mark.parametrize("roles", [("prefill",), ("decode",), ("prefill", "decode")])
async def test_a_rotation_in_the_middle_of_a_fetch_fails_none_and_ends_its_connection(
    authority: Authority, foreign: Authority, tmp_path: Path, roles: tuple[str, ...]
) -> None:
    async with rotating(authority, foreign, tmp_path) as both:
        assert await fetched(both.link, BIG) == BIG.data
        for number in range(3):
            both.producer.go.clear()
            begun = both.producer.num_begun
            fetching = asyncio.create_task(fetched(both.link, BIG))
            await until(lambda: both.producer.num_begun == begun + 1)  # noqa: B023
            assert both.served.num_connections == 1
            both.rotate(*roles, authority=number % 2)
            both.producer.go.set()
            assert await fetching == BIG.data
            await until(lambda: both.served.num_connections == 0)
            assert await fetched(both.link, BIG) == BIG.data
            assert both.served.num_connections == 1


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_idle_connection_of_an_old_pair_is_used_once_more_at_most(
    authority: Authority, foreign: Authority, tmp_path: Path, role: str
) -> None:
    """One that the port ends just now carries no byte: the consumer then fetches over gRPC."""
    async with rotating(authority, foreign, tmp_path) as both:
        both.producer.go.clear()
        fetching = [asyncio.create_task(fetched(both.link, BIG)) for _ in range(3)]
        await until(lambda: both.producer.num_open == 3)
        both.producer.go.set()
        assert await asyncio.gather(*fetching) == [BIG.data] * 3
        assert both.served.num_connections == 3
        both.rotate(role, authority=1)
        begun, num_lost = both.producer.num_begun, 0
        for _ in range(6):
            try:
                assert await fetched(both.link, BIG) == BIG.data
            except UnreachableError:
                num_lost += 1
        assert num_lost <= (3 if role == "prefill" else 0)
        assert both.producer.num_begun - begun == 6 - num_lost
        await until(lambda: both.served.num_connections <= 1)


async def test_a_connection_that_the_port_ends_meanwhile_costs_no_fetch(
    authority: Authority, foreign: Authority, tmp_path: Path
) -> None:
    """Its request is lost: the consumer must learn that no byte came, and fetches over gRPC."""
    async with rotating(authority, foreign, tmp_path) as both:
        assert await fetched(both.link, BIG) == BIG.data
        (connection,) = both.link._idle
        both.served._idle[next(iter(both.served._idle))].cancel()  # as for a new consumer
        with contextlib.suppress(UnreachableError):
            assert await fetched(both.link, BIG) == BIG.data
        assert connection not in both.link._idle
        assert await fetched(both.link, BIG) == BIG.data


async def test_a_connection_is_replaced_after_an_hour(
    prefill: IdentityStore, decode: IdentityStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vlm_worker.wire.secure_connection.MAX_AGE_SECONDS", 0.0)
    producer = ProducerSide(ONE)
    async with (
        listening(producer.serve, timers=PATIENT, identity=prefill) as (served, port),
        linked(port, identity=decode, peer=PREFILL) as link,
    ):
        for _ in range(3):
            assert await fetched(link, ONE) == ONE.data
            assert link._idle == []
            await until(lambda: served.num_connections == 0)
