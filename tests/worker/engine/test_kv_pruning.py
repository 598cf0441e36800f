"""An engine that prunes KV: answers, failures of its calls, cancels, and what it counts."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import numpy as np
import pytest
from worker.answers import answer_alone, make_image
from worker.engine.by_hand import ByHand
from worker.engine.talk import error, events, first_token, tokens

from vlm_worker.core.step_values import StepInputs
from vlm_worker.errors import EngineError
from vlm_worker.testing import IMAGE_TOKEN, ChecksumRunner
from vlm_worker.types import FinishedEvent, ImageItem, Request, RequestKey, SamplingParams

PERMILLE = 500


def conversation(
    name: str = "r", *, history: int = 300, delivered: int = 0, **sampling: Any
) -> Request:
    params = SamplingParams(**{"max_tokens": 6, "ignore_eos": True, **sampling})
    length = history + 14
    token_ids = (*(20 + i % 40 for i in range(length)), *[3, 4, 5][:delivered])
    return Request(RequestKey(name, 0), token_ids, length, params, num_history_tokens=history)


def runner() -> ChecksumRunner:
    return ChecksumRunner(257)


def count_observed(own: ChecksumRunner) -> list[np.ndarray]:
    """The masses that a runner computes from now on."""
    observe, observed = own.attention_mass, []

    def noted(inputs: StepInputs) -> np.ndarray:
        observed.append(observe(inputs))
        return observed[-1]

    own.attention_mass = noted  # type: ignore[method-assign]
    return observed


OPTIONS = {"max_model_len": 512, "max_num_batched_tokens": 64}


@pytest.mark.parametrize("delivered", [0, 2])
async def test_an_answer_is_computed_from_what_was_kept(start: Any, delivered: int) -> None:
    engine = start(runner(), kv_prune_text=PERMILLE, **OPTIONS)
    request = conversation(delivered=delivered)
    told = await events(engine.submit_prefill(request, for_peer=False))
    whole = answer_alone(request, kept_permille=PERMILLE)
    assert tokens(told) == whole[delivered:]
    assert whole[delivered:] != answer_alone(request)[delivered:], "pruning changed nothing"
    stats = engine.stats()
    assert stats.count("kv_pruned_sequences") == 1
    assert stats.count("kv_pruned_tokens") == (300 - 4) // 2
    assert stats.kv.running_tokens == 0


class SlowPruning(ChecksumRunner):
    """On its clock, an observation takes 5 s, a copy 2 s, and everything else nothing."""

    now = 100.0

    def attention_mass(self, inputs: Any) -> np.ndarray:
        self.now += 5
        return super().attention_mass(inputs)

    def move_rows(self, sources: np.ndarray, targets: np.ndarray) -> None:
        self.now += 2
        super().move_rows(sources, targets)


async def test_the_time_of_pruning_is_counted(start: Any) -> None:
    slow = SlowPruning(257)
    engine = start(slow, kv_prune_text=PERMILLE, clock=lambda: slow.now, **OPTIONS)
    seconds = []
    for name, history in (("none", 40), ("one", 300), ("two", 300)):
        request = conversation(name, history=history)
        await events(engine.submit_prefill(request, for_peer=False))
        seconds.append(engine.stats().count("kv_prune_seconds"))
    slow.faults.move_error = MemoryError("no memory")
    assert error(await events(engine.submit_prefill(conversation("bad"), for_peer=False)))
    seconds.append(engine.stats().count("kv_prune_seconds"))
    assert seconds == [0, 7, 14, 21]


@pytest.mark.parametrize("delivered", [0, 2])
async def test_a_prompt_that_this_process_adopts_is_pruned(start: Any, delivered: int) -> None:
    engine = start(runner(), kv_prune_text=PERMILLE, **OPTIONS)
    for name, is_early in (("late", False), ("early", True)):
        request = conversation(name, delivered=delivered)
        stream = engine.submit_prefill(request, for_peer=True)
        adopted = engine.adopt_local(request) if is_early else None
        first = await events(stream)
        rest = await events(adopted or engine.adopt_local(request))
        whole = answer_alone(request, kept_permille=PERMILLE)
        assert [*tokens(first), *tokens(rest)] == whole[delivered:]


async def test_a_second_request_hits_the_original_prompt(start: Any) -> None:
    engine = start(runner(), kv_prune_text=PERMILLE, **OPTIONS)
    for name, num_cached in (("a", 0), ("b", 312)):
        request = conversation(name)
        told = await events(engine.submit_prefill(request, for_peer=False))
        assert tokens(told) == answer_alone(request, kept_permille=PERMILLE)
        assert told[1].num_cached_tokens == num_cached


@pytest.mark.parametrize(
    ("permille", "history"), [(0, 300), (1000, 300), (PERMILLE, 255), (PERMILLE, 0)]
)
async def test_nothing_is_pruned_if_off_or_without_a_long_history(
    start: Any, permille: int, history: int
) -> None:
    engine = start(runner(), kv_prune_text=permille, **OPTIONS)
    request = conversation(history=history)
    told = await events(engine.submit_prefill(request, for_peer=False))
    assert tokens(told) == answer_alone(request)
    assert engine.stats().count("kv_pruned_sequences") == 0


@pytest.mark.parametrize("fault", ["observe_error", "move_error"])
async def test_if_a_call_of_the_runner_fails_only_that_sequence_fails(
    start: Any, fault: str
) -> None:
    faulty = runner()
    engine = start(faulty, kv_prune_text=PERMILLE, **OPTIONS)
    setattr(faulty.faults, fault, MemoryError("no memory"))
    told = await events(engine.submit_prefill(conversation("a"), for_peer=False))
    assert isinstance(error(told), EngineError)
    assert engine.stats().kv.running_tokens == 0
    assert engine.stats().count("out_of_memory") == 1
    short = conversation("b", history=40)
    assert tokens(await events(engine.submit_prefill(short, for_peer=False))) == answer_alone(short)
    setattr(faulty.faults, fault, None)
    request = conversation("c")
    told = await events(engine.submit_prefill(request, for_peer=False))
    assert tokens(told) == answer_alone(request, kept_permille=PERMILLE)


async def test_a_cancelled_answer_frees_its_copies(start: Any) -> None:
    engine = start(runner(), kv_prune_text=PERMILLE, **OPTIONS)
    request = conversation(max_tokens=190)
    stream = engine.submit_prefill(request, for_peer=False)
    await first_token(stream)
    await engine.cancel(request.key)
    await events(stream)
    assert engine.stats().kv.running_tokens == 0
    assert engine.stats().kv.free_tokens + engine.stats().kv.cached_tokens == 1024


async def test_conversations_in_a_small_pool_get_the_answers_of_each_alone(start: Any) -> None:
    engine = start(ChecksumRunner(131), kv_prune_text=PERMILLE, **OPTIONS)
    requests = [
        conversation(str(number), history=280 + number // 2, max_tokens=40 + number)
        for number in range(6)
    ]
    told = await asyncio.gather(
        *(events(engine.submit_prefill(request, for_peer=False)) for request in requests)
    )
    for request, answer in zip(requests, told, strict=True):
        assert tokens(answer) == answer_alone(request, kept_permille=PERMILLE)
    assert engine.stats().count("kv_pruned_sequences") >= 6
    assert engine.stats().kv.running_tokens == 0


@pytest.mark.parametrize("num_blocks", [233, 237, 241])
async def test_an_image_whose_sequence_gives_its_blocks_for_pruning_is_computed_later(
    start: Any, num_blocks: int
) -> None:
    """The victim may be admitted again in the same turn, and then needs its embedding."""
    own = ChecksumRunner(num_blocks)
    engine = start(
        own, max_model_len=640, max_num_seqs=4, max_num_batched_tokens=64, long_prefill_tokens=24,
        kv_prune_text=PERMILLE,
    )  # fmt: skip
    image = make_image(1, num_tokens=200)
    encoded = engine.encode(RequestKey("encoded", 0), [image])
    await anext(aiter(encoded))
    engine.release_embedding(RequestKey("encoded", 0), 0)
    history = tuple(20 + i % 40 for i in range(400))
    params = SamplingParams(max_tokens=150, ignore_eos=True)
    sharing = Request(RequestKey("sharing", 0), history, 400, params)
    running = engine.submit_prefill(sharing, for_peer=False)
    await first_token(running)

    seen = Request(
        RequestKey("seen", 0),
        (*range(60, 80), *[IMAGE_TOKEN] * 200, *range(20, 40)),
        240,
        dataclasses.replace(params, max_tokens=4),
        (ImageItem(image.image_key, 20, 200, image.grid_thw),),
    )
    last = tuple(20 + (i * 7 + 3) % 40 for i in range(60))
    pruned = Request(
        RequestKey("pruned", 0),
        history + last,
        460,
        dataclasses.replace(params, max_tokens=6),
        num_history_tokens=400,
        priority=1,
    )
    own.gate.clear()  # both arrive in one turn
    first = engine.submit_prefill(seen, for_peer=False)
    second = engine.submit_prefill(pruned, for_peer=False)
    own.gate.set()
    told = await asyncio.gather(events(first), events(second), events(running))
    assert all(isinstance(one[-1], FinishedEvent) for one in told)
    assert tokens(told[1]) == answer_alone(pruned, kept_permille=PERMILLE)
    assert engine.stats().count("preemptions") > 0


async def test_kv_whose_attention_is_not_finite_leaves_the_cache(start: Any) -> None:
    own = runner()
    engine = start(own, kv_prune_text=PERMILLE, **OPTIONS)
    observe = own.attention_mass
    own.attention_mass = lambda inputs: np.full_like(observe(inputs), np.nan)  # type: ignore[method-assign]
    told = await events(engine.submit_prefill(conversation("a", delivered=2), for_peer=False))
    assert isinstance(error(told), EngineError)
    own.attention_mass = observe  # type: ignore[method-assign]
    told = await events(engine.submit_prefill(conversation("b"), for_peer=False))
    assert told[1].num_cached_tokens == 0
    assert tokens(told) == answer_alone(conversation("b"), kept_permille=PERMILLE)


@pytest.mark.parametrize(
    ("permille", "same_prompt", "num_blocks", "num_observed"),
    [
        (0, True, 183, 0),
        (700, True, 154, 1),
        (500, True, 134, 1),
        (0, False, 190, 0),
        (700, False, 665, 8),
    ],
)
def test_the_choices_of_a_request_share_the_blocks_of_their_pruned_prompt(
    permille: int, same_prompt: bool, num_blocks: int, num_observed: int
) -> None:
    """The figures of decision 0051: blocks of 4 tokens; the first choice begins before the rest.

    Prompts that differ in the last turn have other attention, and share nothing.
    """
    engine = ByHand(1025, max_model_len=512, max_num_seqs=8, kv_prune_text=permille)
    requests = []
    for number in range(8):
        name = str(number)
        request = conversation(name, history=400, max_tokens=40, temperature=0.7, seed=number)
        if not same_prompt:
            token_ids = (*request.token_ids[:-4], 60 + number, *request.token_ids[-3:])
            request = dataclasses.replace(request, token_ids=token_ids)
        requests.append(request)
    observed = count_observed(engine.runner)
    engine.submit(requests[0])
    while not engine.tokens("0"):
        engine.turn()
    for request in requests[1:]:
        engine.submit(request)
    num_used = []
    while engine.turn():
        num_used.append(engine.state.sequences.pool.num_used)
    pool = engine.state.sequences.pool
    assert max(num_used[len(num_used) // 2 :]) == num_blocks
    assert len(observed) == num_observed
    assert pool.num_used == 0
    for request in requests:
        name = request.key.request_id
        assert engine.tokens(name) == answer_alone(request, kept_permille=permille)
