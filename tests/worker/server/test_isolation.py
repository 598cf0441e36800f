"""KV and embeddings serve the request that they were made from, and no other.

The attack: a caller prefills T1, then asks for a decode of T2 with another tenant's salt and names
the transfer of T1. If that were taken, the tenant's next T2 would find KV of T1 in its cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from worker.answers import answer_alone
from worker.server.pairs import IMAGES, Pair, about, accept, collect, encoding, pair, until
from worker.server.serving import Serving, serving

from vlm_worker.errors import CorruptTransferError, IncompatibleError, PeerLostError, Refusal
from vlm_worker.transfer import nixl
from vlm_worker.types import Request, RequestKey, SamplingParams, Source
from vlm_worker.wire.messages import (
    Accepted,
    DecodeCall,
    FirstToken,
    PrefillCall,
    Reservation,
    ReserveCall,
    Tokens,
)

TIMEOUT = 60.0
WHOLE_LEASES = "--timer-scale=1"  # a reservation outlasts a machine under load
KEY, VICTIM = RequestKey("attack", 1), RequestKey("victim", 1)
OURS, THEIRS = b"a" * 32, b"v" * 32


def asked(*, first: int = 100, num_tokens: int = 42, salt: bytes = OURS) -> Request:
    """The last block is not full: its tokens are in no hash of a block."""
    tokens = tuple(range(first, first + num_tokens))
    sampling = SamplingParams(8, ignore_eos=True)
    return Request(KEY, tokens, num_tokens, sampling, cache_salt=salt)


def with_last(request: Request, token_id: int) -> Request:
    return dataclasses.replace(request, token_ids=(*request.token_ids[:-1], token_id))


def continued(*delivered: int) -> Request:
    request = asked()
    tokens = (*request.token_ids[: -len(delivered)], *delivered)
    return dataclasses.replace(
        request, token_ids=tokens, num_prompt_tokens=len(tokens) - len(delivered)
    )


PAIRS = {
    "another prompt": (asked(), asked(first=400)),
    "another prompt and tenant": (asked(), asked(first=400, salt=THEIRS)),
    "another tenant": (asked(), asked(salt=THEIRS)),
    "another last token": (asked(), with_last(asked(), 500)),
    "another continuation": (continued(1, 2, 3), continued(1, 2, 4)),
}


@contextlib.asynccontextmanager
async def colocated() -> AsyncIterator[Pair]:
    async with serving("decode", "--stages=prefill,decode") as one:
        yield Pair(one, one)


@pytest.fixture(params=["frames", "shared-memory", "nixl", "one process"])
async def two(request: pytest.FixtureRequest, directory: Path) -> AsyncIterator[Pair]:
    """A prefill and a decode worker, whose bytes go one of the ways that there are."""
    flags = {"shared-memory": ["--transport=shared-memory", f"--shared-memory-dir={directory}"]}
    if request.param == "nixl":
        try:
            nixl.nixl_api()
        except ImportError:
            pytest.skip("NIXL is not installed: pip install triptych[nixl]")
        flags["nixl"] = ["--transport=nixl"]
    own = flags.get(request.param, [])
    both = colocated() if request.param == "one process" else pair(*own, WHOLE_LEASES)
    async with both as workers:
        yield workers


async def reserved(two: Pair, request: Request) -> Reservation:
    return await two.decode.client.reserve(ReserveCall(request.key, len(request.token_ids) + 1))


async def decoded(
    two: Pair, request: Request, accepted: Accepted, reservation: Reservation | None = None
) -> None:
    """A decode that names KV of a prefill; raises what it ends with."""
    granted = reservation or await reserved(two, request)
    call = DecodeCall(request, granted.reservation_id, two.source(accepted), granted.boot_id)
    async for reply in two.decode.client.decode(call, timeout=TIMEOUT):
        assert not isinstance(reply.event, Tokens), "KV of another request was used"


async def clean(two: Pair, claimed: Request) -> None:
    """The victim's answer is its own, and nothing of the attack is left."""
    victim = dataclasses.replace(claimed, key=VICTIM)
    answer = answer_alone(victim)[victim.num_delivered_tokens :]
    assert await two.answer(victim) == answer
    await two.decode.client.cancel(VICTIM)  # in one process, the KV did not use the reservation
    await two.idle()


@pytest.mark.parametrize("difference", PAIRS)
async def test_kv_of_another_request_is_refused_and_not_cached(two: Pair, difference: str) -> None:
    planted, claimed = PAIRS[difference]
    accepted = await accept(two.prefill, planted)
    with pytest.raises(CorruptTransferError):
        await decoded(two, claimed, accepted)
    await two.prefill.client.cancel(KEY)
    await clean(two, claimed)


async def test_kv_that_is_still_computed_is_refused_as_well(two: Pair) -> None:
    """Its frames begin to travel before the first block is there."""
    planted, claimed = PAIRS["another prompt and tenant"]
    reservation = await reserved(two, claimed)
    two.prefill.runner.gate.clear()
    call = PrefillCall(planted, "t-1", ())
    replies = two.prefill.client.prefill(call, timeout=TIMEOUT)
    accepted = (await anext(replies)).event
    assert isinstance(accepted, Accepted)
    attack = asyncio.create_task(decoded(two, claimed, accepted, reservation))
    await until(lambda: two.decode.server._service.live["Decode"] > 0 or attack.done())
    two.prefill.runner.gate.set()
    with pytest.raises(CorruptTransferError):
        await attack
    await replies.aclose()
    await two.prefill.client.cancel(KEY)
    await clean(two, claimed)


