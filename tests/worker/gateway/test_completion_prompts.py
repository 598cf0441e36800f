"""Several prompts, token ids and echo, through real workers, as the openai client reads them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from worker.gateway.stack import ONE_PROCESS, Stack, client, gateway_settings, serving, stack_of

from vlm_worker.types import Role

PROMPTS = ["a red circle", "two blue squares and", "the"]


@pytest.fixture(params=["P-D", ONE_PROCESS])
async def served(request: pytest.FixtureRequest) -> AsyncIterator[Stack]:
    async with stack_of(request.param) as one:
        yield one
        await one.until_idle()


def body(prompt: Any, **changes: Any) -> dict[str, Any]:
    common = {"model": "shapes", "max_tokens": 6, "temperature": 1.0, "seed": 7}
    return {**common, "prompt": prompt, **changes}


async def streamed(api: openai.AsyncOpenAI, prompt: Any, **changes: Any) -> dict[int, list[Any]]:
    """The choices of all chunks, by index."""
    found: dict[int, list[Any]] = {}
    async for chunk in await api.completions.create(**body(prompt, stream=True, **changes)):
        for choice in chunk.choices:
            found.setdefault(choice.index, []).append(choice)
    return found


async def test_together_equals_alone_in_the_order_of_the_prompts(served: Stack) -> None:
    async with client(served) as api:
        alone = [await api.completions.create(**body(prompt, n=2)) for prompt in PROMPTS]
        whole = await api.completions.create(**body(PROMPTS, n=2))
        found = await streamed(api, PROMPTS, n=2)
    texts = [choice.text for one in alone for choice in one.choices]
    assert len(set(texts)) == len(texts) == 6
    assert [choice.index for choice in whole.choices] == list(range(6))
    assert [choice.text for choice in whole.choices] == texts
    assert ["".join(c.text for c in found[index]) for index in range(6)] == texts
    assert [found[index][-1].finish_reason for index in range(6)] == ["length"] * 6
    assert whole.usage.prompt_tokens == sum(one.usage.prompt_tokens for one in alone)
    assert whole.usage.completion_tokens == 36
    assert whole.model_extra["timing"]["ttft_ms"] > 0


async def test_ids_of_a_text_have_its_answer(served: Stack) -> None:
    builder = served.gateway.context.prompt_builder
    ids = [list(builder.completion(prompt).token_ids) for prompt in PROMPTS]
    async with client(served) as api:
        by_text = await api.completions.create(**body(PROMPTS))
        by_ids = await api.completions.create(**body(ids))
        one = await api.completions.create(**body(ids[0]))
        mixed = await api.completions.create(**body([ids[0], PROMPTS[1]]))
    texts = [choice.text for choice in by_text.choices]
    assert [choice.text for choice in by_ids.choices] == texts
    assert by_ids.usage.prompt_tokens == by_text.usage.prompt_tokens
    assert [choice.text for choice in one.choices] == texts[:1]
    assert [choice.text for choice in mixed.choices] == texts[:2]


async def test_an_echo_precedes_each_answer_and_changes_nothing_else(served: Stack) -> None:
    ids = list(served.gateway.context.prompt_builder.completion("three <|im_end|>").token_ids)
    shown = served.gateway.context.prompt_builder.text_of(ids)
    prompts = [*PROMPTS, ids]
    stop = PROMPTS[0][2:5]
    async with client(served) as api:
        plain = await api.completions.create(**body(prompts, n=2, stop=[stop]))
        whole = await api.completions.create(**body(prompts, n=2, stop=[stop], echo=True))
        found = await streamed(api, prompts, n=2, stop=[stop], echo=True)
    texts = [
        prompt + plain.choices[2 * number + choice].text
        for number, prompt in enumerate([*PROMPTS, shown])
        for choice in range(2)
    ]
    assert [choice.text for choice in whole.choices] == texts
    assert ["".join(c.text for c in found[index]) for index in range(8)] == texts
    assert whole.usage.completion_tokens == plain.usage.completion_tokens
    assert whole.usage.prompt_tokens == plain.usage.prompt_tokens


async def test_a_failure_of_one_prompt_is_the_answer_s_one_error(served: Stack) -> None:
    runners = [worker.runner for worker in served.of(Role.PREFILL) or served.of(Role.DECODE)]
    async with client(served) as api:
        request = body(PROMPTS, n=2, max_tokens=200, stream=True)
        chunks = await api.completions.create(**request, extra_body={"ignore_eos": True})
        await anext(chunks)
        for runner in [*runners, *(worker.runner for worker in served.of(Role.DECODE))]:
            runner.faults.crash_steps = 10**6
        with pytest.raises(openai.APIError) as failed:
            async for _ in chunks:
                pass
    assert failed.value.code == "internal_error"
    assert served.gateway.context.num_inflight == 0
    for worker in served.workers:
        worker.runner.faults.crash_steps = 0


async def test_a_client_that_leaves_cancels_all_prompts(served: Stack) -> None:
    async with httpx.AsyncClient(base_url=served.url, timeout=60) as http:
        request = body(PROMPTS, max_tokens=2000, stream=True, ignore_eos=True)
        async with http.stream("POST", "/v1/completions", json=request) as answer:
            seen: set[str] = set()
            async for line in answer.aiter_lines():
                seen.update(index for index in "012" if f'"index":{index}' in line)
                if len(seen) == 3:
                    break
    async with asyncio.timeout(60):
        await served.gateway.context.idle.wait()
    assert served.gateway.context.retry_policy.request_limit.num_waiting == 0
    # the fixture waits until every worker has given everything back


async def test_more_prompts_than_may_wait_are_refused_for_good() -> None:
    async with (
        serving(gateway_settings([], max_waiting=2)) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=30) as http,
    ):
        refused = await http.post("/v1/completions", json=body(PROMPTS))
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")
        assert gateway.context.retry_policy.request_limit.num_waiting == 0
        assert (await http.post("/v1/completions", json=body(PROMPTS[:2]))).status_code == 503


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": []}, "invalid_value", "prompt"),
    ({"prompt": [[]]}, "invalid_value", "prompt[0]"),
    ({"prompt": ["a", ""]}, "invalid_value", "prompt[1]"),
    ({"prompt": ["a", 3]}, "invalid_type", "prompt[1]"),
    ({"prompt": [True]}, "invalid_type", "prompt[0]"),
    ({"prompt": [[1], [1, -1]]}, "invalid_value", "prompt[1][1]"),
    ({"prompt": [[1], [2, 10**6]]}, "invalid_value", "prompt[1][1]"),
    ({"prompt": ["a", "b " * 9000]}, "context_length_exceeded", "prompt[1]"),
    ({"prompt": [["a"]]}, "invalid_type", "prompt[0][0]"),
    ({"prompt": ["a" * 3000] * 16, "echo": True, "n": 8, "max_tokens": 1}, "invalid_value", "echo"),
    ({"prompt": "a", "max_tokens": 10**400}, "invalid_value", "max_tokens"),
    ({"prompt": "a", "seed": -(10**400)}, "invalid_value", "seed"),
    ({"prompt": "a", "logit_bias": {"1": 10**400}}, "invalid_value", "logit_bias"),
]


async def test_what_is_wrong_is_named() -> None:
    async with (
        serving(gateway_settings([])) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=30) as http,
    ):
        image = gateway.context.prompt_builder.family.image_token_id
        images = ({"prompt": [image + 1, image]}, "invalid_value", "prompt[1]")
        for fields, code, param in [*REFUSED, images]:
            answer = await http.post("/v1/completions", json={"model": "shapes", **fields})
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["param"]) == (400, code, param), error
