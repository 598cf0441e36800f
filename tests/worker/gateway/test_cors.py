"""Pages of allowed origins may call the API from a browser, and no others."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import msgspec
import pytest
from worker.gateway.stack import gateway_settings, serving
from worker.gateway.test_front_door import keys as keys

from vlm_worker.gateway.config import ConfigWatcher
from vlm_worker.gateway.cors import Cors, problem_of

PAGE, OTHER = "https://app.example.com", "https://evil.example"
ASKED = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


def settings(tmp_path: Path, *origins: str, headers: tuple[str, ...] = ()) -> Path:
    path = tmp_path / "gateway.json"
    cors = {"allowed_origins": origins, "allowed_headers": headers}
    path.write_text(json.dumps({"cors": cors}))
    return path


async def sent(url: str, method: str, **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with httpx.AsyncClient() as client:
        return await client.request(method, f"{url}/v1/models", headers=named)


async def test_a_preflight_needs_no_key_and_a_request_does(tmp_path: Path, keys: Path) -> None:
    config = settings(tmp_path, PAGE)
    async with serving(gateway_settings([], config=config, api_keys_dir=keys)) as gateway:
        answer = await sent(gateway.url, "OPTIONS", origin=PAGE, **ASKED)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert answer.headers["access-control-allow-methods"] == "GET, POST"
        assert answer.headers["access-control-allow-headers"] == "authorization,content-type"
        assert "access-control-allow-credentials" not in answer.headers
        refused = await sent(gateway.url, "GET", origin=PAGE)
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == PAGE, "the page reads the error"
        known = await sent(gateway.url, "GET", origin=PAGE, authorization="Bearer alice-key")
        assert known.status_code == 200
        assert known.headers["access-control-allow-origin"] == PAGE
        exposed = known.headers["access-control-expose-headers"]
        assert {"x-request-id", "retry-after", "x-ratelimit-remaining-tokens"} <= set(
            exposed.split(", ")
        )
        assert gateway.context.num_inflight == 0


async def test_another_origin_gets_no_permission(tmp_path: Path, keys: Path) -> None:
    config = settings(tmp_path, PAGE)
    async with serving(gateway_settings([], config=config, api_keys_dir=keys)) as gateway:
        refused = await sent(gateway.url, "OPTIONS", origin=OTHER, **ASKED)
        assert refused.status_code == 400
        assert "access-control-allow-origin" not in refused.headers
        answer = await sent(gateway.url, "GET", origin=OTHER, authorization="Bearer alice-key")
        assert answer.status_code == 200
        assert "access-control-allow-origin" not in answer.headers


async def test_only_the_listed_headers_are_allowed_if_any_is_listed(
    tmp_path: Path, keys: Path
) -> None:
    config = settings(tmp_path, PAGE, headers=("content-type",))
    async with serving(gateway_settings([], config=config, api_keys_dir=keys)) as gateway:
        refused = await sent(gateway.url, "OPTIONS", origin=PAGE, **ASKED)
        assert refused.status_code == 400


async def test_without_origins_nothing_differs(keys: Path) -> None:
    async with serving(gateway_settings([], api_keys_dir=keys)) as gateway:
        asked = await sent(gateway.url, "OPTIONS", origin=PAGE, **ASKED)
        assert asked.status_code == 401
        answer = await sent(gateway.url, "GET", origin=PAGE, authorization="Bearer alice-key")
        headers = {*asked.headers, *answer.headers}
        assert not {name for name in headers if name.startswith("access-control") or name == "vary"}


async def test_a_change_applies_to_the_next_request(tmp_path: Path, keys: Path) -> None:
    config = settings(tmp_path, PAGE)
    async with serving(gateway_settings([], config=config, api_keys_dir=keys)) as gateway:
        assert (await sent(gateway.url, "OPTIONS", origin=OTHER, **ASKED)).status_code == 400
        settings(tmp_path, "*")
        gateway.context.config_watcher.reload()
        answer = await sent(gateway.url, "OPTIONS", origin=OTHER, **ASKED)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "*"


@pytest.mark.parametrize(
    "origin", ["app.example.com", "https://a/path", "https://", "https://a b", ""]
)
def test_what_no_browser_sends_is_refused_with_the_field(tmp_path: Path, origin: str) -> None:
    problem = problem_of(Cors(allowed_origins=(origin,)))
    assert problem is not None
    assert problem.startswith("cors.allowed_origins: ")
    watcher = ConfigWatcher(settings(tmp_path, origin), None, images_per_request=4)
    assert watcher.problem == f"gateway.json: {problem}"
    assert watcher.now.config.cors == Cors()


@pytest.mark.parametrize(
    "origin", ["*", PAGE, "http://localhost:3000", "chrome-extension://abcdef", "https://[::1]:8"]
)
def test_what_browsers_send_is_taken(origin: str) -> None:
    assert problem_of(Cors(allowed_origins=(origin,))) is None
    assert msgspec.json.decode(msgspec.json.encode(Cors((origin,))), type=Cors) == Cors((origin,))
