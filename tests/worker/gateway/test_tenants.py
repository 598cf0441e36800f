"""A tenant beyond its limits gets 429 with OpenAI's headers, and others do not notice."""

from __future__ import annotations

import asyncio
import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from worker.gateway.image_files import ask, png
from worker.gateway.stack import COLOCATED, EPD, P_D, Stack, stack
from worker.gateway.test_front_door import TEXT, api

from vlm_worker.core.fair_order import FairOrder, Rank
from vlm_worker.gateway.waiters import Place, Waiters

NAMES = ("requests", "tokens")


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    directory = tmp_path / "keys"
    directory.mkdir()
    for tenant in ("alice", "bob"):
        (directory / tenant).write_text(f"{tenant}-key")
    return directory


def settings(tmp_path: Path, **config: Any) -> Path:
    path = tmp_path / "gateway.json"
    path.write_text(json.dumps(config))
    return path


async def post(served: Stack, tenant: str = "alice", path: str = "/v1/chat/completions",
               **changes: Any) -> httpx.Response:  # fmt: skip
    async with httpx.AsyncClient(timeout=60) as client:
        return await client.post(
            f"{served.url}{path}",
            json=TEXT | changes,
            headers={"authorization": f"Bearer {tenant}-key"},
        )


def of_limits(response: httpx.Response) -> dict[str, str]:
    return {k: v for k, v in response.headers.items() if k.startswith("x-ratelimit-")}


async def until_none_runs(served: Stack, tenant: str = "alice") -> None:
    """A request ends after its client has the last byte."""
    account = served.gateway.context.rate_limits.accounts[tenant]
    async with asyncio.timeout(60):
        while account.num_running:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def metrics(served: Stack) -> str:
    async with httpx.AsyncClient() as client:
        return (await client.get(f"{served.gateway.admin_url}/metrics")).text


async def test_requests_beyond_the_limit_get_429_and_other_tenants_do_not(
    tmp_path: Path, keys: Path
) -> None:
    config = settings(tmp_path, tenants={"alice": {"requests_per_minute": 2}})
    async with stack(*COLOCATED, config=config, api_keys_dir=keys) as served:
        answers = [await post(served) for _ in range(3)]
        assert [one.status_code for one in answers] == [200, 200, 429]
        remaining = [one.headers["x-ratelimit-remaining-requests"] for one in answers]
        assert remaining == ["1", "0", "0"]
        refused = answers[2]
        assert refused.headers["x-ratelimit-limit-requests"] == "2"
        assert 1 <= int(refused.headers["retry-after"]) <= 30
        error = refused.json()["error"]
        assert error["code"] == "rate_limit_exceeded"
        assert error["type"] == "rate_limit_error"
        assert "2 per minute" in error["message"]
        other = await post(served, "bob")
        assert other.status_code == 200
        assert of_limits(other) == {}
        page = await metrics(served)
        assert 'triptych_tenant_requests_total{tenant="alice"} 2.0' in page
        assert 'triptych_tenant_refused_total{limit="requests",tenant="alice"} 1.0' in page
        assert 'tenant="bob"' not in page
        assert 'triptych_requests_total{outcome="rejected"} 1.0' in page


async def test_tokens_of_prompts_and_answers_are_counted(tmp_path: Path, keys: Path) -> None:
    config = settings(tmp_path, tenants={"*": {"tokens_per_minute": 100_000}})
    async with stack(*P_D, config=config, api_keys_dir=keys) as served:
        for stream in (False, True):
            usage = (await post(served, n=2, temperature=0)).json()["usage"]
            before = served.gateway.context.rate_limits.accounts["alice"]
            counts = before.num_prompt_tokens, before.num_output_tokens
            answer = await post(served, stream=stream, n=2, temperature=0)
            assert answer.status_code == 200
            assert set(of_limits(answer)) == {
                f"x-ratelimit-{what}-tokens" for what in ("limit", "remaining", "reset")
            }
            account = served.gateway.context.rate_limits.accounts["alice"]
            assert account.num_prompt_tokens - counts[0] == usage["prompt_tokens"]
            assert account.num_output_tokens - counts[1] == usage["completion_tokens"]
        await until_none_runs(served)


async def test_a_completion_of_no_tokens_is_charged_its_prompt_alone(
    tmp_path: Path, keys: Path
) -> None:
    config = settings(tmp_path, tenants={"*": {"tokens_per_minute": 100_000}})
    body = {"model": "shapes", "prompt": ["a red circle", "two"], "n": 2, "temperature": 1}
    async with stack(*COLOCATED, config=config, api_keys_dir=keys) as served:
        async with httpx.AsyncClient(timeout=60) as client:
            answer = await client.post(
                f"{served.url}/v1/completions",
                json={**body, "echo": True, "max_tokens": 0},
                headers={"authorization": "Bearer alice-key"},
            )
        usage = answer.json()["usage"]
        await until_none_runs(served)
        account = served.gateway.context.rate_limits.accounts["alice"]
        assert account.num_prompt_tokens == usage["prompt_tokens"] > 0
        assert account.num_output_tokens == usage["completion_tokens"] == 0
        assert served.gateway.context.meters.num_output_tokens == 0


