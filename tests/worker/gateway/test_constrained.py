"""Constrained answers through real workers, as the openai client reads them."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import jsonschema
import openai
import pytest
from worker.gateway.image_files import ask, png
from worker.gateway.stack import E_PD, EPD, ONE_PROCESS, P, Stack, client, stack, stack_of

from vlm_worker.engine.events import EventStream, PrefillEvent
from vlm_worker.errors import PeerLostError
from vlm_worker.roles import decode
from vlm_worker.types import FinishReason, Role, Stage
from vlm_worker.wire.messages import Finished, Tokens

SCHEMA = {
    "type": "object",
    "properties": {
        "color": {"enum": ["red", "blue"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "words": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 3},
    },
    "required": ["color", "count", "words"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}
TWO_DECODE = (*EPD, (Role.DECODE, (Stage.DECODE,)))


@pytest.fixture(params=["E-P-D", "E-PD", ONE_PROCESS])
async def served(request: pytest.FixtureRequest) -> AsyncIterator[Stack]:
    async with stack_of(request.param) as one:
        yield one
        await one.until_idle()


def body(**changes: Any) -> dict[str, Any]:
    return {
        "model": "shapes",
        "messages": [ask(png(), "What is this?")],
        "max_tokens": 400,
        "temperature": 1.0,
        "seed": 7,
        "response_format": FORMAT,
        **changes,
    }


def check(text: str | None) -> None:
    jsonschema.validate(json.loads(text or ""), SCHEMA)


async def test_each_choice_is_a_value_of_the_schema_whole_and_in_a_stream(served: Stack) -> None:
    async with client(served) as api:
        whole = await api.chat.completions.create(**body(n=3))
        pieces: dict[int, str] = {}
        async for chunk in await api.chat.completions.create(**body(n=3, stream=True)):
            for choice in chunk.choices:
                piece = choice.delta.content or ""
                pieces[choice.index] = pieces.get(choice.index, "") + piece
    for choice in whole.choices:
        assert choice.finish_reason == "stop"
        check(choice.message.content)
        assert pieces[choice.index] == choice.message.content
    assert len({choice.message.content for choice in whole.choices}) > 1


async def test_an_answer_that_is_cut_has_its_reason() -> None:
    async with stack(*EPD) as served, client(served) as api:
        whole = await api.chat.completions.create(**body())
        cut = await api.chat.completions.create(**body(max_tokens=5))
        stopped = await api.chat.completions.create(**body(stop='"count"'))
        anything = {"type": "json_object"}
        json_object = await api.chat.completions.create(
            **body(response_format=anything, max_tokens=60)
        )
        await served.until_idle()
    text = whole.choices[0].message.content or ""
    assert cut.choices[0].finish_reason == "length"
    assert text.startswith(cut.choices[0].message.content or "")
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].message.content == text.partition('"count"')[0]
    assert (json_object.choices[0].message.content or "").startswith("{")


@pytest.mark.parametrize("after", [1, 4])
async def test_an_answer_continues_identically_if_its_decode_pod_is_lost(after: int) -> None:
    async with stack(*TWO_DECODE) as served, client(served) as api:
        whole = await api.chat.completions.create(**body())
        for worker in served.of(Role.DECODE):
            worker.runner.faults.step_seconds = 0.01
        text, victim = "", None
        chunks = 0
        async for chunk in await api.chat.completions.create(**body(stream=True)):
            text += chunk.choices[0].delta.content or "" if chunk.choices else ""
            chunks += 1
            if chunks == after + 1 and victim is None:
                (victim,) = [w for w in served.of(Role.DECODE) if w.num_held]
                await victim.kill()
        assert victim is not None
        assert text == whole.choices[0].message.content
        check(text)
        await served.until_idle()


@pytest.mark.parametrize("pods", [TWO_DECODE, (*E_PD, E_PD[1])])
async def test_an_answer_stops_if_its_pod_is_lost_between_its_last_token_and_its_end(
    pods: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[Finished] = []
    real = decode.answer_of

    async def answer_of(stream: EventStream[PrefillEvent]) -> AsyncGenerator[Tokens | Finished]:
        async for event in real(stream):
            if isinstance(event, Finished) and not lost:
                lost.append(event)
                raise PeerLostError("the pod is lost before it says that the answer has ended")
            yield event

    async with stack(*pods) as served, client(served) as api:
        whole = await api.chat.completions.create(**body())
        monkeypatch.setattr(decode, "answer_of", answer_of)
        again = await api.chat.completions.create(**body())
        await served.until_idle()
    assert [finished.reason for finished in lost] == [FinishReason.STOP]
    assert again.choices[0].finish_reason == whole.choices[0].finish_reason == "stop"
    assert again.choices[0].message.content == whole.choices[0].message.content
    assert again.usage is not None
    assert whole.usage is not None
    assert again.usage.completion_tokens == whole.usage.completion_tokens


async def test_a_refused_schema_names_its_keyword_and_reaches_no_worker() -> None:
    schema = {"type": "object", "properties": {"a": {"not": {"type": "null"}}}}
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    async with stack(*E_PD) as served, client(served) as api:
        with pytest.raises(openai.BadRequestError) as refused:
            await api.chat.completions.create(**body(response_format=named))
        assert all(worker.num_held == 0 for worker in served.workers)
    assert refused.value.code == "invalid_json_schema"
    assert refused.value.param == "response_format.json_schema.schema.properties.a.not"


async def test_a_worker_that_knows_no_grammars_gets_no_constrained_request() -> None:
    """A worker of an older version sends a Hello without `grammars`."""
    async with (
        stack((Role.DECODE, (*E_PD[0][1], P, Stage.DECODE))) as served,
        client(served) as api,
    ):
        served.forget("grammars")
        with pytest.raises(openai.InternalServerError, match="constrains answers") as refused:
            await api.chat.completions.create(**body())
        assert refused.value.status_code == 503
        free = await api.chat.completions.create(**body(response_format=None, max_tokens=3))
        assert free.choices[0].finish_reason == "length"
