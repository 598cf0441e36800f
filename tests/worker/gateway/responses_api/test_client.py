"""The unmodified openai client's `responses` against a gateway and real workers."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import random
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
import openai
import pydantic
import pytest
from PIL import Image
from tokenizers import Tokenizer
from worker.gateway.image_files import ask, broken_inside, data_url, png
from worker.gateway.responding.templates import HERMES
from worker.gateway.responding.written import CALLS, TOOLS, hermes
from worker.gateway.responses_api.folding import response_of, told, valid_response
from worker.gateway.stack import EPD, MODEL, ONE_PROCESS, Stack, client, stack, stack_of

from vlm_worker.gateway import endpoint
from vlm_worker.gateway.api.errors import ApiError
from vlm_worker.gateway.body import read_json
from vlm_worker.gateway.memory import Kind
from vlm_worker.gateway.turns import at_once
from vlm_worker.settings import ModelSource
from vlm_worker.types import Role

TOKENIZER = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
END = "###"
"""The runner of the tests has no token that ends an answer."""
FLAT = [{"type": "function", "name": n, "parameters": schema} for n, schema in TOOLS.items()]
LOGPROBS = "message.output_text.logprobs"


@pytest.fixture(params=["E-P-D", ONE_PROCESS])
async def served(request: pytest.FixtureRequest) -> AsyncIterator[Stack]:
    async with stack_of(request.param) as one:
        yield one
        await one.until_idle()


@pytest.fixture
async def talking(tmp_path: Path) -> AsyncIterator[Stack]:
    """A model that reasons and calls tools, and answers what `tell` tells it."""
    model = tmp_path / "model"
    shutil.copytree(MODEL, model, ignore=shutil.ignore_patterns("*.safetensors"))
    (model / "chat_template.jinja").write_text(HERMES)
    async with stack(*EPD, model=ModelSource(str(model))) as one:
        yield one
        await one.until_idle()


def tell(stack: Stack, text: str) -> None:
    """Let every answer be this text."""
    script = TOKENIZER.encode(text + END, add_special_tokens=False).ids
    for worker in stack.of(Role.PREFILL) + stack.of(Role.DECODE):
        worker.runner.script = script


def noise() -> bytes:
    """An image whose data URL is long."""
    image = Image.frombytes("RGB", (112, 84), random.Random(7).randbytes(112 * 84 * 3))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def user(*contents: str | bytes) -> dict[str, Any]:
    parts = [
        {"type": "input_text", "text": c}
        if isinstance(c, str)
        else {"type": "input_image", "image_url": data_url(c), "detail": "auto"}
        for c in contents
    ]
    return {"role": "user", "content": parts}


def body(**changes: Any) -> dict[str, Any]:
    return {"model": "shapes", "input": [user(noise(), "What is this?")],
            "max_output_tokens": 12, "temperature": 0, **changes}  # fmt: skip


def scripted(**changes: Any) -> dict[str, Any]:
    return {"model": "shapes", "input": "hi", "max_output_tokens": 900,
            "extra_body": {"stop": [END]}, **changes}  # fmt: skip


async def posted(stack: Stack, **fields: Any) -> dict[str, Any]:
    """The response as it stands in the body."""
    async with httpx.AsyncClient(base_url=stack.url, timeout=60) as http:
        answer = await http.post("/v1/responses", json=fields)
    assert answer.status_code == 200, answer.text
    response: dict[str, Any] = answer.json()
    valid_response(response)
    return response


async def events_of(stack: Stack, *, headers: Any = None, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream, as they stand."""
    async with httpx.AsyncClient(base_url=stack.url, timeout=60) as http:
        answer = await http.post(
            "/v1/responses", json={**fields, "stream": True}, headers=headers or {}
        )
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    blocks = answer.text.split("\n\n")
    assert blocks.pop() == ""
    events = []
    for block in blocks:
        if block == ": ping":
            continue
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


