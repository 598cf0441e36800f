"""Peers that die, vanish or repeat themselves: one error each, and everything comes back.

Real servers over real gRPC in this process; every timer is a tenth of production's.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from typing import Any

import pytest
from worker.answers import answer_alone, make_image
from worker.idle import assert_idle, num_violations, outstanding
from worker.server.pairs import (
    KEY,
    TENTH,
    TIMEOUT,
    accept,
    collect,
    encode,
    encoding,
    kill,
    pair,
    request_of,
    until,
)
from worker.server.serving import page, serving

from vlm_worker.core.leases import LeaseKind
from vlm_worker.core.sources import Sources
from vlm_worker.errors import (
    DuplicateError,
    EngineError,
    GoneError,
    PeerLostError,
)
from vlm_worker.roles.attempt_registry import EndReason
from vlm_worker.server.state import Phase
from vlm_worker.settings.timers import PRODUCTION
from vlm_worker.transfer.peers import Peers
from vlm_worker.types import RequestKey, Source
from vlm_worker.wire.data_protocol import Fetch
from vlm_worker.wire.messages import (
    DecodeCall,
    FetchCall,
    FirstToken,
    ItemFailed,
    ItemReady,
    PrefillCall,
    ReserveCall,
)


async def test_a_decode_worker_lost_before_its_fetch_costs_prefill_one_lease() -> None:
    async with serving("prefill", TENTH) as p:
        accepted = await accept(p, request_of())
        leases = p.components.context.attempts.leases
        assert leases.count(LeaseKind.HELD) == 1
        await assert_idle(p.server)
        assert leases.num_expired[LeaseKind.HELD] == 1, "a lost cancel is counted"
        late = FetchCall("t-1", accepted.boot_id, accepted.layout_fingerprint, KEY)
        with pytest.raises(GoneError):
            _ = [f async for f in p.client.fetch(Fetch.KV, late, timeout=TIMEOUT)]


async def test_a_reservation_that_is_not_used_ends_and_is_counted() -> None:
    async with serving("decode", TENTH) as d:
        await d.client.reserve(ReserveCall(KEY, 40))
        assert outstanding(d.server)["KV tokens reserved"] == 40
        await assert_idle(d.server)
        assert d.components.context.attempts.leases.num_expired[LeaseKind.RESERVED] == 1


async def test_a_prefill_worker_lost_midway_leaves_decode_only_a_prefix() -> None:
    """Blocks that came whole are a prefix hit later; the request's own are free."""
    async with pair("--max-requests=16", "--max-batched-tokens=32") as two:
        two.prefill.runner.faults.step_seconds = 0.05
        request = request_of(400, max_tokens=4)
        task = asyncio.create_task(two.answer(request))
        confirmed: list[int] = []
        engine = two.decode.components.engine
        confirm = engine.confirm_blocks

        async def counted(key: RequestKey, first_block: int, num_blocks: int) -> None:
            await confirm(key, first_block, num_blocks)
            confirmed.append(first_block)

        engine.confirm_blocks = counted  # type: ignore[method-assign]
        await until(lambda: confirmed or task.done())
        await kill(two.prefill)
        with pytest.raises(ExceptionGroup) as failed:
            await task
        assert failed.group_contains(PeerLostError)
        await assert_idle(two.decode.server)
        assert engine.stats().count("output_tokens") == 0, "no token came of half a prompt"
        cached = engine.stats().kv
        assert cached is not None
        assert 0 < cached.cached_tokens < 400


async def test_a_consumer_that_gives_up_while_prefill_computes_leaves_nothing_there() -> None:
    """The prompt is computed to its first token, and then nobody will come for it."""
    async with serving("prefill", "--max-requests=4", "--max-batched-tokens=16", TENTH) as p:
        p.runner.gate.clear()
        prefilling = asyncio.create_task(collect(p, PrefillCall(request_of(60), "t-1", ())))
        attempts = p.components.context.attempts
        await until(lambda: attempts.holds("t-1"))
        await p.client.release(p.components.context.incarnation.boot_id, "t-1")
        assert not attempts.holds("t-1")
        p.runner.gate.set()
        assert isinstance((await prefilling)[1], FirstToken)
        await assert_idle(p.server)