async def test_a_refused_transfer_is_counted_as_another_ones() -> None:
    planted, claimed = PAIRS["another prompt"]
    async with pair(WHOLE_LEASES) as two:
        accepted = await accept(two.prefill, planted)
        with pytest.raises(CorruptTransferError, match="content differs"):
            await decoded(two, claimed, accepted)
        assert two.decode.components.context.num_refused == {Refusal.IDENTITY: 1}


async def test_kv_of_another_image_is_refused() -> None:
    """The tokens of two prompts about images of one size are the same."""
    async with serving("encoder") as encoder, pair(WHOLE_LEASES) as two:
        request = dataclasses.replace(about([IMAGES[0]]), key=KEY)
        source, task = encoding(encoder, IMAGES[0], KEY)
        await task
        accepted = await accept(two.prefill, request, source)
        other = dataclasses.replace(about([IMAGES[1]]), key=KEY)
        assert other.token_ids == request.token_ids
        with pytest.raises(CorruptTransferError):
            await decoded(two, other, accepted)


@contextlib.asynccontextmanager
async def apart() -> AsyncIterator[tuple[Serving, Serving]]:
    async with serving("encoder") as encoder, serving("prefill") as prefill:
        yield encoder, prefill


@contextlib.asynccontextmanager
async def inline() -> AsyncIterator[tuple[Serving, Serving]]:
    async with serving("prefill", "--stages=encoder,prefill") as one:
        yield one, one


@pytest.mark.parametrize("workers", [apart, inline])
async def test_the_embedding_of_another_image_is_refused(workers: type) -> None:
    """The caller encodes one image and claims that its embedding is another's."""
    async with workers() as (encoder, prefill):
        source, task = encoding(encoder, IMAGES[0], KEY)
        claimed = dataclasses.replace(about([IMAGES[1]]), key=KEY)
        with pytest.raises(CorruptTransferError):
            await collect(prefill, PrefillCall(claimed, "t-1", (source,), handoff=False))
        await task
        await encoder.client.cancel(KEY)
        victim = dataclasses.replace(claimed, key=VICTIM)
        source, task = encoding(encoder, IMAGES[1], VICTIM, transfer_id="e-2")
        events = await collect(prefill, PrefillCall(victim, "t-2", (source,), handoff=False))
        await task
        [first] = [event for event in events if isinstance(event, FirstToken)]
        assert first.token_id == answer_alone(victim, [IMAGES[1]])[0]


# ---- addresses that a caller names ---------------------------------------------------------------


async def decoding_from(decode: Serving, source: Source) -> None:
    """A decode whose KV is said to be somewhere; raises what it ends with."""
    request = asked()
    reservation = await reserved(Pair(decode, decode), request)
    decoding = DecodeCall(request, reservation.reservation_id, source, reservation.boot_id)
    async for _ in decode.client.decode(decoding, timeout=TIMEOUT):
        raise AssertionError("it went on")


class Stranger(asyncio.Protocol):
    """Speaks enough HTTP/2 for a call to begin, and keeps what it hears."""

    def __init__(self) -> None:
        self.heard = bytearray()
        self.num_open = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.num_open += 1
        transport.write(b"\0\0\0\4\0\0\0\0\0")  # an empty SETTINGS frame

    def connection_lost(self, exc: Exception | None) -> None:
        self.num_open -= 1

    def data_received(self, data: bytes) -> None:
        self.heard += data


async def test_an_unknown_peer_gets_hello_and_nothing_else() -> None:
    """What listens at the address that a caller names hears of no request and no transfer."""
    stranger = Stranger()
    server = await asyncio.get_running_loop().create_server(lambda: stranger, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, serving("decode", "--timer-scale=0.2") as decode:
        fingerprint = decode.components.context.kv_layout.fingerprint  # type: ignore[union-attr]
        source = Source(address, b"x" * 16, "secret-transfer", fingerprint)
        with pytest.raises(PeerLostError):
            await decoding_from(decode, source)
        await decode.until_idle()
    await until(lambda: stranger.num_open == 0)
    assert b"Hello" in stranger.heard
    for word in (b"FetchKV", b"RenewLeases", b"ReleaseLease", b"secret-transfer", b"attack"):
        assert word not in stranger.heard


@pytest.mark.parametrize("flags", [("--compat=c2",), ("--served-name=other",)])
async def test_a_worker_of_another_service_is_not_fetched_from(flags: tuple[str, ...]) -> None:
    async with (
        serving("prefill", *flags) as other,
        serving("decode", "--compat=c1") as decode,
    ):
        accepted = await accept(other, asked())
        with pytest.raises(IncompatibleError, match="is not used: "):
            await decoding_from(decode, Pair(other, decode).source(accepted))
        await other.client.cancel(KEY)
        await decode.until_idle()


async def test_an_address_that_no_worker_has_is_not_connected_to() -> None:
    async with serving("decode") as decode:
        fingerprint = decode.components.context.kv_layout.fingerprint  # type: ignore[union-attr]
        source = Source("169.254.169.254:80", b"x" * 16, "t-1", fingerprint)
        with pytest.raises(IncompatibleError, match="link-local"):
            await decoding_from(decode, source)
        await decode.until_idle()