async def test_the_tokens_are_those_of_the_chat_written_by_hand(served: Stack) -> None:
    messages = [{"role": "system", "content": "Be brief."}, ask(noise(), "What is this?")]
    for sampling in ({"temperature": 0}, {"temperature": 1.0, "top_p": 0.9}):
        async with client(served) as api:
            chat = await api.chat.completions.create(
                model="shapes", messages=messages, max_tokens=12, seed=5, logprobs=True,
                top_logprobs=2, **sampling,
            )  # fmt: skip
            response = await api.responses.create(
                **body(instructions="Be brief.", include=[LOGPROBS], top_logprobs=2, **sampling),
                extra_body={"seed": 5},
            )
        (choice,) = chat.choices
        assert response.output_text == choice.message.content
        (part,) = response.output[0].content
        assert [one.model_dump() for one in part.logprobs] == [
            one.model_dump() for one in choice.logprobs.content
        ]
        assert response.status == "incomplete"
        assert response.incomplete_details.reason == "max_output_tokens"
        assert (response.temperature, response.store) == (sampling["temperature"], False)
        usage = response.usage
        assert usage.input_tokens == chat.usage.prompt_tokens
        assert usage.output_tokens == chat.usage.completion_tokens == 12
        assert usage.total_tokens == chat.usage.total_tokens
        details = usage.input_tokens_details.model_dump()
        assert details["image_tokens"] == 12
        assert usage.input_tokens_details.cached_tokens <= usage.input_tokens


async def test_a_stream_adds_up_to_the_whole_response(served: Stack) -> None:
    fields = body(
        include=[LOGPROBS], instructions="Be brief.", metadata={"a": "b"}, max_output_tokens=40
    )
    await posted(served, **fields)  # fills the caches
    whole = await posted(served, **fields)
    events = await events_of(served, **fields)
    assert told(response_of(events)) == told(whole)
    assert events[-1]["type"] == "response.incomplete"
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert len(deltas) > 8
    timing = events[-1]["response"]["timing"]
    assert timing["ttft_ms"] == pytest.approx(sum(timing["stages"].values()), abs=0.01)
    async with client(served) as api:
        seen = [event async for event in await api.responses.create(**fields, stream=True)]
    assert [event.type for event in seen] == [event["type"] for event in events]


async def test_a_conversation_goes_on_with_the_items_of_its_answer(served: Stack) -> None:
    async with client(served) as api:
        first = await api.responses.create(**body())
        items = [user(noise(), "What is this?"), *first.output, user("Sure?")]
        second = await api.responses.create(**body(input=items))
        chat = await api.chat.completions.create(
            model="shapes",
            messages=[ask(noise(), "What is this?"),
                      {"role": "assistant", "content": first.output_text}, ask("Sure?")],
            max_tokens=12, temperature=0,
        )  # fmt: skip
    assert second.output_text == chat.choices[0].message.content
    assert second.usage.input_tokens == chat.usage.prompt_tokens
    assert second.usage.input_tokens_details.cached_tokens >= 12


class Answer(pydantic.BaseModel):
    color: Literal["red", "blue"]
    count: Annotated[int, pydantic.Field(ge=0, le=99)]


async def test_answers_are_parsed_to_models(served: Stack) -> None:
    fields = body(max_output_tokens=400, temperature=1.0, extra_body={"seed": 7})
    async with client(served) as api:
        parsed = await api.responses.parse(**fields, text_format=Answer)
        async with api.responses.stream(**fields, text_format=Answer) as stream:
            final = await stream.get_final_response()
    assert isinstance(parsed.output_parsed, Answer)
    assert final.output_parsed == parsed.output_parsed
    assert parsed.status == "completed"
    assert parsed.completed_at is not None
    assert parsed.text.format.name == "Answer"


