"""Unlisted families answer as `generate()`: chunked, cached, continued, preempted, in halves.

gemma3 and qwen2_5_vl have no line in `FAMILIES` here, so that the generic path computes them, too.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from worker.identity.engines import hold_law, make_runner, running
from worker.identity.families import NUM_TOKENS, Case, longest, make_case
from worker.identity.law import Law
from worker.identity.reference import _images, load_reference
from worker.identity.stepper import Stepper
from worker.identity.test_families import (
    ALL,
    BLOCK_SIZE,
    BUDGET,
    MAX_LOGIT_DIFFERENCE,
    logit_difference,
    stages,
)
from worker.identity.test_prompt_logprobs import check, scores
from worker.unlisted_checkpoints import UNLISTED, make_unlisted, unlist

from vlm_worker.attends import Attends

ROUNDS = 8
MASKS = {
    "gemma3": Attends.IMAGES,
    "paligemma": Attends.PREFIX,
    "paligemma2": Attends.PREFIX,
}
"""Of the types that are not causal."""
TOPOLOGIES = ("colocated", "E-P-D")


@pytest.fixture(scope="module", params=sorted(UNLISTED))
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Case]:
    with pytest.MonkeyPatch.context() as patch:
        unlist(patch)
        model_dir = tmp_path_factory.mktemp("unlisted") / request.param
        made = make_case(make_unlisted(model_dir, request.param), count=9, seed=0, min_distinct=35)
        assert not made.family.spec.is_listed
        yield made


def bounds(case: Case) -> dict[str, int]:
    """A step cuts images, unless the mask keeps the prompt whole."""
    is_whole = MASKS.get(case.model_dir.name) is Attends.PREFIX
    return {"max_num_batched_tokens": longest(case) + 12} if is_whole else {}


@pytest.mark.parametrize("topology", TOPOLOGIES)
async def test_answers_are_those_of_generate_in_chunks_from_caches_and_continued(
    case: Case, topology: str
) -> None:
    async with stages(case, topology, **bounds(case)) as (route, (encoder, prefill, _)):
        await hold_law(Law(case.pairs), route)
        misses, cold = encoder.stats().encoder_cache.misses, prefill.stats()
        await hold_law(Law(case.pairs), route)
        warm = prefill.stats()
        hits = warm.count("prefix_cache_hits") - cold.count("prefix_cache_hits")
        assert hits > 100, "no prefix was warm"
        assert encoder.stats().encoder_cache.misses == misses, "an image was encoded again"
        await hold_law(Law(case.pairs, num_delivered=NUM_TOKENS // 3), route)


@pytest.mark.parametrize("topology", TOPOLOGIES)
async def test_preempted_sequences_answer_the_same(case: Case, topology: str) -> None:
    layout = make_runner(case.model_dir, *ALL, block_size=BLOCK_SIZE).kv_layout
    assert layout is not None
    memory = layout.block_bytes * (2 * longest(case) // BLOCK_SIZE)
    more = {"max_model_len": longest(case), **bounds(case)}
    async with stages(case, topology, decode_bytes=memory, **more) as (route, (_, _, decode)):
        for _ in range(ROUNDS):
            await hold_law(Law(case.pairs), route)
            if decode.stats().count("preemptions"):
                break
        assert decode.stats().count("preemptions") > 0, "memory was not tight enough to preempt"


@pytest.mark.parametrize("chunk", [4096, 9])
def test_logits_under_the_reference_tokens_differ_by_rounding_alone(case: Case, chunk: int) -> None:
    worst = logit_difference(case, chunk=chunk)
    print(f"{case.model_dir.name}: max |delta logit| {worst:.1e}")
    assert worst <= MAX_LOGIT_DIFFERENCE


async def test_log_probabilities_of_prompts_are_those_of_transformers(case: Case) -> None:
    question = next(question for question, _ in case.pairs if not question.items)
    if MASKS.get(case.model_dir.name) is Attends.PREFIX:
        pytest.skip("the prompt sees what it predicts")
    runner = make_runner(case.model_dir, *ALL, block_size=BLOCK_SIZE)
    async with running(runner, max_num_batched_tokens=7) as engine:
        check(question, await scores(engine, question, "scored"), case.model_dir)


@torch.inference_mode()
def test_a_placeholder_that_the_model_answers_is_text(case: Case) -> None:
    """Beside a chunk with an image: both share a step."""
    question, image = next(pair for pair in case.pairs if pair[0].items)
    placeholder = case.family.image_token_id
    forced = (placeholder, 20, placeholder, 21)
    model = load_reference(case.model_dir)
    sequence = (*question.token_ids, *forced)
    inputs = _images(model.config, question)
    ids = torch.tensor([question.token_ids])
    model.model.rope_deltas = None
    output = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=True, **inputs)
    want = [output.logits[0, -1]]
    axes = (3,) if case.family.num_position_rows == 3 else ()
    _, delta = case.family.positions(question.token_ids, question.items)
    first = 1 if case.model_dir.name.startswith("paligemma") else 0  # its own are one more
    for at in range(len(question.token_ids), len(sequence) - 1):
        mask = torch.ones(1, at + 1, dtype=torch.long)
        output = model(
            input_ids=torch.tensor([sequence[at : at + 1]]), attention_mask=mask,
            past_key_values=output.past_key_values, use_cache=True,
            position_ids=torch.full((*axes, 1, 1), at + delta + first),
        )  # fmt: skip
        want.append(output.logits[0, -1])
    stepper = Stepper(make_runner(case.model_dir, block_size=BLOCK_SIZE, kv_memory_bytes=1 << 24))
    both = [stepper.start(question, (), max_tokens=NUM_TOKENS) for _ in range(2)]
    both[1].token_ids = [*both[1].token_ids]
    got = stepper.forced_logits(both, [forced, image.token_ids[:4]], chunk=4096)
    assert np.abs(got[0] - torch.stack(want).numpy()).max() <= MAX_LOGIT_DIFFERENCE


def test_the_start_finds_the_mask_and_the_layout_has_it(case: Case) -> None:
    runner = make_runner(case.model_dir, *ALL, block_size=BLOCK_SIZE)
    mask = MASKS.get(case.model_dir.name, Attends.CAUSAL)
    assert runner.verification is not None
    assert runner.kv_layout is not None
    assert (runner.verification.attends, runner.kv_layout.attends) == (mask, mask)
    assert runner.family.spec.attends is mask
    assert runner.verification.difference < 1e-5


def test_chunks_are_cut_inside_images_of_causal_types(case: Case) -> None:
    sizes = [item.num_tokens for question, _ in case.pairs for item in question.items]
    if case.model_dir.name not in MASKS:
        assert max(sizes) > BUDGET - 12
