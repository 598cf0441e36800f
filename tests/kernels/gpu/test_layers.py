"""Decoders of fused layers answer as transformers' own modules do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from worker.checkpoints import make_checkpoint
from worker.identity.questions import Question
from worker.identity.stepper import Stepper

from vlm_kernels import gpu
from vlm_worker.core.families import FAMILIES
from vlm_worker.model.build import RunnerSettings, build_runner
from vlm_worker.model.gpu.layers import FusedLayers
from vlm_worker.model.layers import DecoderLayer
from vlm_worker.model.runner import ModelRunner
from vlm_worker.types import Stage

PROMPT, ANSWER = list(range(10, 19)), list(range(30, 33))
FUSED = ("llava", "qwen2_5_vl", "qwen2_vl")


@pytest.fixture(scope="module", params=FUSED)
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("fused") / request.param, request.param)


def test_a_fused_decoder_answers_as_transformers_does(
    model_dir: Path, device: torch.device
) -> None:
    exact = theirs(model_dir, torch.float32)
    assert np.abs(ours(model_dir, "float32", device) - exact).max() < 2e-4 * exact.std()
    if model_dir.name != "qwen2_vl":  # rounding is the same in all
        return
    rounded = error(theirs(model_dir, torch.bfloat16), exact)
    assert rounded > 0, "bfloat16 took effect"
    assert error(ours(model_dir, "bfloat16", device), exact) <= 1.5 * rounded


def test_layers_with_norms_of_queries_stay_apart(tmp_path: Path, device: torch.device) -> None:
    assert set(FAMILIES) == {*FUSED, "gemma3"}
    model_dir = make_checkpoint(tmp_path / "gemma3", "gemma3")
    layers = runner_of(model_dir, "float32", device)._model.get_decoder().layers
    assert all(isinstance(layer, DecoderLayer) for layer in layers)


def test_a_fused_decoder_observes_what_separate_layers_do_and_writes_nothing(
    model_dir: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    masses = []
    for is_fused in (True, False):
        with monkeypatch.context() as patch:
            if not is_fused:
                patch.setattr(gpu, "serves", lambda where: False)
            runner = runner_of(model_dir, "float32", device if is_fused else torch.device("cpu"))
            layers = runner._model.get_decoder().layers
            assert isinstance(layers[0], FusedLayers) is is_fused
            stepper = Stepper(runner)
            question = Question("text", (), tuple(PROMPT), (), ())
            sequence = stepper.start(question, (), max_tokens=1, embeddings=())
            stepper.generate([sequence], max_tokens=1, chunk=64, eos=None)
            before = runner._kv_cache.clone()
            sequence.num_computed = 5
            masses.append(runner.attention_mass(stepper.inputs([(sequence, 4)], [[]])))
            assert torch.equal(runner._kv_cache.view(torch.uint8), before.view(torch.uint8))
    np.testing.assert_allclose(masses[0], masses[1], rtol=1e-3, atol=1e-4)
    config = runner._model.config.get_text_config()
    num_weights = 4 * config.num_attention_heads * config.num_hidden_layers
    assert masses[0].sum() == pytest.approx(num_weights, rel=1e-4)


def runner_of(model_dir: Path, dtype: str, device: torch.device) -> ModelRunner:
    return build_runner(
        RunnerSettings(
            model_dir, (Stage.DECODE,), block_size=4, dtype=dtype, kv_memory_bytes=1 << 20,
            device=str(device), packed_weights=False,
        )
    )  # fmt: skip


def ours(model_dir: Path, dtype: str, device: torch.device) -> np.ndarray:
    """Logits of the answer, the prompt in chunks."""
    assert gpu.serves(device)
    runner = runner_of(model_dir, dtype, device)
    assert isinstance(runner._model.get_decoder().layers[0], FusedLayers)
    stepper = Stepper(runner)
    question = Question("text", (), tuple(PROMPT), (), ())
    sequence = stepper.start(question, (), max_tokens=len(ANSWER), embeddings=())
    return stepper.forced_logits([sequence], [ANSWER], chunk=5)[0]


def theirs(model_dir: Path, dtype: torch.dtype) -> np.ndarray:
    """Of the same positions."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(model_dir, dtype=dtype).eval()
    ids = torch.tensor([[*PROMPT, *ANSWER[:-1]]])
    with torch.inference_mode():
        logits = model(input_ids=ids).logits[0, len(PROMPT) - 1 :]
    return logits.float().numpy()


def error(some: np.ndarray, exact: np.ndarray) -> float:
    return float(np.sqrt(((some - exact) ** 2).mean()))