async def test_reasoning_text_and_calls_are_items_of_their_own(talking: Stack) -> None:
    tell(talking, f"<think>\nHm 日本.\n</think>\n\nI'll look.{hermes(CALLS)}")
    fields = scripted(tools=FLAT, include=[LOGPROBS], seed=1, stop=[END])
    del fields["extra_body"]
    await posted(talking, **fields)
    whole = await posted(talking, **fields)
    events = await events_of(talking, **fields)
    assert told(response_of(events)) == told(whole)
    assert whole["status"] == "completed"
    reasoning, message, *calls = whole["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm 日本."}]
    (part,) = message["content"]
    assert part["text"] == "I'll look."
    assert "".join(token["token"] for token in part["logprobs"]) == "I'll look."
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == CALLS
    assert len({call["call_id"] for call in calls}) == len(CALLS)
    num_reasoning = whole["usage"]["output_tokens_details"]["reasoning_tokens"]
    thought = TOKENIZER.encode("\nHm 日本.\n", add_special_tokens=False).ids
    assert abs(num_reasoning - len(thought)) <= 2
    kinds = {event["type"] for event in events}
    assert {"response.reasoning_text.delta", "response.function_call_arguments.delta"} <= kinds
    fragments = [e for e in events if e["type"] == "response.function_call_arguments.delta"]
    assert len(fragments) > 20


async def test_functions_are_called_and_answered(talking: Stack) -> None:
    """A round trip as OpenAI's pages show it: output items and their results are the next input."""
    tell(talking, f"<think>Hm.</think>{hermes(CALLS)}")
    async with client(talking) as api:
        first = await api.responses.create(**scripted(tools=FLAT))
        async with api.responses.stream(**scripted(tools=FLAT)) as stream:
            streamed = await stream.get_final_response()
        calls = [item for item in first.output if item.type == "function_call"]
        assert [(call.name, json.loads(call.arguments)) for call in calls] == CALLS
        assert [item.type for item in streamed.output] == [item.type for item in first.output]
        assert streamed.output[1].type == "function_call"
        assert streamed.output[1].parsed_arguments is None
        results = [
            {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
            for call in calls
        ]
        tell(talking, "It is sunny.")
        items = [{"role": "user", "content": "hi"}, *first.output, *results]
        second = await api.responses.create(**scripted(input=items, tools=FLAT))
        again = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "sunny"}
            for item in streamed.output
            if item.type == "function_call"
        ]
        items = [{"role": "user", "content": "hi"}, *streamed.output, *again]
        third = await api.responses.create(**scripted(input=items, tools=FLAT))
        nested = [
            {"type": "function", "function": {"name": n, "parameters": s}} for n, s in TOOLS.items()
        ]
        chat = await api.chat.completions.create(
            model="shapes", tools=nested, stop=[END], max_tokens=900,
            messages=[
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [
                    {"id": call.call_id, "type": "function",
                     "function": {"name": call.name, "arguments": call.arguments}}
                    for call in calls]},
                *({"role": "tool", "tool_call_id": call.call_id, "content": "sunny"}
                  for call in calls),
            ],
        )  # fmt: skip
    assert second.output_text == "It is sunny." == chat.choices[0].message.content
    assert second.usage.input_tokens == chat.usage.prompt_tokens == third.usage.input_tokens
    assert [tool.name for tool in second.tools] == list(TOOLS)


async def test_choices_of_tools_are_those_of_the_chat(talking: Stack) -> None:
    tell(talking, hermes(CALLS))
    names = [{"type": "function", "name": "no-arguments_2"}]
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": names}
    async with client(talking) as api:
        one = await api.responses.create(**scripted(tools=FLAT, parallel_tool_calls=False))
        none = await api.responses.create(**scripted(tools=FLAT, tool_choice="none"))
        bare = await api.responses.create(**scripted())
        some = await api.responses.create(**scripted(tools=FLAT, tool_choice=allowed))
    assert [item.name for item in one.output] == ["get_weather"]
    assert [item.type for item in none.output] == ["message"]
    assert none.usage.input_tokens == bare.usage.input_tokens
    calls = [item.name for item in some.output if item.type == "function_call"]
    assert calls == ["no-arguments_2"]
    assert bare.usage.input_tokens < some.usage.input_tokens < one.usage.input_tokens
    assert some.tool_choice.type == "allowed_tools"


