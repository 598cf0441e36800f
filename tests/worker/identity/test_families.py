"""Every family answers as transformers in every topology: chunked, cached, continued, preempted."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from worker.checkpoints import make_checkpoint
from worker.identity.engines import Stages, hold_law, make_runner, running
from worker.identity.families import (
    NUM_TOKENS,
    Case,
    cut_behind_images,
    longest,
    make_case,
    with_images,
)
from worker.identity.law import Law
from worker.identity.questions import Question
from worker.identity.reference import answer, load_reference
from worker.identity.stepper import Stepper

from vlm_worker.core.families import FAMILIES
from vlm_worker.engine.engine import Engine
from vlm_worker.types import Stage

BLOCK_SIZE = 4
BUDGET = 30
MAX_LOGIT_DIFFERENCE = 1e-3
PREEMPTION_ROUNDS = 8
ALL, ENCODER, PREFILL, DECODE = tuple(Stage), Stage.ENCODER, Stage.PREFILL, Stage.DECODE
TOPOLOGIES = {
    "colocated": (ALL,),
    "E-PD": ((ENCODER,), (PREFILL, DECODE)),
    "P-D": ((ENCODER, PREFILL), (DECODE,)),
    "E-P-D": ((ENCODER,), (PREFILL,), (DECODE,)),
}


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    model_dir = tmp_path_factory.mktemp("families") / request.param
    return make_case(make_checkpoint(model_dir, request.param), count=12, seed=0)


@contextlib.asynccontextmanager
async def stages(
    case: Case, topology: str, *, decode_bytes: int = 1 << 24, **bounds: int
) -> AsyncIterator[tuple[Stages, list[Engine]]]:
    """The engines of a topology, each with its own half of the weights.

    `decode_bytes` is the KV memory of the one that decodes.
    """
    async with contextlib.AsyncExitStack() as stack:
        at: dict[Stage, Engine] = {}
        for own in TOPOLOGIES[topology]:
            memory = decode_bytes if DECODE in own else 1 << 24
            runner = make_runner(
                case.model_dir, *own, block_size=BLOCK_SIZE, kv_memory_bytes=memory
            )
            bounds = {"max_num_batched_tokens": BUDGET, "max_num_seqs": 12, **bounds}
            engine = await stack.enter_async_context(running(runner, **bounds))
            at |= dict.fromkeys(own, engine)
        route = Stages(
            at[ENCODER], at[PREFILL], at[DECODE],
            block_size=BLOCK_SIZE, max_tokens=NUM_TOKENS, ignore_eos=True,
        )  # fmt: skip
        yield route, [at[ENCODER], at[PREFILL], at[DECODE]]


@pytest.mark.parametrize("topology", TOPOLOGIES)
async def test_answers_are_those_of_transformers_in_chunks_from_caches_and_continued(
    case: Case, topology: str
) -> None:
    largest = max(item.num_tokens for q, _ in case.pairs for item in q.items)
    whole_images = case.family.spec.attends.keeps_images_whole
    assert whole_images or largest > BUDGET, "no chunk is cut inside an image"
    async with stages(case, topology) as (route, (encoder, prefill, _)):
        await hold_law(Law(case.pairs), route)
        misses, cold = encoder.stats().encoder_cache.misses, prefill.stats()
        await hold_law(Law(case.pairs), route)
        warm = prefill.stats()
        assert warm.count("prefix_cache_hits") - cold.count("prefix_cache_hits") > 100, (
            "no prefix was warm"
        )
        assert encoder.stats().encoder_cache.misses == misses, "an image was encoded again"
    async with stages(case, topology) as (route, _):
        await hold_law(Law(case.pairs, num_delivered=NUM_TOKENS // 3), route)


@pytest.mark.parametrize("topology", TOPOLOGIES)
async def test_preempted_sequences_answer_the_same(case: Case, topology: str) -> None:
    """Apart, decode computes text again, and hands back what it has no image for."""
    layout = make_runner(case.model_dir, *ALL, block_size=BLOCK_SIZE).kv_layout
    assert layout is not None
    num_blocks = 2 * longest(case) // BLOCK_SIZE
    memory = layout.block_bytes * num_blocks
    async with stages(case, topology, decode_bytes=memory, max_model_len=longest(case)) as (
        route,
        (_, prefill, decode),
    ):
        apart = prefill is not decode
        for _ in range(PREEMPTION_ROUNDS):  # who meets whom in the batch is a matter of timing
            await hold_law(Law(case.pairs), route)
            if decode.stats().count("preemptions") and (route.num_continued or not apart):
                break
        assert decode.stats().count("preemptions") > 0, "memory was not tight enough to preempt"
        if apart:
            assert route.num_continued > 0, "no answer with an image was handed back"


@pytest.mark.parametrize("chunk", [4096, 9])
def test_logits_under_the_reference_tokens_differ_by_rounding_alone(case: Case, chunk: int) -> None:
    worst = logit_difference(case, chunk=chunk)
    print(f"{case.family.model_type}: max |delta logit| {worst:.1e}")
    assert worst <= MAX_LOGIT_DIFFERENCE


def logit_difference(case: Case, *, chunk: int, bidirectional: bool | None = None) -> float:
    """The worst of all questions with images, while the reference's tokens are fed."""
    stepper = Stepper(make_runner(case.model_dir, block_size=BLOCK_SIZE, kv_memory_bytes=1 << 24))
    if bidirectional is not None:
        stepper.bidirectional = bidirectional
    pairs = with_images(case)
    sequences = [stepper.start(question, (), max_tokens=NUM_TOKENS) for question, _ in pairs]
    logits = stepper.forced_logits(sequences, [a.token_ids for _, a in pairs], chunk=chunk)
    return max(
        float(np.abs(got - answer.logits).max())
        for got, (_, answer) in zip(logits, pairs, strict=True)
    )


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Case:
    model_dir = tmp_path_factory.mktemp("gemma") / "gemma3"
    return make_case(make_checkpoint(model_dir, "gemma3"), count=12, seed=1)


