"""No request is ever our fault: whatever comes in, the answer is OpenAI-shaped and tells nothing.

make test     50,000          make test-full     1,000,000
"""

from __future__ import annotations

import asyncio
import collections
import gc
import json
import logging
import random
import re
from pathlib import Path
from typing import Any

import pytest
from worker.gateway.mutations import requests
from worker.gateway.stack import gateway_settings

from vlm_worker.gateway.context import GatewayContext
from vlm_worker.gateway.cors import CorsApp
from vlm_worker.gateway.http_app import public_app
from vlm_worker.gateway.prompts import PromptBuilder

SAMPLE = 50_000
LONG = (pytest.mark.full, pytest.mark.timeout(3600))
WARM_UP = 2_000
# Addresses in memory, paths, stack traces, module names.
LEAKS = re.compile(
    r"0x[0-9a-f]{6,}\b(?! pixels)|/usr|/home|/root|site-packages|Traceback|\bline \d+|msgspec|"
    r"vlm_worker|Error\b|object at"
)
# 503 is the true answer to a good request: there are no workers.
DECLARED = {400, 404, 413, 415, 503}


async def answer(app: CorsApp, path: str, body: bytes, headers: list[Any]) -> tuple[int, bytes]:
    """What the application says, without a server in between."""
    scope = {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "scheme": "http",
        "query_string": b"", "root_path": "", "headers": headers, "http_version": "1.1",
        "asgi": {"version": "3.0"}, "client": None, "server": None,
    }  # fmt: skip
    incoming = [{"type": "http.request", "body": body, "more_body": False}]
    outgoing: list[dict[str, Any]] = []
    never = asyncio.Event()

    async def receive() -> dict[str, Any]:
        if incoming:
            return incoming.pop()
        await never.wait()
        raise AssertionError("the client stays")

    async def send(message: dict[str, Any]) -> None:
        outgoing.append(message)

    await app(scope, receive, send)
    start, *rest = outgoing
    assert start["type"] == "http.response.start"
    assert not rest[-1].get("more_body", False)
    return start["status"], b"".join(one["body"] for one in rest)


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("count", [SAMPLE, pytest.param(1_000_000, marks=LONG)], ids="{:,}".format)
async def test_whatever_is_asked_the_answer_is_well_formed_and_discreet(
    count: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    settings = gateway_settings([])
    context = GatewayContext(settings, PromptBuilder(Path(settings.model.uri)))
    app = public_app(context)
    seen: collections.Counter[str] = collections.Counter()
    before = 0
    for number, (path, body, headers) in enumerate(requests(random.Random(seed), count)):
        status, text = await answer(app, path, body, headers)
        assert status in DECLARED, (status, text, body[:500])
        error = json.loads(text)["error"]
        assert set(error) == {"message", "type", "param", "code"}, body[:500]
        assert isinstance(error["message"], str)
        assert error["param"] is None or isinstance(error["param"], str)
        assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
        assert not LEAKS.search(error["message"]), (error, body[:500])
        seen[f"{status} {error['code']}"] += 1
        if number == WARM_UP:
            before = resident_bytes()
    grown = resident_bytes() / before - 1
    print(f"{count:,} requests: {dict(seen.most_common())}")
    print(f"memory {grown:+.1%}")
    assert not caplog.records
    assert len(seen) >= 12
    assert seen.most_common(1)[0][1] < 0.6 * count
    assert context.num_inflight == 0
    assert context.meters.num_requests == count
    assert grown <= 0.05
