"""KV and embeddings over data connections between real servers: the same answers as over gRPC.

What goes over them is counted at a door before the port.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest
from worker.answers import answer_alone
from worker.faults.proxy import Door, proxy
from worker.idle import assert_idle, outstanding
from worker.server.pairs import (
    IMAGES,
    KEY,
    TENTH,
    Pair,
    about,
    accept,
    collect,
    encoding,
    pair,
    request_of,
    until,
)
from worker.server.serving import Serving, serving
from worker.server.test_shared_memory import exposures
from worker.transfer.fetching import nothing_left

from vlm_worker.core.kv_cache import content_of
from vlm_worker.core.sources import Sources
from vlm_worker.errors import GoneError, IncompatibleError, PeerLostError
from vlm_worker.settings.timers import PRODUCTION
from vlm_worker.testing import ChecksumRunner
from vlm_worker.transfer.peers import Peer, Peers
from vlm_worker.types import Request, RequestKey, Source
from vlm_worker.wire.data_protocol import Fetch
from vlm_worker.wire.frame_reader import FrameReader
from vlm_worker.wire.frames import TransferId
from vlm_worker.wire.messages import FetchCall, FirstToken, PrefillCall

NUM_TOKENS, NUM_BLOCKS = 101, 26
UNIT_BYTES = ChecksumRunner(4, block_size=4).kv_layout.block_bytes  # type: ignore[union-attr]
KV_BYTES = NUM_BLOCKS * UNIT_BYTES


def request(number: int, *, num_tokens: int = NUM_TOKENS) -> Request:
    """Each of its own tokens, so that nothing is found in a cache."""
    return request_of(num_tokens, RequestKey(f"r-{number}", 1), first=100 + number)


@contextlib.asynccontextmanager
async def behind(role: str, *flags: str) -> AsyncIterator[tuple[Serving, Door]]:
    """A worker whose data port is reached through a door."""
    async with (
        proxy() as front,
        serving(role, TENTH, f"--announced-data-port={front.data.port}", *flags) as worker,
    ):
        front.data.target_port = worker.server.data_port
        yield worker, front.data


@contextlib.asynccontextmanager
async def two_behind(*flags: str) -> AsyncIterator[tuple[Pair, Door]]:
    """A pair with a door before the data port of prefill, which decode has learned."""
    async with behind("prefill", *flags) as (p, door), serving("decode", TENTH, *flags) as d:
        two = Pair(p, d)
        first = request(0)
        assert await two.answer(first) == answer_alone(first)
        assert not door.num_passed, "the first of a worker goes over gRPC"
        yield two, door


# ---- answers -------------------------------------------------------------------------------------


async def test_answers_are_the_same_and_their_kv_goes_over_one_connection() -> None:
    async with two_behind() as (two, door):
        for number in (1, 2):
            before = door.num_passed
            assert await two.answer(request(number)) == answer_alone(request(number))
            assert KV_BYTES < door.num_passed - before < KV_BYTES + 4096
        assert len(door.connections) == 1
        await two.idle()


async def test_requests_at_once_have_a_connection_each() -> None:
    async with two_behind() as (two, door):
        asked = [request(number) for number in range(1, 5)]
        two.prefill.runner.gate.clear()
        asking = [asyncio.create_task(two.answer(one)) for one in asked]
        await until(lambda: outstanding(two.prefill.server).get("FetchKV calls") == len(asked))
        assert len(door.connections) == len(asked)
        two.prefill.runner.gate.set()
        assert await asyncio.gather(*asking) == [answer_alone(one) for one in asked]
        await two.idle()


async def test_with_shared_memory_only_what_is_checked_by_goes_over_the_connection(
    directory: Path,
) -> None:
    flags = ("--transport=shared-memory", f"--shared-memory-dir={directory}")
    async with two_behind(*flags) as (two, door):
        exposed = exposures(two.prefill.components.context.transport.account)
        assert await two.answer(request(1)) == answer_alone(request(1))
        assert exposed == [KV_BYTES]
        assert 0 < door.num_passed < KV_BYTES
        await two.idle()


async def test_embeddings_go_over_data_connections() -> None:
    async with behind("encoder") as (e, door), serving("prefill", TENTH) as p:
        for number, image in enumerate(IMAGES):
            key = RequestKey(f"r-{number}", 1)
            assert bool(door.num_passed) == (number > 1)
            # a name of its own: the release of the one before may still be on its way
            source, task = encoding(e, image, key, transfer_id=f"e-{number}")
            events = await collect(p, PrefillCall(about([image], key), f"t-{number}", (source,)))
            assert isinstance(events[1], FirstToken)
            assert events[1].token_id == answer_alone(about([image], key), [image])[0]
            await task
        layout = p.components.context.embed_layout
        assert door.num_passed > layout.row_bytes * IMAGES[1].num_tokens
        for worker in (e, p):
            await assert_idle(worker.server)


# ---- errors --------------------------------------------------------------------------------------


async def test_what_a_producer_refuses_arrives_as_itself() -> None:
    async with behind("prefill") as (p, door), learned(p) as (peer, good):
        before = door.num_passed
        with pytest.raises(GoneError, match="not held here"):
            await fetched(peer, dataclasses.replace(good, transfer_id="t-2"))
        with pytest.raises(GoneError, match="another incarnation"):
            await fetched(peer, dataclasses.replace(good, boot_id=b"x" * 16))
        with pytest.raises(IncompatibleError, match="layout"):
            await fetched(peer, dataclasses.replace(good, fingerprint=b"x" * 16))
        with pytest.raises(IncompatibleError, match="stage encoder"):
            await fetched(peer, good, Fetch.EMBEDDING)
        assert door.num_passed > before
        whole = await fetched(peer, good)
        assert len(whole) == NUM_BLOCKS * UNIT_BYTES


async def test_a_fetch_that_fails_over_grpc_unlearns_nothing() -> None:
    async with behind("prefill") as (p, door), learned(p) as (peer, good):
        gone = dataclasses.replace(good, transfer_id="t-2")
        with pytest.raises(GoneError):
            _ = [frame async for frame in peer.client.fetch(Fetch.KV, gone, timeout=5)]
        assert peer.client.data_port == door.port


@contextlib.asynccontextmanager
async def learned(p: Serving) -> AsyncIterator[tuple[Peer, FetchCall]]:
    """A consumer that knows where the data port is, and what it may fetch."""
    accepted = await accept(p, request_of(NUM_TOKENS))
    fingerprint = accepted.layout_fingerprint
    call = FetchCall("t-1", accepted.boot_id, fingerprint, KEY)
    peers = Peers(PRODUCTION.scaled(0.1), Sources("shapes", ""))
    try:
        source = Source(p.client.address, accepted.boot_id, "t-1", fingerprint)
        async with peers.hold(source) as peer:
            await fetched(peer, call)
            yield peer, call
    finally:
        await peers.close()
    await assert_idle(p.server)


async def fetched(peer: Peer, call: FetchCall, fetch: Fetch = Fetch.KV) -> bytes:
    """All units."""
    reader = FrameReader(
        TransferId(
            call.key,
            call.transfer_id,
            call.boot_id,
            call.fingerprint,
            content=content_of(request_of(NUM_TOKENS)),
        ),
        unit_bytes=UNIT_BYTES,
        first_unit=0,
        end_unit=NUM_BLOCKS,
    )
    async with aclosing(peer.units(fetch, call, reader)) as units:
        return b"".join([bytes(some.data) async for some in units])


# ---- connections that fail -----------------------------------------------------------------------


async def test_a_port_that_closes_at_once_is_gone_past() -> None:
    async with two_behind() as (two, door):
        target, door.target_port = door.target_port, 0
        for number in (1, 2):
            assert await two.answer(request(number)) == answer_alone(request(number))
        assert door.num_passed < KV_BYTES, "requests, which nobody heard"
        door.target_port = target
        assert await two.answer(request(3)) == answer_alone(request(3))
        assert door.num_passed > KV_BYTES
        await two.idle()


async def test_a_worker_with_too_many_data_connections_answers_over_grpc(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with two_behind() as (two, _):
        monkeypatch.setattr("vlm_worker.server.data_port.MAX_CONNECTIONS", 0)
        assert await two.answer(request(1)) == answer_alone(request(1))
        await two.idle()


async def test_kv_that_is_cut_off_in_the_middle_is_one_error_and_leaves_nothing() -> None:
    async with two_behind("--max-requests=16", "--max-batched-tokens=32") as (two, door):
        two.prefill.runner.faults.step_seconds = 0.05
        long = request(1, num_tokens=400)
        passed = door.num_passed
        asking = asyncio.create_task(two.answer(long))
        # what three steps computed: the first of it has long been read
        await until(lambda: door.num_passed > passed + 3 * 8 * UNIT_BYTES)
        door.reset()
        with pytest.raises(ExceptionGroup) as failed:
            await asking
        assert failed.group_contains(PeerLostError)
        two.prefill.runner.faults.step_seconds = 0.0
        await assert_idle(two.decode.server)
        again = dataclasses.replace(long, key=RequestKey("r-1", 2))
        assert await two.answer(again) == answer_alone(again)
        await two.idle()


async def test_a_data_port_that_is_silent_is_noticed() -> None:
    async with two_behind() as (two, door):
        door.silent = True
        with pytest.raises(ExceptionGroup) as failed:
            await two.answer(request(1))
        assert failed.group_contains(PeerLostError)
        assert door.num_swallowed
        await two.idle()


async def test_workers_that_close_leave_nothing() -> None:
    async with pair():
        pass  # what gRPC keeps for good is there now
    async with nothing_left(), pair() as two:
        for number in range(3):
            assert await two.answer(request(number)) == answer_alone(request(number))
