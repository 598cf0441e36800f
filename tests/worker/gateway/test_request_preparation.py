"""From what the client said, and the model's own defaults, to how tokens are chosen."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from worker.gateway.stack import BLOCK_SIZE, MODEL

from vlm_worker.core.families import ModelConfigError
from vlm_worker.gateway.api.completions import parse_completion
from vlm_worker.gateway.api.errors import ApiError
from vlm_worker.gateway.config import Config, Salts
from vlm_worker.gateway.orchestrate.prepared_request import PreparedRequest
from vlm_worker.gateway.prompts import PromptBuilder
from vlm_worker.gateway.request_preparation import Preparer
from vlm_worker.types import SamplingParams

DRAWS = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.1,
         "repetition_penalty": 1.05}  # fmt: skip


@pytest.fixture
def preparer(tmp_path: Path) -> Preparer:
    return prepared(tmp_path, DRAWS)


def prepared(tmp_path: Path, generation: dict[str, Any]) -> Preparer:
    """What a model with this `generation_config.json` is prepared with."""
    model = tmp_path / "model"
    shutil.copytree(MODEL, model, ignore=shutil.ignore_patterns("*.safetensors"))
    (model / "generation_config.json").write_text(json.dumps(generation))
    return Preparer(
        PromptBuilder(model), "m", 256, BLOCK_SIZE, Salts("m", lambda: None), any_priority=True
    )


async def prepared_request(preparer: Preparer, **said: Any) -> PreparedRequest:
    request = parse_completion({"model": "m", "prompt": "red", "seed": 3, **said})
    (one,) = await preparer.completions(request, Config(), request_id="r", tenant="t")
    return one


async def test_the_model_s_defaults_hold_where_the_client_says_nothing(preparer: Preparer) -> None:
    assert (await prepared_request(preparer)).sampling == SamplingParams(
        16, temperature=0.7, top_p=0.8, top_k=20, min_p=0.1, repetition_penalty=1.05, seed=3
    )


async def test_what_the_client_says_goes_before_them(preparer: Preparer) -> None:
    said = {"temperature": 1, "top_p": 0.5, "top_k": -1, "min_p": 0, "repetition_penalty": 1,
            "frequency_penalty": 1, "presence_penalty": -1, "logit_bias": {"9": 1},
            "ignore_eos": True, "logprobs": 3, "priority": -4,
            "stop_token_ids": [5, 3, 5], "min_tokens": 7}  # fmt: skip
    asked = await prepared_request(preparer, **said)
    assert asked.priority == 4
    assert asked.sampling == SamplingParams(
        16, temperature=1.0, top_p=0.5, seed=3, ignore_eos=True, frequency_penalty=1.0,
        presence_penalty=-1.0, logit_bias=((9, 1.0),), num_logprobs=3, stop_token_ids=(5, 3),
        min_tokens=7,
    )  # fmt: skip


async def test_no_client_goes_before_the_others_unless_it_may(preparer: Preparer) -> None:
    closed = dataclasses.replace(preparer, any_priority=False)
    assert (await prepared_request(closed, priority=3)).priority == -3
    with pytest.raises(ApiError, match="'priority' must be 0 or more") as refused:
        await prepared_request(closed, priority=-1)
    assert (refused.value.status, refused.value.param) == (400, "priority")


async def test_a_nucleus_of_nothing_is_greedy(preparer: Preparer) -> None:
    sampling = (await prepared_request(preparer, top_p=0)).sampling
    assert (sampling.temperature, sampling.top_p) == (0.0, 1.0)


async def test_a_greedy_model_keeps_its_penalty_alone(tmp_path: Path) -> None:
    preparer = prepared(tmp_path, {**DRAWS, "do_sample": False})
    assert (await prepared_request(preparer)).sampling == SamplingParams(
        16, repetition_penalty=1.05, seed=3
    )


async def test_seeds_differ_where_the_client_gives_none(preparer: Preparer) -> None:
    drawn = {(await prepared_request(preparer, seed=None)).sampling.seed for _ in range(20)}
    assert len(drawn) == 20


async def test_a_bias_of_a_token_beyond_the_model_s_is_refused(preparer: Preparer) -> None:
    last = preparer.prompt_builder.family.vocab_size - 1
    asked = await prepared_request(preparer, logit_bias={str(last): 1})
    assert asked.sampling.logit_bias == ((last, 1.0),)
    with pytest.raises(ApiError) as refused:
        await prepared_request(preparer, logit_bias={str(last + 1): 1})
    assert (refused.value.status, refused.value.param) == (400, "logit_bias")


def test_a_model_whose_penalty_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ModelConfigError, match="repetition_penalty must be a positive number, not -1"
    ):
        prepared(tmp_path, {"repetition_penalty": -1})
