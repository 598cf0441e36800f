"""Requests whose grammar takes time: they delay no other request, and end when they must."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from worker.gateway.responding.templates import HERMES
from worker.gateway.stack import COLOCATED, MODEL, Stack, stack
from worker.gateway.test_grammar import is_asked, stopped, until

from vlm_worker.gateway.grammar_checks import MAX_WAITING, MAX_WRITING, GrammarChecks
from vlm_worker.gateway.memory import Bound, FullError
from vlm_worker.settings import ModelSource


@pytest.fixture
async def served() -> AsyncIterator[Stack]:
    """One request at a time may wait for a worker."""
    async with stack(*COLOCATED, max_waiting=1) as one:
        yield one


def checks_of(served: Stack) -> GrammarChecks:
    return served.gateway.context.preparer.grammar_checks


async def post(
    served: Stack, schema: Any = None, *, tools: Any = None, **headers: str
) -> httpx.Response:
    body: dict[str, Any] = {
        "model": "shapes",
        "max_tokens": 4,
        "messages": [{"role": "user", "content": "hi"}],
    }
    if tools is not None:
        body["tools"] = tools
    if schema is not None:
        form = {"name": "x", "schema": schema}
        body["response_format"] = {"type": "json_schema", "json_schema": form}
    async with httpx.AsyncClient(timeout=60) as client:
        return await client.post(f"{served.url}/v1/chat/completions", json=body, headers=headers)


async def test_a_request_whose_grammar_is_checked_does_not_count_as_waiting(served: Stack) -> None:
    checks, limit = checks_of(served), served.gateway.context.retry_policy.request_limit
    async with stopped(checks):
        checked = asyncio.create_task(post(served, {"type": "array"}))
        await until(lambda: is_asked(checks))
        assert limit.num_waiting == 0
        assert (await post(served)).status_code == 200
    assert (await checked).status_code == 200
    assert limit.num_waiting == 0


async def test_a_check_ends_at_the_deadline_of_its_request(served: Stack) -> None:
    checks = checks_of(served)
    async with stopped(checks):
        reply = await post(served, {"type": "array"}, **{"x-request-timeout": "0.2"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (504, "deadline_exceeded")


async def test_a_request_whose_client_leaves_ends_during_its_check(served: Stack) -> None:
    checks, context = checks_of(served), served.gateway.context
    async with stopped(checks), asyncio.timeout(30):
        left = asyncio.create_task(post(served, {"type": "array"}))
        await until(lambda: is_asked(checks))
        left.cancel()
        await context.idle.wait()
        assert context.meters.outcomes["cancelled"] == 1
        assert context.memory.used_in_all == 0


async def test_more_checks_than_may_wait_are_a_429_that_says_when() -> None:
    async with stack(*COLOCATED) as served, stopped(checks_of(served)):
        checks, meters = checks_of(served), served.gateway.context.meters
        many = [
            asyncio.create_task(post(served, {"const": number}))
            for number in range(MAX_WAITING + 1)
        ]
        await until(lambda: checks._turns.num_waiting("") == MAX_WAITING)
        reply = await post(served, {"type": "array"})
        assert (reply.status_code, reply.headers["retry-after"]) == (429, "1")
        assert "checks of grammars" in reply.json()["error"]["message"]
        assert meters.refusals["tenant_checks"] == 1
        for one in many:
            one.cancel()
        await asyncio.wait(many)
        await until(lambda: checks._turns.num_waiting("") == 0)


def strict(a: dict[str, Any]) -> list[dict[str, Any]]:
    schema = {"properties": {"a": a}, "required": ["a"], "additionalProperties": False}
    schema["$defs"] = {"n": {"type": "integer"}}
    return [{"type": "function", "function": {"name": "f", "strict": True, "parameters": schema}}]


LONG = {
    "size": strict({"type": "integer", "description": "long " * 250}),
    "references": strict({"$ref": "#/$defs/n"}),
}
SHORT = strict({"type": "integer"})


@pytest.fixture
async def calling(tmp_path: Path) -> AsyncIterator[Stack]:
    model = tmp_path / "model"
    shutil.copytree(MODEL, model, ignore=shutil.ignore_patterns("*.safetensors"))
    (model / "chat_template.jinja").write_text(HERMES)
    async with stack(*COLOCATED, max_waiting=1, model=ModelSource(str(model))) as one:
        yield one


class Writing:
    """A grammar that is written until `end` is set."""

    def __init__(self) -> None:
        self.begun, self.end = threading.Event(), threading.Event()
        self.thread = 0

    def __call__(self) -> str:
        self.thread = threading.get_ident()
        self.begun.set()
        self.end.wait(60)
        return "written"


@contextlib.contextmanager
def writing() -> Iterator[Writing]:
    one = Writing()
    try:
        yield one
    finally:
        one.end.set()


@pytest.mark.parametrize("why", LONG)
async def test_a_grammar_of_strict_tools_is_written_on_a_thread_in_turn(
    calling: Stack, why: str
) -> None:
    """While that thread writes another one, its request waits and others are answered."""
    checks, limit = checks_of(calling), calling.gateway.context.retry_policy.request_limit
    with writing() as slow:
        first = asyncio.create_task(checks.write(slow, tenant=""))
        await until(slow.begun.is_set)
        assert slow.thread != threading.get_ident()
        long = asyncio.create_task(post(calling, tools=LONG[why]))
        await until(lambda: checks._writing.num_waiting("") == 1)
        assert limit.num_waiting == 0
        for tools in (None, SHORT):
            assert (await post(calling, tools=tools)).status_code == 200
        assert not long.done()
    assert await first == "written"
    assert (await long).status_code == 200


async def test_a_request_that_ends_leaves_the_turn_to_what_is_written_for_it(
    calling: Stack,
) -> None:
    checks = checks_of(calling)
    with writing() as slow, writing() as later:
        later.end.set()
        left = asyncio.create_task(checks.write(slow, tenant="a"))
        await until(slow.begun.is_set)
        left.cancel()
        await asyncio.wait((left,))
        assert left.cancelled()
        next_one = asyncio.create_task(checks.write(later, tenant="b"))
        await until(lambda: checks._writing.num_waiting("b") == 1)
        assert not later.begun.is_set()
        slow.end.set()
        assert await next_one == "written"


async def test_more_grammars_than_may_wait_to_be_written_are_refused(calling: Stack) -> None:
    checks = checks_of(calling)
    with writing() as slow:
        many = [asyncio.create_task(checks.write(slow, tenant="a")) for _ in range(MAX_WRITING + 1)]
        await until(lambda: checks._writing.num_waiting("a") == MAX_WRITING)
        with pytest.raises(FullError) as refused:
            await checks.write(slow, tenant="a")
        assert refused.value.bound is Bound.TENANT_CHECKS
        other = asyncio.create_task(checks.write(threading.get_ident, tenant="b"))
        await until(lambda: checks._writing.num_waiting("b") == 1)
        slow.end.set()
        assert await other == slow.thread
        assert set(await asyncio.gather(*many)) == {"written"}
