"""One worker over real gRPC: who it says it is, what it refuses, that nothing is left behind."""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import aclosing

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from worker.server.pairs import collect, until
from worker.server.serving import (
    KEY,
    TIMEOUT,
    page,
    prefill_until_accepted,
    request_of,
    serving,
    settings_of,
)

from vlm_worker import metrics
from vlm_worker.client import WorkerClient
from vlm_worker.errors import (
    CorruptTransferError,
    DrainingError,
    GoneError,
    PeerLostError,
    WorkerError,
)
from vlm_worker.server.worker_server import WorkerServer
from vlm_worker.types import RequestKey, Source, Stage
from vlm_worker.wire.data_protocol import Fetch
from vlm_worker.wire.messages import (
    DecodeCall,
    FetchCall,
    PrefillCall,
    ReserveCall,
)


async def test_hello_names_the_stages_and_both_fingerprints() -> None:
    async with serving("decode", "--stages=prefill,decode", "--compat=c1") as worker:
        hello = await worker.client.hello()
        assert hello.stages == {Stage.PREFILL, Stage.DECODE}
        assert hello.layout_fingerprint == worker.runner.kv_layout.fingerprint  # type: ignore[union-attr]
        assert hello.embed_fingerprint == worker.runner.embed_layout.fingerprint
        assert (hello.compat, hello.model, hello.weights) == ("c1", "shapes", "int64")
        assert hello.limits.kv_capacity_tokens == 128 * 4
        assert hello.boot_id == worker.server.state.boot_id


async def test_load_is_told_at_once_and_again() -> None:
    async with serving("decode") as worker, aclosing(worker.client.watch_load()) as loads:
        first, second = await anext(loads), await anext(loads)
        assert first.accepting
        assert second.kv_free_tokens == second.kv_capacity_tokens == 128 * 4


async def health(worker: WorkerServer, service: str) -> int:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{worker.grpc_port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        reply = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=TIMEOUT)
        return int(reply.status)


async def test_before_the_model_is_loaded_it_lives_and_is_not_ready() -> None:
    server = WorkerServer(settings_of("decode"))
    await server.open()
    try:
        server.state.message = "loading weights"
        assert await health(server, "") == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await page(server, "/readyz") == (503, "loading weights")
        assert (await page(server, "/healthz"))[0] == 200
        async with WorkerClient(f"127.0.0.1:{server.grpc_port}") as client:
            with pytest.raises(DrainingError, match="loading weights"):
                await client.hello()
    finally:
        await server.close()


async def test_a_ready_worker_says_so_under_every_name() -> None:
    async with serving("decode", "--stages=prefill,decode") as worker:
        for name in ("", "decode", "prefill"):
            assert await health(worker.server, name) == health_pb2.HealthCheckResponse.SERVING
        assert (await page(worker.server, "/readyz"))[0] == 200


async def test_a_failed_engine_is_neither_healthy_nor_ready_and_fails_the_process() -> None:
    async with serving("prefill") as worker:
        worker.runner.faults.crash_steps = 100
        for number in range(4):
            call = PrefillCall(request_of(key=RequestKey(f"r{number}", 1)), f"t{number}", ())
            with pytest.raises(Exception, match="crash"):
                _ = [reply async for reply in worker.client.prefill(call, timeout=TIMEOUT)]
        async with asyncio.timeout(TIMEOUT):
            await worker.server.failed()
        assert await health(worker.server, "") == health_pb2.HealthCheckResponse.NOT_SERVING
        assert (await page(worker.server, "/healthz"))[0] == 503
        assert (await page(worker.server, "/readyz"))[0] == 503


async def test_a_worker_whose_step_never_ends_closes_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("vlm_worker.server.worker_server.STOP_SECONDS", 0.1)
    async with serving("prefill") as worker:
        worker.runner.gate.clear()
        asking = asyncio.create_task(collect(worker, PrefillCall(request_of(), "t-1", ())))
        engine = worker.components.engine
        await until(lambda: engine._thread._turn_started is not None)
        async with asyncio.timeout(TIMEOUT):
            await worker.server.close()
        assert engine._thread._turn_started is not None, "the step had ended"
        with pytest.raises(WorkerError):
            await asking
        worker.runner.gate.set()
        await engine.stop()


