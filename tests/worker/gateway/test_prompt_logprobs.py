"""Log-probabilities of prompts through real workers: `echo` with `logprobs`, `prompt_logprobs`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from worker.gateway.stack import (
    E_PD,
    EPD,
    ONE_PROCESS,
    P_D,
    Stack,
    client,
    gateway_settings,
    serving,
    stack,
    stack_of,
)

from vlm_worker.gateway.echo import LONG_VALUES, SLICE
from vlm_worker.types import Role, Stage

PROMPT = "two blue squares and a red circle"


@pytest.fixture(params=["E-P-D", ONE_PROCESS])
async def served(request: pytest.FixtureRequest) -> AsyncIterator[Stack]:
    async with stack_of(request.param) as one:
        yield one
        await one.until_idle()


def body(prompt: Any = PROMPT, **changes: Any) -> dict[str, Any]:
    common = {"model": "shapes", "max_tokens": 6, "temperature": 1.0, "seed": 7, "logprobs": 2}
    return {**common, "prompt": prompt, "echo": True, **changes}


def ids_of(served: Stack, prompt: str = PROMPT) -> list[int]:
    return list(served.gateway.context.prompt_builder.completion(prompt).token_ids)


async def test_an_echo_has_the_log_probabilities_of_prompt_and_answer(served: Stack) -> None:
    num_prompt = len(ids_of(served))
    async with client(served) as api:
        (plain,) = (await api.completions.create(**body(echo=False))).choices
        whole = await api.completions.create(**body())
        again = await api.completions.create(**body())
        streamed = [
            chunk.choices[0]
            async for chunk in await api.completions.create(**body(stream=True))
            if chunk.choices
        ]
    (choice,) = whole.choices
    shown = choice.logprobs
    assert choice.text == PROMPT + plain.text
    assert len(shown.tokens) == num_prompt + whole.usage.completion_tokens
    assert whole.usage.prompt_tokens == num_prompt
    assert shown.token_logprobs[0] is None
    assert shown.top_logprobs[0] is None
    assert all(value <= 0 for value in shown.token_logprobs[1:])
    for token, value, top in list(
        zip(shown.tokens, shown.token_logprobs, shown.top_logprobs, strict=True)
    )[1:]:
        assert top[token] == value
    assert "".join(shown.tokens[:num_prompt]).endswith(PROMPT[1:])
    offsets = shown.text_offset
    assert offsets == sorted(offsets)
    assert offsets[0] == 0
    assert max(offsets[:num_prompt]) < len(PROMPT) <= offsets[num_prompt]
    for token, offset in zip(plain.logprobs.tokens, plain.logprobs.text_offset, strict=True):
        assert (token, offset + len(PROMPT)) in zip(shown.tokens, offsets, strict=True)
    assert again.choices[0].logprobs == shown, "a cached prompt gives the same"
    assert "".join(one.text for one in streamed) == choice.text
    parts = [one.logprobs for one in streamed if one.logprobs is not None]
    assert [token for part in parts for token in part.tokens] == shown.tokens
    assert [value for part in parts for value in part.token_logprobs] == shown.token_logprobs
    assert [offset for part in parts for offset in part.text_offset] == offsets


async def test_the_values_of_a_prompt_are_those_of_its_beginnings(served: Stack) -> None:
    """They depend on the tokens before alone, as in several prompts of one request."""
    ids = ids_of(served)
    prompts = [ids[:count] for count in range(1, len(ids) + 1)][-16:]
    async with client(served) as api:
        together = await api.completions.create(**body(prompts, max_tokens=1))
        (alone,) = (await api.completions.create(**body(ids, max_tokens=1))).choices
    whole = alone.logprobs.token_logprobs
    for prompt, choice in zip(prompts, together.choices, strict=True):
        found = choice.logprobs.token_logprobs
        assert len(found) == len(prompt) + 1, "lm-eval leaves out the last one, of the answer"
        assert found[: len(prompt)] == whole[: len(prompt)]


async def test_no_answer_is_the_prompt_alone(served: Stack) -> None:
    async with client(served) as api:
        some = await api.completions.create(**body(max_tokens=1))
        none = await api.completions.create(**body(max_tokens=0, n=2))
        text = await api.completions.create(**body(max_tokens=0, logprobs=None, stop=[PROMPT[3:6]]))
    num_prompt = len(ids_of(served))
    for choice in none.choices:
        assert (choice.text, choice.finish_reason) == (PROMPT, "length")
        shown = choice.logprobs
        assert shown.token_logprobs == some.choices[0].logprobs.token_logprobs[:num_prompt]
        assert shown.tokens == some.choices[0].logprobs.tokens[:num_prompt]
    assert none.usage.completion_tokens == 0
    assert text.choices[0].text == PROMPT
    assert text.choices[0].logprobs is None


async def test_the_length_of_answers_is_not_learned_from_a_request_without_one(
    served: Stack,
) -> None:
    context = served.gateway.context
    before, lengths = context.work.num_output_tokens, []
    async with client(served) as api:
        for max_tokens in (0, 1):
            await api.completions.create(**body(max_tokens=max_tokens))
            await context.idle.wait()  # a request ends after its client has the last byte
            lengths.append(context.work.num_output_tokens)
    assert lengths[1] < lengths[0] == before


async def test_all_choices_have_the_values_of_their_prompt(served: Stack) -> None:
    prompts = [PROMPT, "the"]
    async with client(served) as api:
        alone = [await api.completions.create(**body(one, n=3)) for one in prompts]
        whole = await api.completions.create(**body(prompts, n=3))
    texts = [choice.text for one in alone for choice in one.choices]
    assert [choice.text for choice in whole.choices] == texts
    assert len(set(texts)) == 6
    for number, prompt in enumerate(prompts):
        count = len(ids_of(served, prompt))
        values = [one.logprobs.token_logprobs[:count] for one in whole.choices[3 * number :][:3]]
        assert values == [alone[number].choices[0].logprobs.token_logprobs[:count]] * 3


async def test_prompt_logprobs_are_in_the_form_of_vllm(served: Stack) -> None:
    ids = ids_of(served)
    extra = {"extra_body": {"prompt_logprobs": 1}}
    async with client(served) as api:
        answer = await api.completions.create(**body(echo=False, logprobs=None, n=2, **extra))
        plain = await api.completions.create(**body(echo=False, logprobs=None, n=2))
        echoed = await api.completions.create(**body(max_tokens=1))
    for choice, other in zip(answer.choices, plain.choices, strict=True):
        assert choice.text == other.text
        assert choice.logprobs is None
        assert "prompt_logprobs" not in other.model_extra
        shown = choice.model_extra["prompt_logprobs"]
        assert len(shown) == len(ids)
        assert shown[0] is None
        pairs = zip(ids[1:], shown[1:], strict=True)
        values = [None, *(one[str(token_id)]["logprob"] for token_id, one in pairs)]
        assert values == echoed.choices[0].logprobs.token_logprobs[: len(ids)]
        likely = [value for one in shown[1:] for value in one.values()]
        assert all(set(value) == {"logprob", "rank", "decoded_token"} for value in likely)
        assert all(value["rank"] >= 1 for value in likely)


async def test_a_long_prompt_has_the_form_of_a_short_one(served: Stack) -> None:
    prompt = " ".join([PROMPT] * 30)
    count = len(ids_of(served, prompt))
    assert count * 21 > LONG_VALUES
    extra = {"extra_body": {"prompt_logprobs": 20}}
    async with client(served) as api:
        few = await api.completions.create(**body(prompt, max_tokens=0, logprobs=0))
        many = await api.completions.create(**body(prompt, max_tokens=0, logprobs=20, **extra))
        streamed = [
            chunk.choices[0]
            async for chunk in await api.completions.create(
                **body(prompt, max_tokens=0, logprobs=20, stream=True)
            )
        ]
    (short,), (long,) = few.choices, many.choices
    parts = [one.logprobs for one in streamed if one.logprobs is not None]
    assert len(parts) > count // SLICE > 1
    assert "".join(one.text for one in streamed) == prompt
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [one for part in parts for one in getattr(part, name)] == getattr(
            long.logprobs, name
        )
    assert (long.text, short.text) == (prompt, prompt)
    assert len(long.logprobs.tokens) == count == len(long.model_extra["prompt_logprobs"])
    assert long.logprobs.token_logprobs == short.logprobs.token_logprobs
    assert long.logprobs.text_offset == short.logprobs.text_offset
    assert long.logprobs.text_offset[-1] < len(prompt)


@pytest.mark.parametrize("num_chunks", [2, 4])
async def test_they_come_once_if_the_decode_pod_is_lost(num_chunks: int) -> None:
    async with stack(*EPD, (Role.DECODE, (Stage.DECODE,))) as served, client(served) as api:
        asked = body(max_tokens=20, extra_body={"ignore_eos": True})
        (whole,) = (await api.completions.create(**asked)).choices
        for worker in served.of(Role.DECODE):
            worker.runner.faults.step_seconds = 0.05
        victim, chunks = None, []
        async for chunk in await api.completions.create(**asked, stream=True):
            chunks += chunk.choices
            if len(chunks) == num_chunks:
                (victim,) = [w for w in served.of(Role.DECODE) if w.num_held]
                await victim.kill()
        assert victim is not None
        tokens = [token for one in chunks if one.logprobs for token in one.logprobs.tokens]
        assert tokens == whole.logprobs.tokens
        assert "".join(one.text for one in chunks) == whole.text
        await served.until_idle()


async def test_they_come_once_if_the_prefill_pod_fails_while_it_computes_them() -> None:
    async with stack(*P_D, P_D[0]) as served, client(served) as api:
        (whole,) = (await api.completions.create(**body())).choices
        crashed = 0
        for worker in served.of(Role.PREFILL):
            worker.runner.faults.crash_steps = 1
            (again,) = (await api.completions.create(**body())).choices
            assert again.logprobs == whole.logprobs
            crashed += worker.runner.faults.crash_steps == 0
            worker.runner.faults.crash_steps = 0
        assert crashed > 0
        await served.until_idle()


async def test_a_worker_that_knows_none_gets_no_request_for_them() -> None:
    """A worker of an older version sends a Hello without `prompt_logprobs`."""
    async with stack(*E_PD) as served, client(served) as api:
        served.forget("prompt_logprobs")
        for asked in (body(), body(max_tokens=1)):
            with pytest.raises(openai.InternalServerError, match="log-probabilities") as refused:
                await api.completions.create(**asked)
            assert refused.value.status_code == 503
        assert (await api.completions.create(**body(echo=False))).choices[0].text


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"max_tokens": 0, "echo": False}, "invalid_value", "max_tokens"),
    ({"max_tokens": 0, "min_tokens": 1}, "invalid_value", "min_tokens"),
    ({"max_tokens": -1}, "invalid_value", "max_tokens"),
    ({"prompt_logprobs": 21}, "invalid_value", "prompt_logprobs"),
    ({"prompt_logprobs": -1}, "invalid_value", "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "invalid_value", "prompt_logprobs"),
    ({"logprobs": 21}, "invalid_value", "logprobs"),
    ({"prompt": ["x y " * 300] * 16, "logprobs": 20, "n": 2}, "invalid_value", "logprobs"),
    (
        {"prompt": ["x y " * 300] * 16, "echo": False, "prompt_logprobs": 20, "n": 2},
        "invalid_value",
        "prompt_logprobs",
    ),
]


async def test_what_is_wrong_is_named() -> None:
    async with (
        serving(gateway_settings([])) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=30) as http,
    ):
        for fields, code, param in REFUSED:
            answer = await http.post("/v1/completions", json=body(**fields))
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["param"]) == (400, code, param), error
        messages = [{"role": "user", "content": "hi"}]
        chat = {"model": "shapes", "messages": messages, "prompt_logprobs": 1}
        error = (await http.post("/v1/chat/completions", json=chat)).json()["error"]
        assert (error["code"], error["param"]) == ("unsupported_parameter", "prompt_logprobs")
