"""Mutual TLS: what each attacker of the pod network gets, and that rotation loses no call."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import subprocess
import sys
from contextlib import aclosing
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub
from worker.answers import answer_alone
from worker.authority import Authority, Mount
from worker.server.pairs import Pair
from worker.server.serving import Serving, request_of, serving

from vlm_worker.client import WorkerClient
from vlm_worker.errors import PeerLostError, UnauthorizedError
from vlm_worker.gateway.discovery import KnownPod
from vlm_worker.gateway.pod_registry import Registry
from vlm_worker.settings.timers import PRODUCTION
from vlm_worker.types import RequestKey, Role
from vlm_worker.wire.data_protocol import Fetch
from vlm_worker.wire.identity import CALLERS, Certificate, IdentityError, ServiceIdentity, refusal
from vlm_worker.wire.identity_store import IdentityStore
from vlm_worker.wire.messages import FetchCall, PrefillCall, ReserveCall
from vlm_worker.wire.prefetch_messages import PrefetchCall
from vlm_worker.wire.rpc import METHODS

OWN = ServiceIdentity("n", "s", Role.DECODE)


def client_of(worker: Serving, directory: Path, role: Role) -> WorkerClient:
    return WorkerClient(worker.client.address, identity=IdentityStore(directory, role))


# ---- decisions -----------------------------------------------------------------------------------


def test_every_method_has_its_callers_and_no_other_role_or_service_may_call_it() -> None:
    assert CALLERS.keys() == METHODS.keys()
    for method, allowed in CALLERS.items():
        assert Role.ENCODER not in allowed
        for role in Role:
            peer = ServiceIdentity("n", "s", role)
            assert (refusal(method, peer, OWN) is None) == (role in allowed)
            for other in (ServiceIdentity("m", "s", role), ServiceIdentity("n", "t", role)):
                text = refusal(method, other, OWN)
                assert text is not None
                assert other.uri in text
                assert method in text
                assert "namespace n" in text
    assert refusal("NewMethod", ServiceIdentity("n", "s", Role.GATEWAY), OWN) is not None


@pytest.mark.parametrize("role", list(Role))
def test_an_identity_is_read_from_its_own_uri_alone(role: Role) -> None:
    identity = ServiceIdentity("n", "s", role)
    assert ServiceIdentity.of_uri(identity.uri) == identity
    for wrong in (identity.uri + "/x", identity.uri.replace("triptych.dev", "evil.dev"), "", "x"):
        with pytest.raises(IdentityError, match="must read like"):
            ServiceIdentity.of_uri(wrong)


# ---- files ---------------------------------------------------------------------------------------


def test_a_directory_that_cannot_be_used_is_an_error_that_names_file_and_fix(
    authority: Authority, tmp_path: Path
) -> None:
    other = Authority(tmp_path / "other")
    expiry = IdentityStore(authority.pair("decode"), Role.DECODE).now.certificate.not_after
    for change, message in (
        (lambda d: (d / "ca.crt").unlink(), "ca.crt: No such file"),
        (lambda d: (d / "ca.crt").write_text(""), "ca.crt holds no PEM"),
        (lambda d: (d / "tls.key").write_bytes((other.folder / "ca.key").read_bytes()), "no pair"),
        (lambda d: (d / "ca.crt").write_bytes(other.certificate.read_bytes()), "its own ca.crt"),
    ):
        directory = authority.pair("decode")
        change(directory)
        with pytest.raises(IdentityError, match=message):
            IdentityStore(directory, Role.DECODE)
    with pytest.raises(IdentityError, match="mount the Secret of its own role"):
        IdentityStore(authority.pair("prefill"), Role.DECODE)
    with pytest.raises(IdentityError, match="has expired: renew"):
        IdentityStore(authority.pair("decode"), Role.DECODE, clock=lambda: expiry + 1)


def test_an_update_that_cannot_be_used_leaves_the_last_pair(
    authority: Authority, tmp_path: Path
) -> None:
    mount = Mount(tmp_path / "mount", authority.pair("decode"))
    store = IdentityStore(mount.path, Role.DECODE)
    first = store.now
    store.reload()
    assert store.now is first
    assert not store.num_reloads.total()
    mount.update(authority.pair("prefill"))
    for _ in range(2):
        store.reload()
    assert store.now is first
    assert store.num_reloads == {"applied": 0, "rejected": 1}
    mount.update(authority.pair("decode"))
    store.reload()
    assert store.now.certificate.serial != first.certificate.serial
    assert store.num_reloads == {"applied": 1, "rejected": 1}


# ---- attacks -------------------------------------------------------------------------------------


async def attacks(client: WorkerClient) -> None:
    """Poison, ask the tenant cache, take all KV, and fetch: each call must be refused."""
    request = request_of()
    fetch = FetchCall("t-1", b"b" * 16, b"f" * 16, request.key)
    for attempt in (
        lambda: client.reserve(ReserveCall(request.key, 21), timeout=5),
        lambda: _all(client.prefill(PrefillCall(request, "t-9", ()), timeout=5)),
        lambda: client.prefetch(PrefetchCall(request), timeout=5),
        lambda: _all(client.fetch(Fetch.KV, fetch, timeout=5)),
        lambda: _all(client.fetch(Fetch.EMBEDDING, fetch, timeout=5)),
        lambda: client.hello(timeout=5),
    ):
        with pytest.raises((UnauthorizedError, PeerLostError)):
            await attempt()


async def _all(replies) -> None:  # type: ignore[no-untyped-def]
    async with aclosing(replies):
        async for _ in replies:
            pass


async def test_only_the_identities_of_the_service_reach_a_worker(
    authority: Authority, tmp_path: Path
) -> None:
    other = Authority(tmp_path / "other")
    async with serving("decode", f"--identity-dir={authority.pair('decode')}") as worker:
        address = worker.client.address
        async with client_of(worker, authority.pair("gateway"), Role.GATEWAY) as gateway:
            assert (await gateway.hello()).role is Role.DECODE
            assert gateway.certified_role is Role.DECODE
        async with WorkerClient(address) as plaintext:
            await attacks(plaintext)
        foreign = other.pair("gateway")
        for directory in (
            foreign,
            authority.pair("gateway", service="t"),
            authority.pair("gateway", namespace="m"),
        ):
            async with client_of(worker, directory, Role.GATEWAY) as client:
                await attacks(client)
        await _calls_without_our_client(worker, authority, foreign)
        await worker.until_idle()


async def _calls_without_our_client(worker: Serving, authority: Authority, foreign: Path) -> None:
    """Attackers do not check the peer as our client does: the server alone must refuse."""
    trust = authority.certificate.read_bytes()
    options = [("grpc.ssl_target_name_override", OWN.dns_name)]
    hello = METHODS["Hello"]
    for directory, code in (
        (None, grpc.StatusCode.UNAVAILABLE),
        (foreign, grpc.StatusCode.UNAVAILABLE),
        (authority.pair("gateway", service="t"), grpc.StatusCode.PERMISSION_DENIED),
        (authority.pair("gateway", namespace="m"), grpc.StatusCode.PERMISSION_DENIED),
    ):
        own = (
            [(directory / name).read_bytes() for name in ("tls.key", "tls.crt")]
            if directory
            else []
        )
        credentials = grpc.ssl_channel_credentials(trust, *own)
        async with grpc.aio.secure_channel(worker.client.address, credentials, options) as channel:
            call = channel.unary_unary(hello.path)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(b"", timeout=5)
            assert refused.value.code() is code
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
            assert refused.value.code() is code


async def test_a_role_may_call_only_its_methods(authority: Authority) -> None:
    async with serving("decode", f"--identity-dir={authority.pair('decode')}") as worker:
        async with client_of(worker, authority.pair("encoder"), Role.ENCODER) as encoder:
            await attacks(encoder)
        async with client_of(worker, authority.pair("prefill"), Role.PREFILL) as prefill:
            assert (await prefill.hello()).role is Role.DECODE
            with pytest.raises(UnauthorizedError, match="prefill may not call Reserve: it needs"):
                await prefill.reserve(ReserveCall(request_of().key, 21))
        await worker.until_idle()


async def test_a_pod_that_wears_the_labels_gets_no_prompt(
    authority: Authority, tmp_path: Path
) -> None:
    store = IdentityStore(authority.pair("gateway"), Role.GATEWAY)

    def connect(address: str, **given: object) -> WorkerClient:
        return WorkerClient(address, identity=store, **given)  # type: ignore[arg-type]

    other = Authority(tmp_path / "other")
    async with (
        serving("decode") as plaintext,
        serving("decode", f"--identity-dir={other.pair('decode')}") as foreign,
        serving("decode", f"--identity-dir={authority.pair('decode', service='t')}") as neighbour,
        serving("decode", f"--identity-dir={authority.pair('decode')}") as honest,
    ):
        registry = Registry(served_name="shapes", timers=PRODUCTION.scaled(0.1), connect=connect)
        workers = {"a": plaintext, "b": foreign, "c": neighbour, "d": honest}
        registry.apply([KnownPod(name, it.client.address) for name, it in workers.items()])
        try:
            async with asyncio.timeout(20):
                while not registry.candidates() or not all(  # noqa: ASYNC110  no event
                    registry.peers[name].unusable_reason for name in "abc"
                ):
                    await asyncio.sleep(0.01)
            assert [one.name for one in registry.candidates()] == ["d"]
        finally:
            await registry.close()


# ---- honest services, and rotation ---------------------------------------------------------------


async def test_a_service_answers_while_pairs_and_trust_anchors_are_replaced(
    authority: Authority, tmp_path: Path
) -> None:
    """Two CAs overlap in ca.crt; then all pairs are of the second one."""
    second = Authority(tmp_path / "second")
    both = authority.certificate.read_bytes() + second.certificate.read_bytes()
    mounts = {
        role: Mount(tmp_path / role, _trusting(both, authority.pair(role)))
        for role in ("prefill", "decode", "gateway")
    }
    flags = [f"--identity-dir={mounts[role].path}" for role in ("prefill", "decode")]
    store = IdentityStore(mounts["gateway"].path, Role.GATEWAY)
    async with (
        serving("prefill", flags[0]) as p,
        serving("decode", flags[1]) as d,
        WorkerClient(p.client.address, identity=store) as to_prefill,
        WorkerClient(d.client.address, identity=store) as to_decode,
    ):
        two = Pair(
            dataclasses.replace(p, client=to_prefill), dataclasses.replace(d, client=to_decode)
        )
        async with aclosing(to_decode.watch_load()) as loads:
            assert (await anext(loads)).accepting
            for number, role in enumerate(("prefill", "gateway", "decode", "none")):
                one = request_of(key=RequestKey(f"r-{number}", 1))
                assert await two.answer(one) == answer_alone(one)
                if role in mounts:
                    mounts[role].update(_trusting(both, second.pair(role)))
                for identity in (store, p.server.identity, d.server.identity):
                    assert identity is not None
                    identity.reload()
            assert (await anext(loads)).accepting, "the stream of before goes on"
        for identity in (store, p.server.identity, d.server.identity):
            assert identity is not None
            assert identity.num_reloads == {"applied": 1, "rejected": 0}
        for worker, role in ((p, "prefill"), (d, "decode")):
            presented = await asyncio.to_thread(_serial_at, worker.client.address, store)
            identity = worker.server.identity
            assert identity is not None
            assert presented == (identity.now.certificate.serial, role)
        async with client_of(d, authority.pair("gateway"), Role.GATEWAY) as old_trust:
            with pytest.raises(PeerLostError):  # it does not trust the second CA
                await old_trust.hello(timeout=5)
        await two.idle()


HELLO_OVER_TLS_1_2 = """
import os, ssl, socket, sys, threading, asyncio
from pathlib import Path
from vlm_worker.serve.process import only_tls_13
if sys.argv[2] == "pinned":
    only_tls_13(os.environ)
