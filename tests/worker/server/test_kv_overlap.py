"""KV leaves prefill while the rest of its prompt is computed, and comes in while others decode."""

from __future__ import annotations

import asyncio
import threading
from contextlib import aclosing

import pytest
from worker.answers import answer_alone
from worker.server.pairs import pair, until
from worker.server.serving import KEY, TIMEOUT, request_of, serving

from vlm_worker.core.kv_cache import content_of
from vlm_worker.core.step_values import StepInputs, StepOutput
from vlm_worker.transfer.consumer import Pull, checked_units
from vlm_worker.types import RequestKey
from vlm_worker.wire.data_protocol import Fetch
from vlm_worker.wire.frame_reader import FrameReader
from vlm_worker.wire.frames import TransferId
from vlm_worker.wire.messages import Accepted, FetchCall, PrefillCall

NUM_TOKENS, STEP_TOKENS, BLOCK = 40, 16, 4


async def test_all_but_the_last_chunk_has_come_before_the_last_chunk_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    last_may_run = threading.Event()
    flags = ("--max-requests=1", f"--max-batched-tokens={STEP_TOKENS}")
    async with serving("prefill", *flags) as prefill:
        execute, layout = prefill.runner.execute, prefill.runner.kv_layout
        assert layout is not None
        in_last = False

        def execute_in_turn(inputs: StepInputs) -> StepOutput:
            nonlocal in_last
            if prefill.runner.num_steps == NUM_TOKENS // STEP_TOKENS:
                in_last = True
                assert last_may_run.wait(TIMEOUT)
            return execute(inputs)

        monkeypatch.setattr(prefill.runner, "execute", execute_in_turn)
        call = PrefillCall(request_of(NUM_TOKENS), "t-1", ())
        replies = prefill.client.prefill(call, timeout=TIMEOUT)
        async with asyncio.timeout(TIMEOUT), aclosing(replies):
            accepted = (await anext(replies)).event
            assert isinstance(accepted, Accepted)
            life, end = prefill.server.state.boot_id, NUM_TOKENS // BLOCK
            frames = prefill.client.fetch(
                Fetch.KV, FetchCall("t-1", life, layout.fingerprint, KEY, 0), timeout=TIMEOUT
            )
            reader = FrameReader(
                TransferId(
                    KEY,
                    "t-1",
                    life,
                    layout.fingerprint,
                    content=content_of(request_of(NUM_TOKENS)),
                ),
                unit_bytes=layout.block_bytes,
                first_unit=0,
                end_unit=end,
            )
            pull = Pull(
                checked_units(frames, reader, peer="prefill", no_progress_seconds=TIMEOUT),
                reader,
                peer="prefill",
            )
            num_come = 0
            async with aclosing(pull.units()) as received:
                async for units in received:
                    num_come += units.num_units
                    if num_come == end - (NUM_TOKENS % STEP_TOKENS) // BLOCK:
                        assert not last_may_run.is_set(), "nothing is left to be computed"
                        last_may_run.set()
            assert in_last
            assert num_come == pull.commit.num_units == end
            _ = [reply async for reply in replies]
        await prefill.client.cancel(KEY)


async def test_all_chunks_come_in_during_one_step_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with pair("--max-requests=1", f"--max-batched-tokens={STEP_TOKENS}") as two:
        prefill, decode = two.prefill, two.decode
        engine, request = decode.components.context.engine, request_of(NUM_TOKENS)
        confirm_blocks, begun = engine.confirm_blocks, list[int]()
        execute, may_run = prefill.runner.execute, threading.Semaphore(0)

        async def confirm_and_tell(key: RequestKey, first_block: int, num_blocks: int) -> None:
            begun.append(first_block)
            await confirm_blocks(key, first_block, num_blocks)

        def execute_in_turn(inputs: StepInputs) -> StepOutput:
            assert may_run.acquire(timeout=TIMEOUT)
            return execute(inputs)

        monkeypatch.setattr(engine, "confirm_blocks", confirm_and_tell)
        monkeypatch.setattr(prefill.runner, "execute", execute_in_turn)
        answering = asyncio.create_task(two.answer(request))
        await until(lambda: prefill.components.context.attempts.outstanding["readers"])
        decode.runner.gate.clear()
        other = engine.submit_prefill(request_of(9, RequestKey("other", 1)), for_peer=False)
        await until(lambda: decode.runner.num_steps)
        for first_blocks in ([0], [0, 4], [0, 4, 8]):
            may_run.release()
            await until(lambda due=first_blocks: begun == due)
        decode.runner.gate.set()
        assert await answering == answer_alone(request)
        _ = [event async for event in other]
        await two.idle()
