"""/tokenize and /detokenize: the prompts that requests have, without a worker."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from worker.gateway.image_files import ask, png
from worker.gateway.stack import COLOCATED, client, gateway_settings, serving, stack

from vlm_worker.gateway.gateway_server import Gateway, running

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT = "a red circle, <|im_end|> and 3 squares: ü"
TOOL = {"type": "function", "function": {"name": "f", "description": "finds"}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def alone() -> AsyncIterator[Gateway]:
    """A gateway without workers: what it answers reached none."""
    async with serving(gateway_settings([])) as gateway:
        yield gateway


async def post(gateway: Gateway, path: str, **body: Any) -> httpx.Response:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=30) as http:
        return await http.post(path, json={"model": "shapes", **body})


async def tokenized(gateway: Gateway, **body: Any) -> dict[str, Any]:
    answer = await post(gateway, "/tokenize", **body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    assert found["count"] == len(found["tokens"])
    return found


async def test_a_text_has_the_tokens_of_a_completion_and_they_have_its_text(alone: Gateway) -> None:
    builder = alone.context.prompt_builder
    found = await tokenized(alone, prompt=TEXT)
    assert tuple(found["tokens"]) == builder.completion(TEXT).token_ids
    assert found["max_model_len"] == alone.context.preparer.max_model_len
    assert found["token_strs"] is None
    bare = await tokenized(alone, prompt=TEXT, add_special_tokens=False)
    assert tuple(bare["tokens"]) == builder.completion(TEXT, is_bare=True).token_ids
    answer = await post(alone, "/detokenize", tokens=bare["tokens"])
    assert answer.json() == {"prompt": TEXT}


async def test_texts_of_clients_hold_no_control_tokens(alone: Gateway) -> None:
    controls = alone.context.prompt_builder.control_ids
    text = "".join(controls)
    bare = await tokenized(alone, prompt=text, add_special_tokens=False)
    assert controls
    assert not set(bare["tokens"]) & set(controls.values())
    plain = await tokenized(alone, messages=[ask("hi")])
    quoting = await tokenized(alone, messages=[ask(text)])
    for token_id in controls.values():
        assert plain["tokens"].count(token_id) == quoting["tokens"].count(token_id)


async def test_strings_are_those_of_the_vocabulary(alone: Gateway) -> None:
    found = await tokenized(alone, prompt=TEXT, return_token_strs=True)
    tokenizer = alone.context.prompt_builder.tokenizer
    assert [tokenizer.token_to_id(one) for one in found["token_strs"]] == found["tokens"]


async def test_a_chat_ends_with_the_beginning_of_an_answer_unless_it_should_not(
    alone: Gateway,
) -> None:
    asking = await tokenized(alone, messages=[ask("hi")])
    ended = await tokenized(alone, messages=[ask("hi")], add_generation_prompt=False)
    assert asking["tokens"][: ended["count"]] == ended["tokens"]
    assert asking["count"] > ended["count"]


async def test_the_count_is_that_of_the_answer_s_usage() -> None:
    bodies = [[ask("hi")], [ask(png(), "What is this?", png())]]
    async with stack(*COLOCATED) as served, client(served) as api:
        for messages in bodies:
            found = await tokenized(served.gateway, messages=messages)
            answer = await api.chat.completions.create(
                model="shapes", messages=messages, max_tokens=1
            )
            assert answer.usage is not None
            assert answer.usage.prompt_tokens == found["count"]
        image = served.gateway.context.prompt_builder.family.image_token_id
        assert found["tokens"].count(image) > 2


REFUSED = [
    ("/tokenize", {}, "missing_required_parameter", "prompt"),
    ("/tokenize", {"prompt": ""}, "invalid_value", "prompt"),
    ("/tokenize", {"prompt": ["a"]}, "invalid_type", "prompt"),
    ("/tokenize", {"prompt": "a", "messages": []}, "invalid_value", "prompt"),
    ("/tokenize", {"prompt": "a", "tools": [TOOL]}, "invalid_value", "tools"),
    ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "invalid_value",
     "add_generation_prompt"),
    ("/tokenize", {"prompt": "a", "max_tokens": 5}, "unknown_parameter", "max_tokens"),
    ("/tokenize", {"prompt": "a " * 20_000}, "context_length_exceeded", "prompt"),
    ("/tokenize", {"messages": [ask("a")], "add_special_tokens": True}, "unsupported_parameter",
     "add_special_tokens"),
    ("/tokenize", {"messages": [ask("a")], "chat_template": "x"}, "unsupported_parameter",
     "chat_template"),
    ("/tokenize", {"messages": [{"role": "user", "content": 3}]}, "invalid_type",
     "messages[0].content"),
    ("/tokenize", {"prompt": "a", "model": "b"}, "model_not_found", "model"),
    ("/detokenize", {"tokens": [1], "model": "b"}, "model_not_found", "model"),
    ("/detokenize", {}, "missing_required_parameter", "tokens"),
    ("/detokenize", {"tokens": 3}, "invalid_type", "tokens"),
    ("/detokenize", {"tokens": [1, True]}, "invalid_type", "tokens[1]"),
    ("/detokenize", {"tokens": [1.0]}, "invalid_type", "tokens[0]"),
    ("/detokenize", {"tokens": [-1]}, "invalid_value", "tokens[0]"),
    ("/detokenize", {"tokens": [1, 10**9]}, "invalid_value", "tokens[1]"),
    ("/detokenize", {"tokens": [1], "x": 1}, "unknown_parameter", "x"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "code", "param"), REFUSED)
async def test_what_is_wrong_is_named(
    alone: Gateway, path: str, body: dict[str, Any], code: str, param: str
) -> None:
    answer = await post(alone, path, **body)
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == (code, param), error
    assert answer.status_code == (404 if code == "model_not_found" else 400)


async def test_ids_of_images_have_a_text(alone: Gateway) -> None:
    found = await tokenized(alone, messages=[ask(png(), "hi")])
    text = (await post(alone, "/detokenize", tokens=found["tokens"])).json()["prompt"]
    assert "hi" in text


async def test_headers_keys_log_and_metrics_are_as_at_other_paths(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "alice").write_text("alice-key")
    caplog.set_level("INFO")
    key = {"authorization": "Bearer alice-key"}
    body = json.dumps({"model": "shapes", "prompt": "a"})
    async with (
        serving(gateway_settings([], api_keys_dir=tmp_path)) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=30) as http,
    ):
        assert (await http.post("/tokenize", json={})).status_code == 401
        plain = {**key, "content-type": "text/plain"}
        assert (await http.post("/tokenize", content=body, headers=plain)).status_code == 415
        late = {**key, "x-request-timeout": "soon"}
        wrong = await http.post("/tokenize", json=json.loads(body), headers=late)
        assert wrong.json()["error"]["code"] == "invalid_header"
        before = gateway.context.meters.num_requests
        fine = await http.post("/tokenize", json=json.loads(body), headers=key)
        assert fine.status_code == 200
        assert gateway.context.meters.num_requests == before + 1
        assert (await http.get("/tokenize", headers=key)).status_code == 405
        assert gateway.context.num_inflight == 0
    lines = [line for line in caplog.records if line.getMessage() == "request"]
    assert [(line.endpoint, line.tenant, line.outcome) for line in lines] == [  # type: ignore[attr-defined]
        *[("tokenize", "alice", "invalid")] * 2,
        ("tokenize", "alice", "ok"),
    ]


IN_FLIGHT = [("/tokenize", {"prompt": "a red square"}), ("/detokenize", {"tokens": [65, 66]})]


class InFlight:
    """A request whose body lacks its last byte until `finish`."""

    def __init__(self, path: str, body: dict[str, Any]) -> None:
        self._path, self._body = path, json.dumps({"model": "shapes", **body}).encode()
        self.rest = asyncio.Event()

    async def body(self) -> AsyncIterator[bytes]:
        yield self._body[:-1]
        await self.rest.wait()
        yield self._body[-1:]

    async def answer(self, gateway: Gateway) -> httpx.Response:
        headers = {"content-type": "application/json", "content-length": str(len(self._body))}
        async with httpx.AsyncClient(base_url=gateway.url, timeout=30) as http:
            return await http.post(self._path, content=self.body(), headers=headers)


async def until(condition: Any) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - what it reads has no event
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(("path", "body"), IN_FLIGHT)
async def test_one_in_flight_is_no_activity(path: str, body: dict[str, Any]) -> None:
    async with serving(gateway_settings([])) as gateway:
        context, times, request = gateway.context, [1000.0], InFlight(path, body)
        context.clock, context._last_active = lambda: times[0], 970.0
        answer = asyncio.create_task(request.answer(gateway))
        await until(lambda: context.num_inflight)
        stats = context.stats()
        request.rest.set()
        assert (await answer).status_code == 200
    assert (stats["inflight"], stats["wake"]["idle_seconds"]) == (1, 30), "a drain waits for it"


@pytest.mark.parametrize(("path", "body"), IN_FLIGHT)
async def test_a_drain_lets_one_finish(path: str, body: dict[str, Any]) -> None:
    stop, request = asyncio.Event(), InFlight(path, body)
    async with running(gateway_settings([], drain_timeout_seconds=60.0)) as gateway:
        context = gateway.context
        async with served_until(stop, gateway) as serve:
            answer = asyncio.create_task(request.answer(gateway))
            await until(lambda: context.num_inflight)
            stop.set()
            await until(lambda: context.refusing)
            assert not serve.done()
            request.rest.set()
            assert (await answer).status_code == 200
            await serve
        assert not context.drain_ended.is_set()


@contextlib.asynccontextmanager
async def served_until(stop: asyncio.Event, gateway: Gateway) -> AsyncIterator[asyncio.Task[None]]:
    """The gateway serves until `stop`; also if the test fails."""
    serve = asyncio.create_task(gateway.serve(stop, notice_seconds=0.0))
    try:
        yield serve
    finally:
        stop.set()
        await serve