async def test_images_that_are_only_causal_would_answer_otherwise(gemma: Case) -> None:
    worst = logit_difference(gemma, chunk=4096, bidirectional=False)
    print(f"causal images: max |delta logit| {worst:.1e}")
    assert worst > 100 * MAX_LOGIT_DIFFERENCE
    imaged = Law(with_images(gemma))
    async with running(
        make_runner(gemma.model_dir, block_size=BLOCK_SIZE, kv_memory_bytes=1 << 24),
        whole_images=False,
    ) as engine:
        route = Stages.colocated(engine, max_tokens=NUM_TOKENS, ignore_eos=True)
        imaged.record([await route.ask(question) for question, _ in imaged.pending])
    assert len(imaged.failures) > len(imaged.pairs) // 2


async def test_a_prefix_hit_inside_an_image_leaves_the_rest_of_it_in_one_chunk(
    gemma: Case,
) -> None:
    reference = load_reference(gemma.model_dir)
    inside = [
        (question, answer(reference, question, max_tokens=NUM_TOKENS, ignore_eos=True))
        for question in map(cut_behind_images, (q for q, _ in with_images(gemma)))
        if num_reusable(question) < question.items[-1].end
    ]
    assert inside, "no image ends inside a block"
    async with stages(gemma, "colocated") as (route, (_, engine, _)):
        for _ in range(2):
            await hold_law(Law(inside), route)
        hits = engine.stats().count("prefix_cache_hits")
    assert hits >= sum(num_reusable(question) for question, _ in inside)


def num_reusable(question: Question) -> int:
    """Tokens in whole blocks before the last token, which is always computed."""
    return (len(question.token_ids) - 1) // BLOCK_SIZE * BLOCK_SIZE


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("model_type", sorted(FAMILIES))
async def test_other_seeds_in_every_topology(tmp_path: Path, model_type: str, seed: int) -> None:
    model_dir = make_checkpoint(tmp_path / model_type, model_type, seed=seed)
    case = make_case(model_dir, count=48, seed=seed)
    for topology in TOPOLOGIES:
        async with stages(case, topology) as (route, _):
            for _ in range(2):
                await hold_law(Law(case.pairs), route)
            await hold_law(Law(case.pairs, num_delivered=NUM_TOKENS // 2), route)