async def test_effort_is_that_of_the_chat(talking: Stack) -> None:
    tell(talking, "ok")
    async with client(talking) as api:
        none = await api.responses.create(**scripted(reasoning={"effort": "none"}))
        chat = await api.chat.completions.create(
            model="shapes", messages=[{"role": "user", "content": "hi"}], stop=[END],
            reasoning_effort="none", max_tokens=900,
        )  # fmt: skip
        bare = await api.responses.create(**scripted())
    assert none.reasoning.effort == "none"
    assert none.usage.input_tokens == chat.usage.prompt_tokens != bare.usage.input_tokens


async def test_an_answer_that_is_cut_has_an_incomplete_item(talking: Stack) -> None:
    tell(talking, hermes(CALLS[:1]))
    fields = scripted(tools=FLAT, max_output_tokens=60, stop=[END])
    del fields["extra_body"]
    events = await events_of(talking, **fields)
    response = response_of(events)
    (call,) = response["output"]
    assert (response["status"], call["status"]) == ("incomplete", "incomplete")
    assert json.dumps(CALLS[0][1], ensure_ascii=False).startswith(call["arguments"])


async def test_an_error_before_the_stream_is_http_and_names_the_item() -> None:
    async with stack(*EPD) as served, client(served) as api:
        with pytest.raises(openai.BadRequestError) as refused:
            await api.responses.create(
                **body(input=[user("a"), user("What?", broken_inside(png()))], stream=True)
            )
        assert refused.value.param == "input[1].content[1].image_url"
        with pytest.raises(openai.BadRequestError) as refused:
            await api.responses.create(**body(max_output_tokens=1_000_000))
        assert refused.value.param == "max_output_tokens"
        assert "'max_output_tokens' asks for" in refused.value.message
        with pytest.raises(openai.BadRequestError) as refused:
            await api.responses.create(**body(tools=FLAT))
        assert refused.value.param == "tools"
        schema = {"type": "object", "properties": {"a": {"not": {"type": "null"}}}}
        text = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
        with pytest.raises(openai.BadRequestError) as refused:
            await api.responses.create(**body(text=text))
        assert refused.value.param == "text.format.schema.properties.a.not"
        with pytest.raises(openai.BadRequestError) as refused:
            await api.responses.create(**body(previous_response_id="resp_1"))
        assert "send the earlier items in `input`" in refused.value.message
        with pytest.raises(openai.NotFoundError):
            await api.responses.create(**body(model="other"))
        with pytest.raises(openai.NotFoundError):
            await api.responses.retrieve("resp_1")
        long = data_url(noise())
        with pytest.raises(openai.BadRequestError) as refused:
            await api.responses.create(**body(input=[user("a")], metadata={"image_url": long}))
        assert "'image_url'" in refused.value.message
        await served.until_idle()


async def test_an_error_within_the_stream_is_its_last_event() -> None:
    async with stack(*EPD) as served:
        for worker in served.of(Role.DECODE):
            worker.runner.faults.step_seconds = 0.05
        events = await events_of(
            served, headers={"X-Request-Timeout": "1"}, **body(max_output_tokens=500)
        )
        response = response_of(events)
        assert response["error"]["code"] == "server_error"
        assert "X-Request-Timeout" in response["error"]["message"]
        assert response["output"][0]["status"] == "incomplete"
        assert response["output"][0]["content"][0]["text"]
        async with client(served) as api:
            stream = await api.responses.create(
                **body(max_output_tokens=500), stream=True, extra_headers={"X-Request-Timeout": "1"}
            )
            seen = [event.type async for event in stream]
        assert seen[-1] == "response.failed"
        await served.until_idle()