async def test_a_tenant_in_debt_waits_until_its_tokens_are_refilled(
    tmp_path: Path, keys: Path
) -> None:
    config = settings(tmp_path, tenants={"alice": {"tokens_per_minute": 1}})
    async with stack(*COLOCATED, config=config, api_keys_dir=keys) as served:
        assert (await post(served)).status_code == 200, "a full bucket allows any prompt"
        refused = await post(served)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) > 60
        assert refused.headers["x-ratelimit-remaining-tokens"] == "0"
        assert (await post(served, "bob")).status_code == 200
        await until_none_runs(served)


async def test_every_endpoint_counts_for_requests(tmp_path: Path, keys: Path) -> None:
    config = settings(tmp_path, tenants={"*": {"requests_per_minute": 2}})
    async with stack(*COLOCATED, config=config, api_keys_dir=keys) as served:
        for _ in range(2):
            assert (await post(served, path="/tokenize", max_tokens=None)).status_code < 429
        for path in ("/v1/responses", "/v1/completions", "/v1/chat/completions", "/detokenize"):
            assert (await post(served, path=path)).status_code == 429, path


async def test_requests_at_once_are_limited_until_one_ends(tmp_path: Path, keys: Path) -> None:
    config = settings(tmp_path, tenants={"*": {"concurrent_requests": 1}})
    async with stack(*COLOCATED, config=config, api_keys_dir=keys) as served:
        running = served.gateway.context.charge("alice")
        running.start(now=0.0)
        async with api(served.url, "alice-key") as client:
            with pytest.raises(openai.RateLimitError):
                await client.chat.completions.create(**TEXT)
        assert (await post(served, "bob")).status_code == 200
        running.end()
        for stream in (True, False, False):
            assert (await post(served, stream=stream)).status_code == 200
            await until_none_runs(served)


async def test_limits_are_divided_by_the_gateways_that_are_ready(
    tmp_path: Path, keys: Path
) -> None:
    config = settings(tmp_path, tenants={"*": {"requests_per_minute": 4}})
    async with stack(*COLOCATED, config=config, api_keys_dir=keys) as served:
        served.gateway.context.note_gateways(2)
        statuses = [(await post(served)).status_code for _ in range(3)]
        assert statuses == [200, 200, 429]
        served.gateway.context.note_gateways(0)
        assert served.gateway.context.rate_limits.num_gateways == 1


async def test_without_tenants_nothing_differs(keys: Path) -> None:
    async with stack(*COLOCATED, api_keys_dir=keys) as served:
        answer = await post(served)
        assert answer.status_code == 200
        assert of_limits(answer) == {}
        assert "triptych_tenant" not in await metrics(served)
        assert not served.gateway.context.rate_limits.accounts


@pytest.mark.parametrize("weight", [None, 3])
async def test_requests_wait_as_their_tenants_if_one_has_a_weight(
    tmp_path: Path, keys: Path, weight: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[tuple[str, bool]] = []
    place = Waiters.place

    def noted(self: Waiters, **options: Any) -> AbstractContextManager[Place]:
        waits.append((options.get("tenant", ""), options.get("seconds", 0.0) > 0))
        return place(self, **options)

    config = settings(tmp_path, wake_timeout_seconds=0.2, tenants={"bob": {"weight": weight}})
    async with stack(config=config, api_keys_dir=keys) as served:
        monkeypatch.setattr(Waiters, "place", noted)
        assert (await post(served)).status_code == 503
        assert (await post(served, "bob")).status_code == 503
        context = served.gateway.context
        assert context.registry.waiters.weight_of("bob") == (weight or 1)
        assert context.registry.waiters.weight_of("alice") == 1
    expected = {("alice", True), ("bob", True)} if weight else {("", False)}
    assert set(waits) == expected


@pytest.mark.parametrize("weight", [None, 4])
async def test_pods_know_the_weighted_work_of_a_tenant(
    tmp_path: Path, keys: Path, weight: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each image and each prompt takes a turn in its queue, as one of its tenant."""
    ranks: list[Rank] = []
    admitted = FairOrder.admitted

    def noted(self: FairOrder, rank: Rank) -> float:
        ranks.append(rank)
        return admitted(self, rank)

    config = settings(tmp_path, tenants={"bob": {"weight": weight}})
    async with stack(*EPD, config=config, api_keys_dir=keys) as served:
        monkeypatch.setattr(FairOrder, "admitted", noted)
        for tenant in ("alice", "bob"):
            assert (
                await post(served, tenant, messages=[ask("What is this?", png())])
            ).status_code == 200
    tenants = {rank.tenant for rank in ranks}
    assert len(tenants) == 2
    seconds = [
        sum(rank.weighted_seconds for rank in ranks if rank.tenant == one) for one in tenants
    ]
    if weight is None:
        assert seconds == [0.0, 0.0]
    else:
        assert min(seconds) > 0
        assert max(seconds) > 2 * min(seconds)
