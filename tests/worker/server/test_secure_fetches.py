"""Workers with an identity fetch over data connections, also during a rotation."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from worker.answers import answer_alone
from worker.authority import Authority, Mount
from worker.faults.proxy import Door, proxy
from worker.idle import outstanding
from worker.server.pairs import (
    IMAGES,
    TENTH,
    Pair,
    about,
    collect,
    encoding,
    until,
)
from worker.server.serving import Serving, serving
from worker.server.test_data_connections import KV_BYTES, request
from worker.server.test_shared_memory import exposures

from vlm_worker.client import WorkerClient
from vlm_worker.types import RequestKey, Role
from vlm_worker.wire.identity_store import IdentityStore
from vlm_worker.wire.messages import FirstToken, PrefillCall


@dataclasses.dataclass
class Secured:
    """A pair with a door before the data port of prefill, and the mounted identities."""

    two: Pair
    door: Door
    authority: Authority
    mounts: dict[str, Mount]
    stores: dict[str, IdentityStore]

    def rotate(self) -> None:
        for role, store in self.stores.items():
            serial = store.now.certificate.serial
            self.mounts[role].update(self.authority.pair(role))
            store.reload()
            assert store.now.certificate.serial != serial


@contextlib.asynccontextmanager
async def secured(authority: Authority, tmp_path: Path, *flags: str) -> AsyncIterator[Secured]:
    """The first answer went over gRPC, as the port is not known before."""
    mounts = {
        role: Mount(tmp_path / role, authority.pair(role))
        for role in ("prefill", "decode", "gateway")
    }
    gateway = IdentityStore(mounts["gateway"].path, Role.GATEWAY)
    own = {role: f"--identity-dir={mount.path}" for role, mount in mounts.items()}
    async with (
        proxy() as front,
        serving(
            "prefill", TENTH, own["prefill"], f"--announced-data-port={front.data.port}", *flags
        ) as p,
        serving("decode", TENTH, own["decode"], *flags) as d,
        with_client(p, gateway) as prefill,
        with_client(d, gateway) as decode,
    ):
        front.data.target_port = p.server.data_port
        assert p.server.identity is not None
        assert d.server.identity is not None
        stores = {"prefill": p.server.identity, "decode": d.server.identity, "gateway": gateway}
        all_of_it = Secured(Pair(prefill, decode), front.data, authority, mounts, stores)
        first = request(0)
        assert await all_of_it.two.answer(first) == answer_alone(first)
        assert not front.data.num_passed
        yield all_of_it


@contextlib.asynccontextmanager
async def with_client(worker: Serving, identity: IdentityStore) -> AsyncIterator[Serving]:
    async with WorkerClient(worker.client.address, identity=identity) as client:
        yield dataclasses.replace(worker, client=client)


async def test_kv_goes_over_one_secure_data_connection(
    authority: Authority, tmp_path: Path
) -> None:
    async with secured(authority, tmp_path) as both:
        for number in (1, 2):
            before = both.door.num_passed
            assert await both.two.answer(request(number)) == answer_alone(request(number))
            assert KV_BYTES < both.door.num_passed - before < KV_BYTES + 16384
        assert len(both.door.connections) == 1
        await both.two.idle()


async def test_shared_memory_is_opened_over_the_secure_connection(
    authority: Authority, tmp_path: Path, directory: Path
) -> None:
    flags = ("--transport=shared-memory", f"--shared-memory-dir={directory}")
    async with secured(authority, tmp_path, *flags) as both:
        exposed = exposures(both.two.prefill.components.context.transport.account)
        for number in (1, 2):
            before = both.door.num_passed
            assert await both.two.answer(request(number)) == answer_alone(request(number))
            assert exposed == [KV_BYTES] * number
            assert both.door.num_passed > before
        assert both.door.num_passed - before < KV_BYTES
        assert len(both.door.connections) == 1
        await both.two.idle()


@pytest.mark.parametrize("transport", ["stream", "shared-memory"])
async def test_embeddings_go_over_secure_data_connections(
    authority: Authority, directory: Path, transport: str
) -> None:
    flags = (TENTH, f"--transport={transport}", f"--shared-memory-dir={directory}")
    gateway = IdentityStore(authority.pair("gateway"), Role.GATEWAY)
    async with (
        serving("encoder", f"--identity-dir={authority.pair('encoder')}", *flags) as e,
        serving("prefill", f"--identity-dir={authority.pair('prefill')}", *flags) as prefill,
        with_client(prefill, gateway) as p,
    ):
        for number, image in enumerate(IMAGES):
            assert e.server._data.num_connections == (number > 1)
            key = RequestKey(f"r-{number}", 1)
            source, task = encoding(e, image, key, transfer_id=f"e-{number}")
            events = await collect(p, PrefillCall(about([image], key), f"t-{number}", (source,)))
            assert isinstance(events[1], FirstToken)
            assert events[1].token_id == answer_alone(about([image], key), [image])[0]
            await task
        assert e.server._data.num_connections == 1
        for worker in (e, p):
            await worker.until_idle()


async def test_a_rotation_while_kv_is_fetched_fails_no_request(
    authority: Authority, tmp_path: Path
) -> None:
    async with secured(authority, tmp_path) as both:
        prefill = both.two.prefill
        for number in range(1, 4):
            prefill.runner.gate.clear()
            asked = [request(10 * number + one) for one in range(3)]
            answering = [asyncio.create_task(both.two.answer(one)) for one in asked]
            await until(lambda: outstanding(prefill.server).get("FetchKV calls") == 3)
            assert prefill.server._data.num_connections == 3
            both.rotate()
            prefill.runner.gate.set()
            assert await asyncio.gather(*answering) == [answer_alone(one) for one in asked]
            await until(lambda: prefill.server._data.num_connections == 0)
        await both.two.idle()