import grpc
from vlm_worker.types import Role
from vlm_worker.wire.identity_store import IdentityStore
from vlm_worker.wire.sockets import add_port
store = IdentityStore(Path(sys.argv[1]), Role.DECODE)

def version(maximum):
    context = store.now.client
    context.minimum_version = context.maximum_version = maximum
    with socket.create_connection(("127.0.0.1", port), timeout=5) as plain:
        try:
            with context.wrap_socket(plain) as secure:
                return secure.version()
        except (ssl.SSLError, ConnectionError):
            return "refused"

async def main():
    global port
    server = grpc.aio.server()
    port = add_port(server, "127.0.0.1", 0, identity=store)
    await server.start()
    for maximum in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
        print(await asyncio.to_thread(version, maximum))
    await server.stop(None)

asyncio.run(main())
"""


@pytest.mark.parametrize(("how", "answers"), [("as", "TLSv1.2"), ("pinned", "refused")])
def test_grpc_refuses_tls_1_2_if_it_is_pinned(authority: Authority, how: str, answers: str) -> None:
    """The variable is read once per process, so each case has its own."""
    command = [sys.executable, "-c", HELLO_OVER_TLS_1_2, str(authority.pair("decode")), how]
    ended = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert ended.stdout.split() == [answers, "TLSv1.3"]


def _trusting(bundle: bytes, directory: Path) -> Path:
    (directory / "ca.crt").write_bytes(bundle)
    return directory


def _serial_at(address: str, store: IdentityStore) -> tuple[str, str]:
    host, _, port = address.rpartition(":")
    with (
        socket.create_connection((host, int(port)), timeout=5) as plain,
        store.now.client.wrap_socket(plain) as secure,
    ):
        certificate = Certificate.of_peer(secure.getpeercert())
    return certificate.serial, certificate.identity.role.value
