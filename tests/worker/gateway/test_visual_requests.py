"""Requests with fewer visual tokens, from the client through real workers, in every topology."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from worker.gateway.image_files import ask, png
from worker.gateway.stack import COLOCATED, ONE_PROCESS, TOPOLOGIES, Stack, stack

POLICY = {
    "policy": "Detail",
    "low": {"method": "Diverse", "keep_percent": 25},
    "medium": {"method": "Pool", "keep_percent": 50},
    "max_tokens_per_request": 20,
}


def config_file(folder: Path, **visual: Any) -> Path:
    path = folder / "gateway.json"
    path.write_text(json.dumps({"limits": {"visual": visual}}))
    return path


@pytest.fixture(params=[*TOPOLOGIES, ONE_PROCESS])
async def served(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Stack]:
    is_one = request.param == ONE_PROCESS
    plan = COLOCATED if is_one else TOPOLOGIES[request.param]
    async with stack(*plan, one_process=is_one, config=config_file(tmp_path, **POLICY)) as one:
        yield one


async def answer(served: Stack, *messages: Any, **extra: Any) -> Any:
    api = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
    async with api:
        return await api.chat.completions.create(
            model="shapes", messages=list(messages), max_tokens=12, temperature=0, extra_body=extra
        )


def image_tokens(found: Any) -> int:
    return int(found.usage.prompt_tokens_details.image_tokens)


def text(found: Any) -> str:
    return str(found.choices[0].message.content)


async def test_tiers_of_one_image_share_an_encoding_and_answer_alike_again(served: Stack) -> None:
    """An image of 4 x 3 cells. The answers are checksums of rows and positions."""
    question = ask(png(), "What is this?")
    found = {
        visual: await answer(served, question, visual=visual)
        for visual in ("high", "low", "medium")
    }
    assert {visual: image_tokens(one) for visual, one in found.items()} == {
        "high": 12,
        "low": 3,
        "medium": 6,
    }
    assert len({text(one) for one in found.values()}) == 3
    for visual, one in found.items():
        assert text(await answer(served, question, visual=visual)) == text(one)
    calls = [sum(worker.runner.batch_sizes) for worker in served.workers]
    assert sum(calls) == 1
    await served.until_idle()


async def test_detail_low_is_the_low_tier(served: Stack) -> None:
    question = ask(png(), "What is this?")
    question["content"][0]["image_url"]["detail"] = "low"  # type: ignore[index]
    assert image_tokens(await answer(served, question)) == 3


async def test_a_request_of_too_many_visual_tokens_is_refused_and_a_reduced_one_fits(
    served: Stack,
) -> None:
    question = ask(png(), png((1, 2, 3)), "Which?")
    with pytest.raises(openai.BadRequestError) as caught:
        await answer(served, question)
    assert caught.value.code == "too_many_visual_tokens"
    assert image_tokens(await answer(served, question, visual="low")) == 6


async def test_a_service_without_a_policy_refuses_the_field_and_answers_without_it(
    tmp_path: Path,
) -> None:
    async with stack(*COLOCATED, config=config_file(tmp_path)) as served:
        question = ask(png(), "What is this?")
        with pytest.raises(openai.BadRequestError, match="this service reduces none") as caught:
            await answer(served, question, visual="low")
        assert caught.value.param == "visual"
        with pytest.raises(openai.BadRequestError, match="'visual' must be one of"):
            await answer(served, question, visual="least")
        assert image_tokens(await answer(served, question, visual="off")) == 12