async def test_a_call_that_comes_while_the_one_before_is_given_up_goes_on() -> None:
    """The same attempt may ask again after a refusal for lack of free KV blocks."""
    async with serving("prefill", TENTH) as p:
        context, begun = p.components.context, asyncio.Event()
        p.runner.gate.clear()

        async def work() -> str:
            with context.call("Prefill", KEY):
                begun.set()
                await context.engine.release(KEY)
            return "done"

        giving_up = asyncio.create_task(context.attempts.open(KEY).end(EndReason.GIVEN_UP))
        await asyncio.sleep(0)
        again = asyncio.create_task(work())
        await begun.wait()
        assert not giving_up.done()
        p.runner.gate.set()
        await giving_up
        assert await again == "done"


async def test_a_handle_of_prefill_before_its_restart_is_not_found() -> None:
    async with serving("prefill", TENTH) as before, serving("prefill", TENTH) as after:
        accepted = await accept(before, request_of())
        await accept(after, request_of())
        old = FetchCall("t-1", accepted.boot_id, accepted.layout_fingerprint, KEY)
        with pytest.raises(GoneError, match="another incarnation"):
            _ = [f async for f in after.client.fetch(Fetch.KV, old, timeout=TIMEOUT)]
        assert await after.client.renew(accepted.boot_id, ["t-1"]) == {"t-1"}


@pytest.mark.parametrize("call", ["Prefill", "Reserve", "Decode", "Encode"])
async def test_a_call_that_comes_twice_at_once_is_done_once(call: str) -> None:
    role = {"Prefill": "prefill", "Encode": "encoder"}.get(call, "decode")
    async with serving(role, TENTH) as worker:
        worker.runner.gate.clear()

        async def ask() -> None:
            if call == "Prefill":
                await collect(worker, PrefillCall(request_of(), "t-1", ()))
            elif call == "Reserve":
                await worker.client.reserve(ReserveCall(KEY, 8))
            elif call == "Encode":
                await encoding(worker, make_image(1, num_tokens=6))[1]
            else:
                nowhere = Source("127.0.0.1:9", b"x" * 16, "t", b"f" * 16)
                boot_id = worker.components.context.incarnation.boot_id
                decoding = DecodeCall(request_of(), "none", nowhere, boot_id)
                _ = [r async for r in worker.client.decode(decoding, timeout=TIMEOUT)]

        asking = asyncio.gather(ask(), ask(), return_exceptions=True)
        await asyncio.sleep(0)
        worker.runner.gate.set()
        ends = await asking
        assert sum(isinstance(end, DuplicateError) for end in ends) == 1
        await assert_idle(worker.server)


async def test_logits_that_are_not_finite_end_one_request_and_no_other() -> None:
    async with pair() as two:
        two.prefill.runner.faults.poison_token = 777
        bad = request_of(key=RequestKey("bad", 1), first=770)
        good = [request_of(key=RequestKey(f"good-{n}", 1), first=100 * n) for n in (1, 2, 3)]
        ends = await asyncio.gather(*map(two.answer, [bad, *good]), return_exceptions=True)
        assert isinstance(ends[0], ExceptionGroup)
        assert ends[0].subgroup(EngineError) is not None
        assert ends[1:] == [answer_alone(request) for request in good]
        two.prefill.runner.faults.poison_token = None
        again = dataclasses.replace(bad, key=RequestKey("bad", 2))
        assert await two.answer(again) == answer_alone(again), "nothing of it was kept"
        await two.idle()


class AcceleratorError(RuntimeError):
    """As torch names a device that is lost."""


async def test_a_lost_device_fails_the_process_at_the_first_step() -> None:
    async with serving("prefill", TENTH) as p:
        error = AcceleratorError("CUDA error: an illegal memory access was encountered")

        def execute(_: Any) -> Any:
            raise error

        p.runner.execute = execute  # type: ignore[method-assign]
        with pytest.raises(EngineError, match="illegal memory access"):
            await collect(p, PrefillCall(request_of(), "t-1", ()))
        async with asyncio.timeout(TIMEOUT):
            await p.server.failed()
        assert p.server.state.phase is Phase.FAILED


