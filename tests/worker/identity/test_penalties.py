"""Penalties and biases through the engine are those of transformers' `generate()`."""

from __future__ import annotations

import asyncio
import dataclasses

from worker.identity.engines import all_ready, collect, make_runner, running
from worker.identity.law import request_for
from worker.identity.questions import SHAPES, Question, questions
from worker.identity.reference import answer, load_reference

QUESTIONS_APART, NUM_TOKENS, REPETITION_PENALTY = 8, 20, 1.3


async def test_greedy_answers_with_penalty_and_bias_are_those_of_transformers() -> None:
    asked, model = questions(1)[::QUESTIONS_APART], load_reference(SHAPES)
    plain = [answer(model, one, max_tokens=NUM_TOKENS, ignore_eos=True) for one in asked]
    said = sorted({token_id for one in plain for token_id in one.token_ids})[:12]
    biases = [(token_id, 3.0 if token_id % 2 else -3.0) for token_id in said]
    want = [
        answer(
            model,
            one,
            max_tokens=NUM_TOKENS,
            ignore_eos=True,
            repetition_penalty=REPETITION_PENALTY,
            sequence_bias={(token_id,): bias for token_id, bias in biases},
        )
        for one in asked
    ]
    async with running(make_runner(SHAPES)) as engine:

        async def ask(number: int, question: Question) -> list[int]:
            request = request_for(
                question, request_id=f"q{number}", max_tokens=NUM_TOKENS, ignore_eos=True
            )
            sampling = dataclasses.replace(
                request.sampling,
                repetition_penalty=REPETITION_PENALTY,
                logit_bias=tuple(biases),
            )
            await all_ready(engine.encode(request.key, question.prepared_images))
            request = dataclasses.replace(request, sampling=sampling)
            return await collect(engine, request, for_peer=False)

        got = await asyncio.gather(*(ask(number, one) for number, one in enumerate(asked)))
    assert got == [list(one.token_ids) for one in want]
    assert sum(one.token_ids != other.token_ids for one, other in zip(want, plain, strict=True)) > 1
