"""A whole model answers the same with GPU kernels as with those of CPUs."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from worker.identity.questions import SHAPES, Question, questions
from worker.identity.stepper import Stepper

from vlm_kernels import gpu
from vlm_worker.core.model_files import ModelConfigError
from vlm_worker.model.build import RunnerSettings, build_runner
from vlm_worker.model.memory import check_kv_device
from vlm_worker.model.runner import ModelRunner
from vlm_worker.types import Stage

SETTINGS = RunnerSettings(
    SHAPES, tuple(Stage), block_size=16, dtype="float32", kv_memory_bytes=8 << 20, device="cpu"
)


TEXT = Question("text", (), tuple(range(10, 34)), (), ())


def shortest_with_an_image() -> Question:
    asked = [question for question in questions(per_task=1) if len(question.prepared_images) == 1]
    return min(asked, key=lambda question: len(question.token_ids))


def answer(runner: ModelRunner, question: Question, max_tokens: int) -> list[int]:
    stepper = Stepper(runner)
    sequence = stepper.start(question, (), max_tokens=max_tokens)
    stepper.generate([sequence], max_tokens=max_tokens, chunk=64, eos=None)
    return sequence.answer


@pytest.mark.parametrize(
    ("num_images", "kv_dtype"),
    [
        pytest.param(0, "float32", id="text"),
        pytest.param(1, "float32", id="an image", marks=pytest.mark.full),
        pytest.param(1, "int8", id="an image, KV in int8", marks=pytest.mark.full),
    ],
)
def test_its_tokens_are_those_of_a_cpu(
    num_images: int, kv_dtype: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    question = shortest_with_an_image() if num_images else TEXT
    max_tokens = 4 if num_images else 2
    settings = dataclasses.replace(SETTINGS, kv_dtype=kv_dtype)
    with monkeypatch.context() as patch:
        patch.setattr(gpu, "serves", lambda where: False)
        on_cpu = build_runner(settings)
        want = answer(on_cpu, question, max_tokens)
        runner = build_runner(dataclasses.replace(settings, device=str(device)))
    launched = []
    serves = gpu.serves
    monkeypatch.setattr(gpu, "serves", lambda where: launched.append(where) or serves(where))
    assert answer(runner, question, max_tokens) == want
    assert launched, "no kernel was asked for"


def logits(runner: ModelRunner, question: Question, *, chunk: int) -> np.ndarray:
    stepper = Stepper(runner)
    sequence = stepper.start(question, (), max_tokens=2)
    return stepper.forced_logits([sequence], [[40, 41]], chunk=chunk)[0]


@pytest.mark.full
def test_kv_in_fp8_changes_logits_within_a_bound_and_chunks_do_not(device: torch.device) -> None:
    exact, eight = (
        build_runner(
            dataclasses.replace(SETTINGS, kv_dtype=kind, device=str(device), compile=False)
        )
        for kind in ("float32", "fp8")
    )
    assert eight.kv_layout is not None
    assert exact.kv_layout is not None
    assert eight.kv_layout.dtype == "float8_e4m3fn"
    head_dim = eight.kv_layout.head_dim
    assert eight.kv_layout.token_bytes * 4 * head_dim == exact.kv_layout.token_bytes * (
        head_dim + 4
    )
    whole, want = logits(eight, TEXT, chunk=64), logits(exact, TEXT, chunk=64)
    assert 0 < np.abs(whole - want).max() < 0.05 * np.ptp(want)
    np.testing.assert_allclose(logits(eight, TEXT, chunk=7), whole, atol=1e-3, rtol=0)


def test_kv_in_fp8_needs_kernels_and_an_ada_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    check_kv_device("fp8", torch.device("cpu"))  # as under the interpreter
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    check_kv_device("fp8", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    check_kv_device("int8", torch.device("cuda"))
    with pytest.raises(ModelConfigError, match=r"capability 8.9 or later, .*; this GPU has 8.6"):
        check_kv_device("fp8", torch.device("cuda"))
    monkeypatch.setattr(gpu, "serves", lambda device: False)
    with pytest.raises(ModelConfigError, match=r"needs a GPU .*; this is cpu. Choose int8"):
        check_kv_device("fp8", torch.device("cpu"))