async def test_metrics_have_the_names_of_the_contract() -> None:
    async with serving("decode") as worker:
        status, text = await page(worker.server, "/metrics")
        assert status == 200
        for name in (metrics.ACCEPTING, metrics.REQUESTS_TOTAL, "triptych_kv_tokens",
                     "triptych_leases", "triptych_kv_transfer_seconds",
                     "triptych_work_queued_seconds"):  # fmt: skip
            assert f"\n{name}" in text
        assert "triptych_accepting 1.0" in text


async def test_a_client_that_is_closed_says_that_the_peer_is_lost() -> None:
    async with serving("decode") as worker:
        client = WorkerClient(worker.client.address)
        loads = client.watch_load()
        await anext(loads)
        await client.close()
        with pytest.raises(PeerLostError):
            _ = [load async for load in loads]
        with pytest.raises(PeerLostError):
            await client.hello()


async def test_a_draining_worker_refuses_new_work_unless_there_is_no_other() -> None:
    async with serving("decode") as worker:
        held = ReserveCall(RequestKey("held", 1), 8)
        reservation = await worker.client.reserve(held)
        draining = asyncio.create_task(worker.server.drain())
        async with asyncio.timeout(TIMEOUT):
            while worker.server.state.accepting:  # noqa: ASYNC110  set by the task above
                await asyncio.sleep(0)
        with pytest.raises(DrainingError):
            await worker.client.reserve(ReserveCall(RequestKey("new", 1), 8))
        last = ReserveCall(RequestKey("last", 1), 8, last_resort=True)
        other = await worker.client.reserve(last)
        assert (await page(worker.server, "/readyz"))[0] == 200
        assert "triptych_accepting 0.0" in (await page(worker.server, "/metrics"))[1]
        assert not draining.done()
        for handle in (reservation, other):
            await worker.client.release(handle.boot_id, handle.reservation_id)
        async with asyncio.timeout(TIMEOUT):
            await draining


async def test_calls_that_are_abandoned_leave_nothing_running() -> None:
    async with serving("prefill") as worker:
        worker.runner.gate.clear()
        for number in range(30):
            request = request_of(key=RequestKey(f"dropped-{number}", 1))
            replies = worker.client.prefill(PrefillCall(request, f"t-{number}", ()), timeout=600)
            async with aclosing(replies):
                await anext(replies)
        worker.runner.gate.set()
        await worker.until_idle()


async def test_a_lease_that_is_not_renewed_ends_and_frees_its_blocks() -> None:
    async with serving("prefill", "--timer-scale=0.1") as worker:
        accepted = await prefill_until_accepted(worker, request_of())
        assert worker.components.snapshot().leases.held == 1
        await worker.until_idle()
        call = FetchCall("t-1", accepted.boot_id, accepted.layout_fingerprint, KEY)
        with pytest.raises(GoneError):
            _ = [f async for f in worker.client.fetch(Fetch.KV, call, timeout=TIMEOUT)]


async def test_a_lease_that_is_renewed_outlives_its_seconds() -> None:
    async with serving("prefill", "--timer-scale=0.1") as worker:
        accepted = await prefill_until_accepted(worker, request_of())
        for _ in range(8):
            await asyncio.sleep(0.25)
            assert await worker.client.renew(accepted.boot_id, ["t-1"]) == frozenset()
        await worker.client.release(accepted.boot_id, "t-1")
        await worker.until_idle()


async def test_kv_that_arrives_for_another_prompt_is_not_used() -> None:
    async with serving("prefill") as producer, serving("decode") as consumer:
        short = request_of(20)
        accepted = await prefill_until_accepted(producer, short)
        longer = dataclasses.replace(request_of(24), key=KEY)
        reservation = await consumer.client.reserve(ReserveCall(KEY, 25))
        source = Source(producer.client.address, accepted.boot_id, "t-1",
                        accepted.layout_fingerprint)  # fmt: skip
        call = DecodeCall(longer, reservation.reservation_id, source, reservation.boot_id)
        with pytest.raises(CorruptTransferError):
            _ = [r async for r in consumer.client.decode(call, timeout=TIMEOUT)]
        await consumer.until_idle()
        await producer.until_idle()
