"""Bad requests, against a gateway that has no worker: what is refused here reached no model."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from worker.gateway.corpus import FIT_ROWS, JSON_ROWS, Bad, chat
from worker.gateway.corpus_fields import FIELD_ROWS
from worker.gateway.corpus_images import IMAGE_ROWS
from worker.gateway.corpus_messages import MESSAGE_ROWS
from worker.gateway.corpus_tools import TOOL_ROWS
from worker.gateway.stack import gateway_settings, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

ALL = [*JSON_ROWS, *FIELD_ROWS, *MESSAGE_ROWS, *FIT_ROWS, *IMAGE_ROWS, *TOOL_ROWS]

# Addresses in memory, paths, stack traces, module names.
LEAKS = re.compile(r"0x[0-9a-f]{6,}|/usr|/home|/root|Traceback|\bline \d+|msgspec|Error\b")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api() -> AsyncIterator[httpx.AsyncClient]:
    async with (
        serving(gateway_settings([])) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=30) as client,
    ):
        yield client


async def test_the_corpus_is_large_and_its_rows_have_names() -> None:
    assert len(ALL) >= 60
    assert len({row.id for row in ALL}) == len(ALL)


@pytest.mark.parametrize("row", [pytest.param(row, id=row.id) for row in ALL])
async def test_a_bad_request_is_refused_naming_its_part(api: httpx.AsyncClient, row: Bad) -> None:
    body = row.body if isinstance(row.body, bytes) else json.dumps(row.body).encode()
    headers = {"content-type": "application/json", **dict(row.headers)}
    answer = await api.post(row.path, content=body, headers=headers)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (row.status, row.code, row.param)
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert not LEAKS.search(error["message"]), error["message"]
    assert re.fullmatch("[0-9a-f]{32}", answer.headers["x-request-id"])


async def test_a_good_request_without_workers_gets_a_retry_time(api: httpx.AsyncClient) -> None:
    answer = await api.post("/v1/chat/completions", json=chat())
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.json()["error"]["type"] == "server_error"


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/nothing", 404, "unknown_path"),
        ("GET", "//v1/models", 404, "unknown_path"),
        ("GET", "/v1/models/", 404, "model_not_found"),
        ("GET", "/v1/models/other", 404, "model_not_found"),
        ("GET", "/stats", 404, "unknown_path"),
    ],
)
async def test_an_unknown_path_is_answered_in_the_same_shape(
    api: httpx.AsyncClient, method: str, path: str, status: int, code: str
) -> None:
    answer = await api.request(method, path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


async def test_a_wrong_path_or_method_is_told_what_there_is(api: httpx.AsyncClient) -> None:
    nothing = await api.post("/chat/completions", json=chat())
    assert "/v1/chat/completions, " in nothing.json()["error"]["message"]
    wrong = await api.get("/v1/chat/completions")
    assert wrong.headers["allow"] == "POST"
    assert wrong.json()["error"]["message"] == "This path takes POST."


@pytest.mark.parametrize(
    ("field", "meant"),
    [("max_token", ": is 'max_tokens' meant?"), ("Temperature", ": is 'temperature' meant?"),
     ("guided_grammar", "."), ("max_takens", ": is 'max_tokens' meant?"), ("min_chars", ".")],
)  # fmt: skip
async def test_a_field_that_is_misspelt_is_told_which_is_meant(
    api: httpx.AsyncClient, field: str, meant: str
) -> None:
    answer = await api.post("/v1/chat/completions", json=chat(**{field: 1}))
    error = answer.json()["error"]
    assert (error["message"], error["param"]) == (
        f"'{field}' is not a known parameter{meant}",
        field,
    )


async def test_a_client_s_request_id_is_not_ours(api: httpx.AsyncClient) -> None:
    answer = await api.get("/v1/models", headers={"x-request-id": "mine\twith spaces" * 100})
    assert "mine" not in answer.headers["x-request-id"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4)
    ),
    max_leaves=12,
)
NAMES = st.sampled_from(
    ["model", "messages", "temperature", "max_tokens", "stop", "stream", "stream_options", "seed",
     "n", "tools", "tool_choice", "metadata", "user", "prompt", "logit_bias", "logprobs",
     "top_logprobs", "top_k",
     "min_p", "repetition_penalty", "presence_penalty", "ignore_eos", "priority", "x"]
)  # fmt: skip


@given(st.dictionaries(NAMES, JSON, max_size=6), st.booleans())
@settings(max_examples=150, suppress_health_check=list(HealthCheck))
async def test_no_body_is_ever_our_fault(
    api: httpx.AsyncClient, changes: dict[str, object], keep: bool
) -> None:
    body = json.dumps({**chat(), **changes} if keep else changes).encode()
    for path in ("/v1/chat/completions", "/v1/completions"):
        headers = {"content-type": "application/json"}
        answer = await api.post(path, content=body, headers=headers)
        # 503 is the true answer to a good request: there are no workers.
        assert answer.status_code in (400, 404, 503), answer.text
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@given(st.binary(max_size=200))
@settings(max_examples=100, suppress_health_check=list(HealthCheck))
async def test_no_bytes_are_ever_our_fault(api: httpx.AsyncClient, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    answer = await api.post("/v1/chat/completions", content=body, headers=headers)
    assert answer.status_code == 400
