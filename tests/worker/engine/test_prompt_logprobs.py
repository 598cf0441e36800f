"""Log-probabilities of prompts: each token once, in order, the values that it has alone."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest
from worker.answers import answer_alone, prompt_alone
from worker.engine.talk import about_image, error, events, text, tokens

from vlm_worker.annotations import MAX_LOGPROBS, MAX_PROMPT_LOGPROBS
from vlm_worker.engine.engine import Engine
from vlm_worker.errors import EngineError, InvalidRequestError
from vlm_worker.testing import ChecksumRunner
from vlm_worker.types import PromptLogprobs, Request, TokenEvent

NUM_TOP = 2
MOST_VALUES = 4096
"""Log-probabilities that an event loop encodes or decodes at once: about a millisecond."""


def values_of(told: list[Any]) -> list[tuple[int, float, int]]:
    """Index, log-probability and rank of each token, in the order in which they came."""
    return [
        (part.first_index + number, one, rank)
        for part in told
        if isinstance(part, PromptLogprobs)
        for number, (one, rank) in enumerate(zip(part.logprobs, part.ranks, strict=True))
    ]


def expected(request: Request) -> list[tuple[int, float, int]]:
    values = enumerate(prompt_alone(request), 1)
    return [(index, value, int(-value * 8)) for index, value in values]


def scored(name: str = "r", *, length: int = 10, **sampling: Any) -> Request:
    return text(name, length=length, **{"num_prompt_logprobs": NUM_TOP, **sampling})


@pytest.mark.parametrize("budget", [5, 7, 16])
@pytest.mark.parametrize("for_peer", [False, True])
async def test_any_chunking_gives_the_same_values_before_the_first_token(
    start: Any, budget: int, for_peer: bool
) -> None:
    request = scored(length=30)
    engine: Engine = start(max_num_batched_tokens=budget)
    told = await events(engine.submit_prefill(request, for_peer=for_peer))
    assert values_of(told) == expected(request)
    kinds = [type(event) for event in told]
    last = max(at for at, kind in enumerate(kinds) if kind is PromptLogprobs)
    assert last < kinds.index(TokenEvent)
    assert tokens(told) == answer_alone(request)[: 1 if for_peer else None]
    parts = [part for part in told if isinstance(part, PromptLogprobs)]
    assert {part.num_top for part in parts} == {NUM_TOP}
    best = [token_id for part in parts for token_id in part.top_ids[::NUM_TOP]]
    assert best == list(request.token_ids[1:])
    await engine.release(request.key)


async def test_a_cached_prompt_is_scored_again_and_gives_the_same(start: Any) -> None:
    engine: Engine = start()
    await events(engine.submit_prefill(text("before", length=30), for_peer=False))
    request = scored(length=30)
    told = await events(engine.submit_prefill(request, for_peer=False))
    assert values_of(told) == expected(request)
    (first,) = [event for event in told if isinstance(event, TokenEvent) and event.index == 0]
    assert first.num_cached_tokens == 0
    again = await events(engine.submit_prefill(text("after", length=30), for_peer=False))
    first = next(event for event in again if isinstance(event, TokenEvent))
    assert first.num_cached_tokens == 28, "a request without them hits what this one has written"


async def test_together_equals_alone(start: Any) -> None:
    engine: Engine = start(max_num_batched_tokens=11)
    requests = [
        dataclasses.replace(
            scored(f"r{number}", length=length, num_prompt_logprobs=wanted),
            token_ids=tuple(range(100 * number + 100, 100 * number + 100 + length)),
        )
        for number, (length, wanted) in enumerate([(1, 2), (2, 0), (19, None), (30, 5), (8, 2)])
    ]
    told = await asyncio.gather(
        *(events(engine.submit_prefill(one, for_peer=False)) for one in requests)
    )
    for request, answer in zip(requests, told, strict=True):
        wanted = request.sampling.num_prompt_logprobs
        assert values_of(answer) == ([] if wanted is None else expected(request))
        assert tokens(answer) == answer_alone(request)
        parts = [one for one in answer if isinstance(one, PromptLogprobs)]
        assert {one.num_top for one in parts} <= {wanted}


async def test_preempted_sequences_give_each_value_once(start: Any) -> None:
    requests = [scored(f"r{number}", length=20, max_tokens=30, seed=number) for number in range(4)]
    requests = [
        dataclasses.replace(one, token_ids=tuple(range(at + 100, at + 120)), priority=-at)
        for at, one in enumerate(requests)
    ]
    engine: Engine = start(ChecksumRunner(num_blocks=18), max_num_batched_tokens=6)
    told = await asyncio.gather(
        *(events(engine.submit_prefill(one, for_peer=False)) for one in requests)
    )
    assert engine.stats().count("preemptions") > 0
    for request, answer in zip(requests, told, strict=True):
        assert values_of(answer) == expected(request)
        assert tokens(answer) == answer_alone(request)


async def test_a_continued_answer_without_them_gives_none(start: Any) -> None:
    whole = answer_alone(text())
    request = text(num_prompt_logprobs=None)
    later = dataclasses.replace(request, token_ids=(*request.token_ids, *whole[:2]))
    told = await events(start().submit_prefill(later, for_peer=False))
    assert values_of(told) == []
    assert tokens(told) == whole[2:]


@pytest.mark.parametrize("length", [12, 30])
async def test_a_prompt_whose_logits_are_not_finite_fails_alone(start: Any, length: int) -> None:
    """Also in a chunk of which no token is sampled."""
    runner = ChecksumRunner()
    runner.faults.poison_token = 20
    engine: Engine = start(runner, max_num_batched_tokens=16)
    bad, good = scored("bad", length=length), scored("good")
    good = dataclasses.replace(good, token_ids=tuple(range(100, 110)))
    told, fine = await asyncio.gather(
        *(events(engine.submit_prefill(one, for_peer=False)) for one in (bad, good))
    )
    assert isinstance(error(told), EngineError)
    assert values_of(told) == []
    assert values_of(fine) == expected(good)
    runner.faults.poison_token = None
    again = text("again", length=length)
    first = next(
        event
        for event in await events(engine.submit_prefill(again, for_peer=False))
        if isinstance(event, TokenEvent)
    )
    assert first.num_cached_tokens == 0, "its KV is not in the cache"


async def test_images_have_no_log_probabilities_and_are_refused_by_name(start: Any) -> None:
    request = about_image()
    sampling = dataclasses.replace(request.sampling, num_prompt_logprobs=0)
    request = dataclasses.replace(request, sampling=sampling)
    refused = error(await events(start().submit_prefill(request, for_peer=False)))
    assert isinstance(refused, InvalidRequestError)
    assert refused.param == "prompt_logprobs"


async def test_a_message_has_a_bounded_number_of_values(start: Any) -> None:
    length = MAX_PROMPT_LOGPROBS + 40
    engine: Engine = start(
        ChecksumRunner(num_blocks=400), max_model_len=1200, max_num_batched_tokens=1200
    )
    request = scored(length=length, max_tokens=1)
    told = await events(engine.submit_prefill(request, for_peer=False))
    parts = [len(one.logprobs) for one in told if isinstance(one, PromptLogprobs)]
    assert parts == [MAX_PROMPT_LOGPROBS, 39]
    assert MAX_PROMPT_LOGPROBS * (MAX_LOGPROBS + 1) <= MOST_VALUES
    assert values_of(told) == expected(request)
