"""Several choices and log-probabilities, through real workers, as the openai client reads them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from worker.gateway.image_files import ask, png
from worker.gateway.stack import EPD, ONE_PROCESS, TOPOLOGIES, Stack, client, stack, stack_of

from vlm_worker.gateway.choices import request_of_choice
from vlm_worker.gateway.orchestrate.prepared_request import PreparedRequest
from vlm_worker.gateway.pod_caches import RequestDigests
from vlm_worker.gateway.prompts import Prompt
from vlm_worker.testing import token_logprobs
from vlm_worker.types import Role, SamplingParams


@pytest.fixture(params=["E-P-D", "colocated", ONE_PROCESS])
async def served(request: pytest.FixtureRequest) -> AsyncIterator[Stack]:
    async with stack_of(request.param) as one:
        yield one
        await one.until_idle()


def body(**changes: Any) -> dict[str, Any]:
    return {
        "model": "shapes",
        "messages": [ask(png(), "What is this?")],
        "max_tokens": 10,
        "temperature": 1.0,
        "seed": 7,
        **changes,
    }


async def streamed(api: openai.AsyncOpenAI, **changes: Any) -> dict[int, list[Any]]:
    """The choices of all chunks, by index."""
    found: dict[int, list[Any]] = {}
    async for chunk in await api.chat.completions.create(**body(stream=True, **changes)):
        for choice in chunk.choices:
            found.setdefault(choice.index, []).append(choice)
    return found


async def read_to_the_end(chunks: AsyncIterator[Any]) -> None:
    async for _ in chunks:
        pass


async def test_n_choices_come_whole_and_in_a_stream_and_count_once(served: Stack) -> None:
    async with client(served) as api:
        whole = await api.chat.completions.create(**body(n=3))
        found = await streamed(api, n=3)
        alone = await api.chat.completions.create(**body())
    texts = [choice.message.content for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert texts[0] == alone.choices[0].message.content
    assert whole.usage.completion_tokens == 30
    assert whole.usage.prompt_tokens == alone.usage.prompt_tokens
    for index, text in enumerate(texts):
        chunks = found[index]
        assert "".join(c.delta.content or "" for c in chunks) == text
        assert [c.delta.role for c in chunks] == ["assistant", *[None] * (len(chunks) - 1)]
        assert [c.finish_reason for c in chunks] == [*[None] * (len(chunks) - 1), "length"]


async def test_the_images_of_all_choices_are_encoded_once_and_the_prompt_is_cached(
    served: Stack,
) -> None:
    async with client(served) as api:
        await api.chat.completions.create(**body(n=4))
    encoders = [w for w in served.workers if sum(w.runner.batch_sizes)]
    assert [sum(w.runner.batch_sizes) for w in encoders] == [1]
    engines = [w.components.engine.stats() for w in served.workers]
    assert sum(stats.count("prefix_cache_hits") for stats in engines) > 0


async def test_a_failure_of_one_choice_is_the_answer_s_one_error(served: Stack) -> None:
    prefill = served.of(Role.PREFILL) or served.of(Role.DECODE)
    context = served.gateway.context
    async with client(served) as api:
        chunks = await api.chat.completions.create(**body(n=3, max_tokens=200, stream=True))
        assert (await anext(chunks)).choices[0].index == 0
        for worker in prefill:
            worker.runner.faults.crash_steps = 10**6
        with pytest.raises(openai.APIError) as failed:
            await read_to_the_end(chunks)
    assert failed.value.code == "internal_error"
    assert context.num_inflight == 0
    for worker in prefill:
        worker.runner.faults.crash_steps = 0


async def test_a_client_that_leaves_cancels_all_choices(served: Stack) -> None:
    async with httpx.AsyncClient(base_url=served.url, timeout=60) as http:
        request = body(n=4, max_tokens=2000, stream=True, ignore_eos=True)
        async with http.stream("POST", "/v1/chat/completions", json=request) as answer:
            seen: set[str] = set()
            async for line in answer.aiter_lines():
                seen.update(index for index in "0123" if f'"index":{index}' in line)
                if len(seen) == 4:
                    break
    async with asyncio.timeout(60):
        await served.gateway.context.idle.wait()
    # the fixture waits until every worker has given everything back


async def test_log_probabilities_are_the_model_s_token_by_token(served: Stack) -> None:
    texts = served.gateway.context.prompt_builder.token_texts
    async with client(served) as api:
        whole = await api.chat.completions.create(**body(logprobs=True, top_logprobs=2))
        found = await streamed(api, logprobs=True, top_logprobs=2)
        bare = await api.chat.completions.create(**body(logprobs=True))
        none = await api.chat.completions.create(**body())
    content = whole.choices[0].logprobs.content
    assert content
    for token in content:
        # the token itself is the likeliest here, and its number says how likely
        assert token.top_logprobs[0].token == token.token
        assert token.top_logprobs[0].logprob == token.logprob
        assert len(token.top_logprobs) == 2
        assert bytes(token.bytes).decode(errors="backslashreplace") == token.token
        same = [i for i in range(666) if texts.of(i) == (token.token, bytes(token.bytes))]
        assert token.logprob in {token_logprobs(i, 0).logprob for i in same}
    pieces = [c.logprobs.content for c in found[0] if c.logprobs is not None]
    assert [token for piece in pieces for token in piece] == content
    assert [t.logprob for t in bare.choices[0].logprobs.content] == [t.logprob for t in content]
    assert bare.choices[0].logprobs.content[0].top_logprobs == []
    assert none.choices[0].logprobs is None


async def test_log_probabilities_end_where_a_stop_string_cuts(served: Stack) -> None:
    async with client(served) as api:
        whole = (await api.chat.completions.create(**body(logprobs=True, max_tokens=40))).choices[0]
        text = whole.message.content
        stop = text[len(text) // 2 : len(text) // 2 + 5]
        cut = await api.chat.completions.create(**body(logprobs=True, max_tokens=40, stop=[stop]))
        (choice,) = cut.choices
    assert choice.message.content == text[: text.index(stop)]
    told = choice.logprobs.content
    assert told == whole.logprobs.content[: len(told)]
    assert 0 < len(told) < len(whole.logprobs.content)


async def test_completions_have_log_probabilities_of_their_own_form(served: Stack) -> None:
    async with client(served) as api:
        whole = await api.completions.create(model="shapes", prompt="red circle", logprobs=2, n=2)
    assert [choice.index for choice in whole.choices] == [0, 1]
    for choice in whole.choices:
        told = choice.logprobs
        sizes = {len(told.tokens), len(told.token_logprobs), len(told.top_logprobs),
                 len(told.text_offset)}  # fmt: skip
        assert len(sizes) == 1
        assert told.text_offset[0] == 0
        for token, logprob, top in zip(
            told.tokens, told.token_logprobs, told.top_logprobs, strict=True
        ):
            assert top[token] == logprob


async def test_what_a_client_may_ask_beyond_openai_reaches_the_engine(served: Stack) -> None:
    """Penalties and biases change the checksum that this model answers with; priorities do not."""
    async with client(served) as api:

        async def text(extra: dict[str, Any], **changes: Any) -> str:
            answer = await api.chat.completions.create(**body(**changes), extra_body=extra)
            return str(answer.choices[0].message.content)

        plain = await text({})
        assert await text({"priority": 3, "top_k": 5, "min_p": 0.5, "ignore_eos": True}) == plain
        edited = [
            await text({"repetition_penalty": 1.5}),
            await text({}, frequency_penalty=0.5),
            await text({}, presence_penalty=0.5),
            await text({}, logit_bias={"7": 5}),
        ]
        assert len({plain, *edited}) == 5
        assert await text({}, frequency_penalty=0.5) == edited[1]


async def test_every_topology_draws_and_tells_the_same() -> None:
    said = []
    for name in (*TOPOLOGIES, ONE_PROCESS):
        async with stack_of(name) as served, client(served) as api:
            answer = await api.chat.completions.create(
                **body(n=2, logprobs=True, top_logprobs=1, presence_penalty=0.5),
                extra_body={"repetition_penalty": 1.2},
            )
            said.append([choice.model_dump() for choice in answer.choices])
    assert all(one == said[0] for one in said)


def test_the_choices_of_a_request_have_ids_and_seeds_of_their_own() -> None:
    prompt = Prompt((1,))
    digests = RequestDigests.of(prompt, (), salt=b"", block_size=4)
    prepared = PreparedRequest(
        "r", (), lambda _: prompt, SamplingParams(5, seed=9), b"", False, 0.0, digests
    )
    jobs = [request_of_choice(prepared, index) for index in range(8)]
    assert jobs[0] is prepared
    assert len({one.request_id for one in jobs}) == 8
    assert len({one.sampling.seed for one in jobs}) == 8
    assert jobs == [request_of_choice(prepared, index) for index in range(8)]


async def test_a_continued_answer_repeats_no_token_and_no_log_probability(
    caplog: pytest.LogCaptureFixture,
) -> None:
    request = body(max_tokens=60, logprobs=True, frequency_penalty=0.5)
    async with stack(*EPD, EPD[2]) as served, client(served) as api:
        whole = (await api.chat.completions.create(**request)).choices[0]
        for worker in served.of(Role.DECODE):
            worker.runner.faults.step_seconds = 0.005
        content, text = [], ""
        async for chunk in await api.chat.completions.create(**request, stream=True):
            for choice in chunk.choices:
                text += choice.delta.content or ""
                content += choice.logprobs.content if choice.logprobs else []
            busy = [w for w in served.of(Role.DECODE) if w.alive and w.num_held]
            if len(content) > 20 and "attempt lost" not in caplog.messages:
                for worker in busy:
                    await worker.kill()
        assert caplog.messages.count("attempt lost") == 1
    assert text == whole.message.content
    assert content == whole.logprobs.content
