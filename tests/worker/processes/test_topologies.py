"""The same request gives the same tokens, wherever its stages run."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest
from worker.processes.alone import expected
from worker.processes.conftest import png
from worker.processes.driver import Driver, Prompt
from worker.processes.workers import Worker, started

RED, BLUE, GREEN = png((255, 0, 0)), png((0, 0, 255), 84, 56), png((0, 255, 0), 56, 56)


def prompts(driver: Driver) -> dict[str, Prompt]:
    image = driver.family.image_token_id
    return {
        "text": Prompt([101, 102, 103, 104, 105]),
        "one image": Prompt([101, image, 102], [RED]),
        "several images": Prompt([101, image, 102, image, image, 103], [RED, BLUE, GREEN]),
        "one token": Prompt([101, image], [RED], max_tokens=1),
        "a long prompt": Prompt([100 + i % 50 for i in range(600)], max_tokens=40),
    }


TOPOLOGIES = {
    "E-P-D": {"encoder": "encoder", "prefill": "prefill", "decode": "decode"},
    "E-PD": {"encoder": "encoder", "decode": "prefill,decode"},
    "P-D": {"prefill": "encoder,prefill", "decode": "decode"},
    "colocated": {"decode": "encoder,prefill,decode"},
}


@pytest.mark.parametrize("topology", TOPOLOGIES)
async def test_every_topology_answers_as_the_model_alone_and_gives_everything_back(
    driver: Driver, topology: str
) -> None:
    async with AsyncExitStack() as stack:
        workers: dict[str, Worker] = {}
        for role, stages in TOPOLOGIES[topology].items():
            worker = await stack.enter_async_context(started(role, f"--stages={stages}"))
            workers |= dict.fromkeys(stages.split(","), worker)
        for name, prompt in prompts(driver).items():
            # the second time every cache is warm
            for attempt in ("cold", "warm"):
                answer = await driver.answer(
                    prompt,
                    encoder=workers["encoder"].address,
                    prefill=workers["prefill"].address,
                    decode=workers["decode"].address,
                )
                assert answer.token_ids == expected(driver, prompt), (name, attempt)
        for worker in workers.values():
            await worker.until_idle(seconds=5)


async def test_an_encoder_that_lends_answers_text_while_it_encodes_for_others(
    driver: Driver,
) -> None:
    flags = "--stages=encoder,prefill,decode", "--max-lent-requests=2"
    async with started("encoder", *flags) as e, started("decode", "--stages=prefill,decode") as d:
        own = {"encoder": e.address, "prefill": d.address, "decode": d.address}
        lent = dict.fromkeys(own, e.address)
        many = list(prompts(driver).items()) * 3
        answers = await asyncio.gather(
            *(driver.answer(prompt, **(own if prompt.images else lent)) for _, prompt in many)
        )
        for (name, prompt), answer in zip(many, answers, strict=True):
            assert answer.token_ids == expected(driver, prompt), name
        for worker in (e, d):
            await worker.until_idle(seconds=5)


async def test_requests_that_run_together_answer_as_they_do_alone(driver: Driver) -> None:
    async with started("encoder") as e, started("prefill") as p, started("decode") as d:
        wanted = {name: expected(driver, prompt) for name, prompt in prompts(driver).items()}
        many = list(prompts(driver).items()) * 4
        answers = await asyncio.gather(
            *(
                driver.answer(prompt, encoder=e.address, prefill=p.address, decode=d.address)
                for _, prompt in many
            )
        )
        for (name, _), answer in zip(many, answers, strict=True):
            assert answer.token_ids == wanted[name], name
        for worker in (e, p, d):
            await worker.until_idle(seconds=5)


async def test_an_answer_continued_from_delivered_tokens_is_the_same_answer(driver: Driver) -> None:
    prompt = prompts(driver)["several images"]
    async with started("encoder") as e, started("prefill") as p, started("decode") as d:
        whole = await driver.answer(prompt, encoder=e.address, prefill=p.address, decode=d.address)
        continued = await driver.answer(
            prompt,
            encoder=e.address,
            prefill=p.address,
            decode=d.address,
            key=driver.key(attempt=2),
            delivered=tuple(whole.token_ids[:7]),
        )
        assert continued.token_ids == whole.token_ids


async def test_a_stage_delayed_on_purpose_is_the_one_that_reports_the_time(driver: Driver) -> None:
    prompt = prompts(driver)["one image"]
    flags = [f"--inject-delay-ms={stage}=150" for stage in ("encode", "embed_transfer")]
    async with (
        started("encoder", flags[0]) as e,
        started("prefill", flags[1]) as p,
        started("decode", "--inject-delay-ms=kv_transfer=150") as d,
    ):
        answer = await driver.answer(prompt, encoder=e.address, prefill=p.address, decode=d.address)
    durations = {span.stage: span.end - span.start for span in answer.spans}
    assert durations["encode"] >= 0.15
    assert durations["embed_transfer"] >= 0.15
    assert durations["kv_transfer"] >= 0.15
    assert durations["media"] < 0.15
    assert durations["encoder_queue"] < 0.15
    assert durations["prefill_queue"] < 0.15
