"""Two prefill and two decode engines of 8 KV blocks each: whatever comes finishes or is refused.

    request ─▶ reserve on a decode engine ─▶ prefill on a prefill engine ─▶ pull ─▶ decode

Pools are full of held KV on the one side and of promises on the other most of the time. Nothing
ever waits without an end: the whole run is bounded, and the books are strict.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from contextlib import aclosing

from hypothesis import given, settings
from hypothesis import strategies as st
from worker.answers import answer_alone

from vlm_worker.engine.engine import Engine
from vlm_worker.engine.settings import EngineSettings
from vlm_worker.errors import OverloadedError
from vlm_worker.testing import ChecksumRunner, plain_positions
from vlm_worker.transfer.consumer import Pull, checked_units
from vlm_worker.transfer.producer import Producer
from vlm_worker.types import (
    BlocksReady,
    FailedEvent,
    FinishedEvent,
    Request,
    RequestKey,
    SamplingParams,
    TokenEvent,
)
from vlm_worker.wire.frame_reader import FrameReader
from vlm_worker.wire.frames import Commit, TransferId, join_frames

BLOCK = 4
NUM_BLOCKS = 8
MODEL_LEN = 28
HANG_SECONDS = 20.0
MAX_TRIES = 400


@dataclasses.dataclass(frozen=True)
class Arrival:
    """One request; `reads` False is a consumer that dies before it reads, `turns` when it comes."""

    length: int
    max_tokens: int
    prefill: int
    decode: int
    turns: int
    reads: bool


arrivals = st.builds(
    Arrival,
    length=st.integers(1, MODEL_LEN - 9),
    max_tokens=st.integers(1, 8),
    prefill=st.integers(0, 1),
    decode=st.integers(0, 1),
    turns=st.integers(0, 5),
    reads=st.sampled_from([True, True, True, False]),
)


class Pools:
    """Engines by role, and the way of a request through them, as the roles go it."""

    def __init__(self, prefill: list[Engine], decode: list[Engine]) -> None:
        self.prefill = prefill
        self.decode = decode
        self.num_refused = 0

    async def serve(self, number: int, arrival: Arrival) -> list[int] | None:
        """The answer, None where it was refused or its consumer died."""
        for _ in range(arrival.turns):
            await asyncio.sleep(0)
        sampling = SamplingParams(max_tokens=arrival.max_tokens, ignore_eos=True)
        prompt = tuple(100 * number + i for i in range(arrival.length))
        for attempt in range(1, MAX_TRIES):
            key = RequestKey(f"r{number}", attempt)
            request = Request(key, prompt, len(prompt), sampling)
            try:
                return await self._attempt(request, arrival)
            except OverloadedError:
                self.num_refused += 1
            await asyncio.sleep(0.001)  # as long as a gateway stays away
        return None

    async def _attempt(self, request: Request, arrival: Arrival) -> list[int] | None:
        key = request.key
        prefill, decode = self.prefill[arrival.prefill], self.decode[arrival.decode]
        await decode.reserve(key, len(request.token_ids) + 1)
        try:
            outgoing = self._outgoing(prefill, request)
            making = asyncio.create_task(self._make(prefill, request, outgoing))
            try:
                if not arrival.reads:
                    await making
                    return None
                first = await self._pull(decode, request, outgoing)
                await making
                await prefill.release(key)  # read whole, as the consumer says then
                return await first
            finally:
                making.cancel()
                await asyncio.gather(making, return_exceptions=True)
        finally:
            # the lease ends, the request ends
            await prefill.cancel(key)
            await decode.cancel(key)

    def _outgoing(self, prefill: Engine, request: Request) -> Producer:
        layout = ChecksumRunner(2).kv_layout
        assert layout is not None

        def export(first: int, count: int, buffer: memoryview) -> memoryview:
            return prefill.readable_blocks.copy(request.key, first, count, buffer)

        return Producer(
            TransferId(request.key, "t", b"b" * 16, layout.fingerprint, "pod"),
            unit_bytes=layout.block_bytes,
            max_units=-(-len(request.token_ids) // BLOCK),
            export=export,
        )

    async def _make(self, prefill: Engine, request: Request, outgoing: Producer) -> None:
        token, finish = None, None
        stream = prefill.submit_prefill(request, for_peer=True)
        async for event in stream:
            match event:
                case BlocksReady(count):
                    outgoing.advance(count)
                case TokenEvent(_, token_id):
                    token = token_id
                case FinishedEvent(reason):
                    finish = reason
                case FailedEvent(error):
                    outgoing.fail(error)
                    raise error
        num_tokens = len(request.token_ids)
        outgoing.finish(Commit(-(-num_tokens // BLOCK), num_tokens, token, finish))

    async def _pull(
        self, decode: Engine, request: Request, outgoing: Producer
    ) -> asyncio.Task[list[int]]:
        """Receive and start; the task gives the whole answer."""
        key = request.key
        first = (await decode.receive(request)).first_block
        reader = FrameReader(
            dataclasses.replace(outgoing._identity, pod_uid=None),
            unit_bytes=outgoing._unit_bytes,
            first_unit=first,
            end_unit=-(-len(request.token_ids) // BLOCK),
        )
        frames = join_frames(outgoing.frame_batches(key, first_unit=first))
        pull = Pull(
            checked_units(frames, reader, peer="peer", no_progress_seconds=HANG_SECONDS),
            reader,
            peer="peer",
        )
        async with aclosing(pull.units()) as received:
            async for units in received:
                await decode.import_blocks(key, units.first_unit, units.data)
        first_token = pull.commit.first_token_id
        assert first_token is not None
        return asyncio.create_task(self._answer(decode, request, pull.commit))

    async def _answer(self, decode: Engine, request: Request, commit: Commit) -> list[int]:
        assert commit.first_token_id is not None
        tokens = [commit.first_token_id]
        if commit.finish_reason is not None:
            return tokens
        stream = await decode.start_decode(request.key, commit.first_token_id)
        async for event in stream:
            match event:
                case TokenEvent(_, token_id):
                    tokens.append(token_id)
                case FailedEvent(error):
                    raise error
        return tokens


@contextlib.asynccontextmanager
async def pools() -> AsyncIterator[Pools]:
    bounds = EngineSettings(
        max_model_len=MODEL_LEN, max_num_seqs=4, max_num_batched_tokens=8, strict=True
    )
    engines = []
    for _ in range(4):
        runner = ChecksumRunner(NUM_BLOCKS + 1, block_size=BLOCK)
        engine = Engine(runner, settings=bounds, positions=plain_positions)
        engine.start(asyncio.get_running_loop())
        engines.append(engine)
    try:
        yield Pools(engines[:2], engines[2:])
    finally:
        for engine in engines:
            await engine.stop()


@settings(max_examples=30)
@given(st.lists(arrivals, min_size=1, max_size=14))
def test_two_full_pools_never_wait_for_each_other(requests: list[Arrival]) -> None:
    async def scenario() -> None:
        async with pools() as two_by_two:
            asking = [two_by_two.serve(n, arrival) for n, arrival in enumerate(requests)]
            async with asyncio.timeout(HANG_SECONDS):
                answers = await asyncio.gather(*asking)
            for number, (arrival, answer) in enumerate(zip(requests, answers, strict=True)):
                if arrival.reads:
                    assert answer == expected(number, arrival), "it was to finish"
                else:
                    assert answer is None
            for engine in (*two_by_two.prefill, *two_by_two.decode):
                assert engine.stats().inflight == 0

    asyncio.run(scenario())


async def test_many_long_prompts_at_once_are_refused_now_and_then_and_all_finish() -> None:
    crowd = [Arrival(19, 8, n % 2, n // 2 % 2, turns=0, reads=n % 4 != 3) for n in range(16)]
    async with pools() as two_by_two:
        asking = [two_by_two.serve(n, arrival) for n, arrival in enumerate(crowd)]
        async with asyncio.timeout(HANG_SECONDS):
            answers = await asyncio.gather(*asking)
        assert answers == [expected(n, a) if a.reads else None for n, a in enumerate(crowd)]
        assert two_by_two.num_refused > 0, "the pools were never full"


def expected(number: int, arrival: Arrival) -> list[int]:
    prompt = tuple(100 * number + i for i in range(arrival.length))
    sampling = SamplingParams(max_tokens=arrival.max_tokens, ignore_eos=True)
    return answer_alone(Request(RequestKey("alone", 1), prompt, len(prompt), sampling))


async def test_a_prefill_pool_half_full_of_unread_kv_takes_no_more_for_peers() -> None:
    async with pools() as two_by_two:
        engine = two_by_two.prefill[0]
        sampling = SamplingParams(max_tokens=2, ignore_eos=True)
        held = Request(RequestKey("held", 1), tuple(range(18)), 18, sampling)
        assert [e async for e in engine.submit_prefill(held, for_peer=True)]
        assert engine._thread.state.sequences.scheduler.pending_transfers.num_held_blocks == 5
        late = Request(RequestKey("late", 1), tuple(range(50, 54)), 4, sampling)
        [refused] = [e async for e in engine.submit_prefill(late, for_peer=True)]
        assert isinstance(refused, FailedEvent)
        assert isinstance(refused.error, OverloadedError)
        assert "5 KV blocks wait to be read, 4 may" in str(refused.error)
        own = Request(RequestKey("own", 1), tuple(range(50, 54)), 4, sampling)
        told = [e async for e in engine.submit_prefill(own, for_peer=False)]
        assert isinstance(told[-1], FinishedEvent), "what nobody reads is not counted"
        await engine.release(held.key)
        again = dataclasses.replace(late, key=RequestKey("late", 2))
        assert not any(
            isinstance(e, FailedEvent)
            for e in [e async for e in engine.submit_prefill(again, for_peer=True)]
        )
        await engine.release(again.key)