@pytest.mark.parametrize("fault", ["encode_error", "export_error"])
async def test_an_encoder_whose_device_is_lost_is_neither_healthy_nor_ready(fault: str) -> None:
    """It runs no step that would find the device lost."""
    async with serving("encoder", TENTH) as worker:
        error = AcceleratorError("CUDA error: an illegal memory access was encountered")
        setattr(worker.runner.faults, fault, error)
        replies = [reply.event async for reply in encode(worker, make_image(1, num_tokens=6))]
        assert isinstance(replies[-1], ItemFailed)
        assert "illegal memory access" in replies[-1].message
        async with asyncio.timeout(60):
            await worker.server.failed()
        assert worker.server.state.phase is Phase.FAILED
        for path in ("/healthz", "/readyz"):
            assert (await page(worker.server, path))[0] == 503


async def test_a_task_that_ends_by_itself_fails_the_process() -> None:
    """Leases that nobody sweeps any more would be held for ever."""
    async with serving("prefill", TENTH) as p:
        p.components.context.attempts.by_key[KEY] = None  # type: ignore[assignment]
        async with asyncio.timeout(60):
            await p.server.failed()
        assert p.server.state.phase is Phase.FAILED
        assert "sweep leases" in p.server.state.message
        assert (await page(p.server, "/healthz"))[0] == 503
        del p.components.context.attempts.by_key[KEY]


async def test_an_encoder_that_is_out_of_memory_counts_it_and_goes_on() -> None:
    async with serving("encoder", TENTH) as worker:
        worker.runner.faults.encode_error = MemoryError("no memory for 1 GiB")
        replies = [reply.event async for reply in encode(worker, make_image(1, num_tokens=6))]
        assert isinstance(replies[-1], ItemFailed)
        assert worker.components.engine.stats().count("out_of_memory") == 1
        worker.runner.faults.encode_error = None
        key = RequestKey("r-2", 1)
        image = make_image(2, num_tokens=6)
        replies = [reply.event async for reply in encode(worker, image, key, transfer_id="e-2")]
        assert isinstance(replies[-1], ItemReady)
        assert worker.components.unhealthy_reason is None


async def test_more_leases_than_fit_into_one_call_are_all_renewed() -> None:
    """A consumer that queues a thousand requests of one producer keeps each of them alive."""
    async with serving("prefill", TENTH) as p:
        context = p.components.context
        await accept(p, request_of())
        names = [f"lease-{number}" for number in range(1_200)]
        handle = context.attempts.by_key[KEY]
        for name in names:
            handle.offer(name, None)
        peers = Peers(PRODUCTION.scaled(0.1), Sources("shapes", ""))
        async with contextlib.AsyncExitStack() as held:
            for name in names:
                source = Source(p.client.address, context.incarnation.boot_id, name, b"f" * 16)
                await held.enter_async_context(peers.hold(source))

            def deadlines() -> list[float]:
                leases = map(context.attempts.leases.get, names)
                return [lease.deadline for lease in leases if lease is not None]

            deadline = max(deadlines())
            await until(lambda: len(deadlines()) == len(names) and min(deadlines()) > deadline)
        await peers.close()
        await assert_idle(p.server)


# ---- the books ---------------------------------------------------------------------------------


async def test_a_resource_without_a_holder_fails_a_strict_worker() -> None:
    async with serving("prefill", "--timer-scale=0.01") as p:
        p.components.context.attempts._renewed_by_maker["forgotten"] += 1
        with pytest.raises(AssertionError, match="renewed by their maker"):
            await assert_idle(p.server, within_seconds=0.0)
        async with asyncio.timeout(TIMEOUT):
            await p.server.failed()
        assert p.server.state.phase is Phase.FAILED
        assert num_violations(p.server) == 1


async def test_a_reservation_in_flight_is_no_accounting_mismatch() -> None:
    async with serving("decode", "--timer-scale=0.01") as d:
        reservation = await d.client.reserve(ReserveCall(KEY, 40))
        for _ in range(30):
            await d.client.renew(reservation.boot_id, [reservation.reservation_id])
            await asyncio.sleep(0.01)
        await d.client.release(reservation.boot_id, reservation.reservation_id)
        await assert_idle(d.server)
