"""A gateway prefetches the next turn of a conversation: the same answers, more of them cached."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worker.gateway.image_files import ask, png
from worker.gateway.responding.templates import HERMES
from worker.gateway.responding.test_tool_calls import body, tell
from worker.gateway.responding.written import CALLS, hermes
from worker.gateway.stack import EPD, MODEL, ONE_PROCESS, TOPOLOGIES, Stack, stack, stack_of

from vlm_worker.gateway.pod_caches import RequestDigests
from vlm_worker.gateway.prompts import Prompt
from vlm_worker.gateway.session_prefetch import (
    OUTCOMES,
    TOO_LONG,
    UNKNOWN,
    EndedTurn,
    SessionPrefetcher,
    plan,
)
from vlm_worker.settings import ModelSource
from vlm_worker.types import ImageItem, Request, RequestKey, Role, SamplingParams
from vlm_worker.wire.prefetch_messages import PrefetchOutcome

QUESTION = "What is in this image, and which colours does it have, from left to right?"


def client(served: Stack) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60
    )


def prefetcher(served: Stack) -> SessionPrefetcher:
    found = served.gateway.context.prefetcher
    assert found is not None
    return found


async def ended(served: Stack, count: int) -> None:
    """Until so many prefetches have ended."""
    async with asyncio.timeout(30):
        while prefetcher(served).outcomes.total() < count:  # noqa: ASYNC110  counts have no event
            await asyncio.sleep(0.01)


async def two_turns(served: Stack, *, prefetches: bool, stream: bool = False) -> Any:
    """The two answers, and the usage of the second turn."""
    told: list[Any] = [ask(png(), QUESTION)]
    async with client(served) as api:
        first = await answer(api, told, stream=stream)
        if prefetches:
            await ended(served, 1)
        await served.until_idle()
        told += [{"role": "assistant", "content": first[0]}, ask("And behind it?")]
        second = await answer(api, told, stream=stream)
    return first[0], second[0], second[1]


async def answer(api: Any, messages: list[Any], *, stream: bool) -> tuple[str, int]:
    body = {"model": "shapes", "messages": messages, "max_tokens": 24, "temperature": 0}
    if not stream:
        whole = await api.chat.completions.create(**body)
        return whole.choices[0].message.content, whole.usage.prompt_tokens_details.cached_tokens
    options = {"stream_options": {"include_usage": True}}
    chunks = [c async for c in await api.chat.completions.create(**body, stream=True, **options)]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    return text, chunks[-1].usage.prompt_tokens_details.cached_tokens


@pytest.mark.parametrize("topology", [*TOPOLOGIES, ONE_PROCESS])
async def test_a_next_turn_has_the_same_answer_and_more_of_it_cached(topology: str) -> None:
    async with stack_of(topology) as without:
        assert without.gateway.context.prefetcher is None
        expected = await two_turns(without, prefetches=False)
    async with stack_of(topology, session_prefetch=True) as served:
        found = await two_turns(served, prefetches=True, stream=topology == "E-P-D")
        await ended(served, 2)
        await served.until_idle()
        outcomes = {name for name, count in prefetcher(served).outcomes.items() if count}
        num_inflight = [worker.num_held for worker in served.workers]
    assert found[:2] == expected[:2]
    assert found[2] >= expected[2]
    assert outcomes <= {PrefetchOutcome.COMPUTED, PrefetchOutcome.CACHED}
    assert num_inflight == [0] * len(num_inflight)
    if topology in ("E-P-D", "P-D"):  # the answer was decoded on another pod
        assert found[2] >= expected[2] + 24 - 2 * 4
        assert PrefetchOutcome.COMPUTED in outcomes


async def test_the_results_of_calls_find_the_calls_prefetched(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(MODEL, model, ignore=shutil.ignore_patterns("*.safetensors"))
    (model / "chat_template.jinja").write_text(HERMES)
    text = f"I look.{hermes(CALLS)}"
    found = {}
    for on in (False, True):
        async with stack(*EPD, model=ModelSource(str(model)), session_prefetch=on) as served:
            tell(served, text)
            async with client(served) as api:
                first = await api.chat.completions.create(**body(reasoning_effort="high"))
                if on:
                    await ended(served, 1)
                await served.until_idle()
                message = first.choices[0].message
                results: list[Any] = [
                    {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
                    for call in message.tool_calls
                ]
                told = [*body()["messages"], message.model_dump(exclude={"reasoning_content"})]
                second = await api.chat.completions.create(
                    **body(messages=told + results, reasoning_effort="high")
                )
            found[on] = second.usage.prompt_tokens_details.cached_tokens
            if on:
                assert prefetcher(served).outcomes[PrefetchOutcome.COMPUTED] >= 1
                assert prefetcher(served).outcomes[UNKNOWN] == 0
    assert found[True] > found[False] + 40


async def test_a_call_that_was_cut_is_counted_and_not_prefetched(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(MODEL, model, ignore=shutil.ignore_patterns("*.safetensors"))
    (model / "chat_template.jinja").write_text(HERMES)
    async with stack(*EPD, model=ModelSource(str(model)), session_prefetch=True) as served:
        tell(served, hermes(CALLS[:1]))
        async with client(served) as api:
            await api.chat.completions.create(**body(max_tokens=60))
            await ended(served, 1)
        assert prefetcher(served).outcomes[UNKNOWN] == 1


async def test_several_choices_and_completions_are_not_prefetched() -> None:
    async with stack_of("E-P-D", session_prefetch=True) as served, client(served) as api:
        body = {"model": "shapes", "messages": [ask("hello")], "max_tokens": 8}
        await api.chat.completions.create(**body, n=2)
        await api.completions.create(model="shapes", prompt="hello", max_tokens=8)
        assert not prefetcher(served)._running
        assert prefetcher(served).outcomes.total() == 0
        await api.chat.completions.create(**body)
        await ended(served, 1)


async def test_a_busy_pod_gets_no_prefetch() -> None:
    async with stack_of("E-P-D", session_prefetch=True) as served, client(served) as api:
        registry = served.gateway.context.registry
        (prefill,) = served.of(Role.PREFILL)
        with registry.use(prefill.address):
            await api.chat.completions.create(model="shapes", messages=[ask("hello")], max_tokens=8)
            await ended(served, 1)
        assert prefetcher(served).outcomes[PrefetchOutcome.BUSY] == 1


async def test_closing_ends_a_prefetch_and_the_pod_frees_it() -> None:
    async with stack_of("E-P-D", session_prefetch=True) as served, client(served) as api:
        found, (prefill,) = prefetcher(served), served.of(Role.PREFILL)
        state = prefill.components.engine._thread.state
        told = [ask("hello " * 20)]
        await api.chat.completions.create(model="shapes", messages=told, max_tokens=24)
        num_steps = prefill.runner.num_steps
        prefill.runner.gate.clear()
        try:
            async with asyncio.timeout(30):
                while prefill.runner.num_steps == num_steps:  # noqa: ASYNC110  it has no event
                    await asyncio.sleep(0.01)
            assert found._running
            await found.close()
            assert not found._running
        finally:
            prefill.runner.gate.set()
        async with asyncio.timeout(30):
            while state.sequences.pool.num_used:  # noqa: ASYNC110  it has no event
                await asyncio.sleep(0.01)


# ---- the plan ------------------------------------------------------------------------------------

BLOCK_SIZE = 4
PROMPT = tuple(range(100, 118))
ANSWER = tuple(range(200, 209))
ITEM = ImageItem(b"k" * 32, 3, 5, (1, 2, 2))


def turn(**changes: Any) -> EndedTurn:
    request = Request(
        RequestKey("r", 2), (*PROMPT, 200), len(PROMPT), SamplingParams(9), cache_salt=b"s" * 32
    )
    digests = RequestDigests.of(Prompt(PROMPT), (), salt=b"s" * 32, block_size=BLOCK_SIZE)
    ended_turn = EndedTurn(
        request,
        ANSWER,
        {"role": "assistant", "content": "text"},
        "p-0",
        b"b" * 16,
        decoded_there=False,
        next_turn=lambda _: None,
        digests=digests,
    )
    return dataclasses.replace(ended_turn, **changes)


@given(
    begun=st.lists(st.integers(0, 50), max_size=60).map(tuple),
    num_same=st.integers(0, len(PROMPT) + len(ANSWER)),
    decoded_there=st.booleans(),
)
def test_a_plan_is_made_if_a_whole_block_is_missing_and_only_then(
    begun: tuple[int, ...], num_same: int, decoded_there: bool
) -> None:
    tokens = (*(*PROMPT, *ANSWER)[:num_same], *begun)
    planned = plan(turn(decoded_there=decoded_there), Prompt(tokens), max_model_len=4096)
    held = (*PROMPT, *ANSWER[:-1]) if decoded_there else PROMPT
    num_blocks = len(tokens) // BLOCK_SIZE
    whole = tokens[: num_blocks * BLOCK_SIZE]
    if held[: len(whole)] == whole:
        assert planned == PrefetchOutcome.CACHED
        return
    assert isinstance(planned, Request)
    assert planned.token_ids == tokens
    assert planned.num_delivered_tokens == 0
    assert planned.cache_salt == b"s" * 32, "the tenant's own: nobody else finds it"
    assert planned.key != turn().request.key


def test_no_plan_without_a_beginning_beyond_the_context_or_with_other_images() -> None:
    long = Prompt(tuple(range(64)))
    assert plan(turn(), None, max_model_len=4096) == UNKNOWN
    assert plan(turn(), long, max_model_len=64) == TOO_LONG
    assert isinstance(plan(turn(), long, max_model_len=65), Request)
    with_image = dataclasses.replace(turn().request, items=(ITEM,))
    assert plan(turn(request=with_image), long, max_model_len=4096) == UNKNOWN
    other = Prompt(tuple(range(64)), (3,), (6,))
    assert plan(turn(request=with_image), other, max_model_len=4096) == UNKNOWN
    moved = Prompt(tuple(range(64)), (7,), (5,))
    planned = plan(turn(request=with_image), moved, max_model_len=4096)
    assert isinstance(planned, Request)
    assert planned.items == (dataclasses.replace(ITEM, offset=7),)


async def test_outcomes_are_exported_if_it_is_on_and_only_then() -> None:
    name = "triptych_session_prefetches_total"
    async with stack_of("colocated") as served, httpx.AsyncClient() as http:
        assert name not in (await http.get(f"{served.gateway.admin_url}/metrics")).text
    on = stack_of("colocated", session_prefetch=True)
    async with on as served, httpx.AsyncClient() as http:
        page = (await http.get(f"{served.gateway.admin_url}/metrics")).text
    assert all(f'{name}{{outcome="{outcome}"}} 0.0' in page for outcome in OUTCOMES)
