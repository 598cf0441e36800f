"""The access log has one line per request, of closed fields: no text of a client is in it."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from worker.gateway.stack import P_D, Stack, stack
from worker.gateway.test_front_door import TEXT
from worker.gateway.test_front_door import keys as keys

SECRET = "hunter2-Zq9"
ORIGIN = "https://app.example.com"
STANDARD = set(vars(logging.makeLogRecord({}))) | {"message", "asctime"}
FIELDS = {
    "request_id", "tenant", "method", "endpoint", "model", "status", "outcome", "code",
    "num_prompt_tokens", "num_cached_tokens", "num_output_tokens", "ttft_seconds", "seconds",
}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "gateway.json"
    cors = {"allowed_origins": [ORIGIN]}
    path.write_text(json.dumps({"access_log": True, "cors": cors}))
    return path


def lines(
    caplog: pytest.LogCaptureFixture, answers: Sequence[httpx.Response] = ()
) -> list[dict[str, Any]]:
    """The fields of the lines of the access log, in the order of the answers."""
    records = [one for one in caplog.records if one.name == "vlm_worker.gateway.access_log"]
    found = [{k: v for k, v in vars(one).items() if k not in STANDARD} for one in records]
    ids = [answer.headers["x-request-id"] for answer in answers]
    return sorted(found, key=lambda line: ids.index(line["request_id"]))


async def ask(served: Stack, method: str, path: str, **options: Any) -> httpx.Response:
    headers = {"authorization": "Bearer alice-key", **options.pop("headers", {})}
    async with httpx.AsyncClient(timeout=60) as client:
        return await client.request(method, served.url + path, headers=headers, **options)


async def test_an_answer_has_tenant_model_tokens_status_and_times(
    config: Path, keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with stack(*P_D, config=config, api_keys_dir=keys) as served:
        answers = [
            await ask(
                served,
                "POST",
                "/v1/chat/completions",
                json=TEXT | {"stream": stream, "temperature": 0},
            )
            for stream in (False, True)
        ]
    usage, found = answers[0].json()["usage"], lines(caplog, answers)
    assert len(found) == 2
    for line, answer in zip(found, answers, strict=True):
        assert set(line) == FIELDS
        assert line["request_id"] == answer.headers["x-request-id"]
        assert (line["tenant"], line["model"], line["status"]) == ("alice", "shapes", 200)
        assert (line["method"], line["endpoint"]) == ("POST", "/v1/chat/completions")
        assert (line["outcome"], line["code"]) == ("ok", "")
        assert line["num_prompt_tokens"] == usage["prompt_tokens"]
        assert line["num_output_tokens"] == usage["completion_tokens"]
        assert 0 < line["ttft_seconds"] <= line["seconds"]


async def test_no_line_contains_text_of_a_client(
    config: Path, keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    chat = "/v1/chat/completions"
    messages = [{"role": "user", "content": SECRET}]
    async with stack(*P_D, config=config, api_keys_dir=keys) as served:
        answers = [
            await ask(served, "POST", chat, json=TEXT | {"messages": messages, "user": SECRET}),
            await ask(served, "POST", chat, json=TEXT | {SECRET: 1}),
            await ask(served, "POST", chat, json=TEXT | {"model": SECRET}),
            await ask(served, "POST", chat, content=SECRET, headers={"content-type": SECRET}),
            await ask(served, "POST", chat, json=TEXT, headers={"x-request-id": SECRET}),
            await ask(served, "POST", chat, json=TEXT, headers={"authorization": SECRET}),
            await ask(served, "GET", f"/{SECRET}?{SECRET}"),
            await ask(served, "GET", f"/v1/models/{SECRET}"),
            await ask(served, "GET", "/v1/models"),
            await ask(served, "DELETE", chat),
            await ask(served, "POST", "/tokenize", json={"model": "shapes", "prompt": SECRET}),
        ]
    found = lines(caplog, answers)
    assert [line["status"] for line in found] == [answer.status_code for answer in answers]
    assert [answer.status_code for answer in answers] == [
        200, 400, 404, 415, 200, 401, 404, 404, 200, 405, 200,
    ]  # fmt: skip
    assert SECRET not in json.dumps(found)
    assert [line["endpoint"] for line in found][6:9] == ["", "/v1/models/{model_id}", "/v1/models"]
    codes = [(answer.json().get("error") or {}).get("code", "") for answer in answers]
    assert [line["code"] for line in found] == codes
    assert codes == [
        "", "unknown_parameter", "model_not_found", "unsupported_media_type", "",
        "invalid_api_key", "unknown_path", "model_not_found", "", "method_not_allowed", "",
    ]  # fmt: skip
    assert [line["tenant"] for line in found] == ["alice"] * 5 + [""] + ["alice"] * 5


async def test_probes_and_preflights_write_no_line(
    config: Path, keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with stack(*P_D, config=config, api_keys_dir=keys) as served:
        for path in ("/healthz", "/readyz", "/health"):
            assert (await ask(served, "GET", path)).status_code == 200
        headers = {"origin": ORIGIN, "access-control-request-method": "POST"}
        preflight = await ask(served, "OPTIONS", "/v1/completions", headers=headers)
        assert preflight.headers["access-control-allow-origin"] == ORIGIN
    assert lines(caplog) == []


async def test_by_default_there_is_no_access_log(
    keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with stack(*P_D, api_keys_dir=keys) as served:
        assert (await ask(served, "POST", "/v1/chat/completions", json=TEXT)).status_code == 200
    assert lines(caplog) == []
    assert "request" in caplog.messages
