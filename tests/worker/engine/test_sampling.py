"""An answer that is drawn is the same answer in any company, and wherever it is continued."""

from __future__ import annotations

import asyncio
import dataclasses
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from worker.engine.talk import events, text, tokens

from vlm_worker.core.step_values import SampleParams, StepOutput
from vlm_worker.engine.engine import Engine
from vlm_worker.model.runner import sample
from vlm_worker.testing import VOCABULARY, ChecksumRunner
from vlm_worker.types import Request, RequestKey, TokenEvent, TokenLogprobs

NUM_TOKENS = 40


class LogitsRunner(ChecksumRunner):
    """Makes logits of what it reads, and chooses as a model does.

    They are the same few tokens' often, so that penalties matter.
    """

    def choose(self, contexts: Sequence[np.ndarray | None], params: SampleParams) -> StepOutput:
        rows = []
        for context in contexts:
            assert context is not None
            rng = np.random.default_rng(zlib.crc32(context.tobytes()))
            scores = rng.standard_normal(VOCABULARY, np.float32)
            scores[:20] += 4
            rows.append(scores)
        return sample(torch.from_numpy(np.stack(rows)), params)


def logprobs(told: Sequence[Any]) -> list[TokenLogprobs | None]:
    return [event.logprobs for event in told if isinstance(event, TokenEvent)]


def continued(request: Request, answer: Sequence[int]) -> Request:
    """The request after so much of its answer was delivered elsewhere."""
    return dataclasses.replace(
        request,
        key=RequestKey(request.key.request_id, len(answer)),
        token_ids=(*request.token_ids, *answer),
    )


SAMPLINGS = {
    "plain": {},
    "filters": {"top_k": 12, "top_p": 0.9, "min_p": 0.02},
    "penalties": {"frequency_penalty": 0.7, "presence_penalty": 0.4, "repetition_penalty": 1.2},
    "biases": {"logit_bias": ((3, 2.5), (4, -100.0))},
    "greedy with penalties": {"temperature": 0.0, "frequency_penalty": 0.7},
}


@pytest.mark.parametrize("case", SAMPLINGS)
async def test_an_answer_interrupted_anywhere_goes_on_the_same_elsewhere(
    start: Any, case: str
) -> None:
    sampling = {"temperature": 1.0, "seed": 5, "num_logprobs": 2, **SAMPLINGS[case]}
    request = text("r", max_tokens=NUM_TOKENS, **sampling)
    here: Engine = start(LogitsRunner())
    whole = await events(here.submit_prefill(request, for_peer=False))
    answer = tokens(whole)
    assert len(answer) == NUM_TOKENS
    elsewhere: Engine = start(LogitsRunner())
    # all at once: who is in a batch with whom changes nothing, either
    rests = await asyncio.gather(
        *(
            events(elsewhere.submit_prefill(continued(request, answer[:k]), for_peer=False))
            for k in range(1, NUM_TOKENS)
        )
    )
    for k, rest in enumerate(rests, 1):
        assert tokens(rest) == answer[k:]
        for one, other in zip(logprobs(rest), logprobs(whole)[k:], strict=True):
            assert one is not None
            assert other is not None
            assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
            assert [token for token, _ in one.top] == [token for token, _ in other.top]


async def test_penalties_and_biases_change_what_is_drawn(start: Any) -> None:
    engine: Engine = start(LogitsRunner())
    answers = {}
    for case, sampling in SAMPLINGS.items():
        request = text(case, max_tokens=NUM_TOKENS, **{"temperature": 1.0, "seed": 5, **sampling})
        answers[case] = tokens(await events(engine.submit_prefill(request, for_peer=False)))
    assert len(set(map(tuple, answers.values()))) == len(answers)
    assert 4 not in answers["biases"]
    assert len(set(answers["penalties"])) > len(set(answers["plain"]))


async def test_only_requests_that_ask_get_log_probabilities(start: Any) -> None:
    engine: Engine = start(LogitsRunner())
    wanted = {"a": None, "b": 0, "c": 5}
    told = await asyncio.gather(
        *(
            events(engine.submit_prefill(text(name, num_logprobs=number), for_peer=False))
            for name, number in wanted.items()
        )
    )
    for number, stream in zip(wanted.values(), told, strict=True):
        sizes = {None if one is None else len(one.top) for one in logprobs(stream)}
        assert sizes == {number}