async def test_a_stream_that_only_waited_fails_without_an_item(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(endpoint, "PING_SECONDS", 0.1)
    async with stack(*EPD, worker_delays={"prefill": 5.0}) as served:
        events = await events_of(served, headers={"X-Request-Timeout": "1"}, **body())
        response = response_of(events)
        assert (response["status"], response["output"]) == ("failed", [])
        assert len(events) == 3
        await served.until_idle()


async def test_a_client_that_leaves_frees_every_pod() -> None:
    async with stack(*EPD) as served, client(served) as api:
        for worker in served.of(Role.DECODE):
            worker.runner.faults.step_seconds = 0.05
        stream = await api.responses.create(**body(max_output_tokens=500), stream=True)
        seen = 0
        async for event in stream:
            seen += event.type == "response.output_text.delta"
            if seen == 3:
                break
        await stream.close()
        async with asyncio.timeout(30):
            await served.gateway.context.idle.wait()
        await served.until_idle(timeout=10)


async def test_a_ping_begins_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "PING_SECONDS", 0.1)
    async with stack(*EPD, worker_delays={"prefill": 1.0}) as served:
        async with (
            httpx.AsyncClient(base_url=served.url, timeout=60) as http,
            http.stream("POST", "/v1/responses", json=body(stream=True)) as answer,
        ):
            text = "".join([piece async for piece in answer.aiter_text()])
        assert text.index("event: response.in_progress") < text.index(": ping")
        assert text.index(": ping") < text.index("event: response.output_item.added")
        response_of(await events_of(served, **body()))
        await served.until_idle()


async def test_what_an_answer_repeats_counts_for_the_gateway_s_memory() -> None:
    long = "red " * 50
    used = []
    for fields in ({"messages": [{"role": "system", "content": long}, ask("hi")]},
                   {"input": "hi", "instructions": long}):  # fmt: skip
        async with stack(*EPD, worker_delays={"prefill": 1.0}) as served:
            context = served.gateway.context
            path = "responses" if "input" in fields else "chat/completions"
            async with httpx.AsyncClient(base_url=served.url, timeout=60) as http:
                sent = {"model": "shapes", "stop": [" "], **fields}
                asked = asyncio.ensure_future(http.post(f"/v1/{path}", json=sent))
                async with asyncio.timeout(30):
                    while context.memory.used(Kind.PROMPT) == 0:  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
                used.append(context.memory.used(Kind.PROMPT))
                answer = await asked
            await context.idle.wait()
            assert context.memory.used_in_all == 0
    assert answer.json()["instructions"] == long
    chat, responses = used
    assert chat + len(long) < responses < chat + len(long) + 2048


async def test_the_log_names_the_endpoint(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with stack(*EPD) as served, client(served) as api:
        await api.responses.create(**body(metadata={"a": "b"}, user="u"))
        await api.chat.completions.create(model="shapes", messages=[ask("hi")], max_tokens=2)
        await served.gateway.context.idle.wait()
    lines = [record for record in caplog.records if record.getMessage() == "request"]
    assert [record.endpoint for record in lines] == ["responses", "chat"]  # type: ignore[attr-defined]
    assert lines[0].labels == {"user": "u", "metadata": {"a": "b"}}  # type: ignore[attr-defined]


def test_a_long_image_is_taken_out_of_the_body_under_either_name() -> None:
    """So it does not count for the limit of the text, and is not copied."""
    url = f"data:image/png;base64,{'A' * 5 * 2**20}"
    text = json.dumps({"a": {"image_url": url}, "b": {"url": url}, "c": "image_url"}).encode()
    parsed = at_once(read_json(text))
    assert [bytes(image) for image in parsed.images.values()] == [url.encode()] * 2
    assert [parsed.value["a"]["image_url"], parsed.value["b"]["url"]] == list(parsed.images)
    for name in ("image__url", "simage_url", "url_image_"):
        with pytest.raises(ApiError, match="Without its images"):
            at_once(read_json(json.dumps({name: url}).encode()))
