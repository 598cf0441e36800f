"""Requests whose grammar is checked slowly: they delay no other request, and end when they must."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from worker.gateway.stack import COLOCATED, Stack, stack
from worker.gateway.test_grammar import is_asked, stopped, until

from vlm_worker.gateway.grammar_checks import MAX_WAITING, GrammarChecks


@pytest.fixture
async def served() -> AsyncIterator[Stack]:
    """One request at a time may wait for a worker."""
    async with stack(*COLOCATED, max_waiting=1) as one:
        yield one


def checks_of(served: Stack) -> GrammarChecks:
    return served.gateway.context.preparer.grammar_checks


async def post(served: Stack, schema: Any = None, **headers: str) -> httpx.Response:
    body: dict[str, Any] = {
        "model": "shapes",
        "max_tokens": 4,
        "messages": [{"role": "user", "content": "hi"}],
    }
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
