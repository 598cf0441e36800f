"""Steps of decode that are replayed answer as those that Python launches.

On a GPU the graphs are CUDA's; elsewhere `recorded` replaces them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from kernels.gpu.conftest import HAS_GPU
from worker.checkpoints import make_checkpoint
from worker.identity.questions import Question
from worker.identity.stepper import Stepper

from vlm_worker.model.build import RunnerSettings, build_runner
from vlm_worker.model.gpu.decode_steps import graph_sizes
from vlm_worker.model.gpu.graphs import GpuCapture, Replay
from vlm_worker.model.runner import ModelRunner
from vlm_worker.types import Stage

if not HAS_GPU:
    from kernels.gpu.recorded import RecordedGraphs

BLOCK_SIZE, MAX_TOKENS = 4, 4
PROMPTS = ((10, 11, 12), (20, 21, 22, 23, 24), (30,))


class Counted:
    """Captures as the device can, and counts replays."""

    def __init__(self, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
        self._capture = GpuCapture(device) if HAS_GPU else RecordedGraphs(monkeypatch)
        self.num_replays = 0

    def __call__(self, run: Callable[[], None]) -> Replay:
        replay = self._capture(run)

        def counted() -> None:
            self.num_replays += 1
            replay()

        return counted


@pytest.fixture
def capture(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(device, monkeypatch)


@pytest.fixture(scope="module", params=["qwen2_vl", "gemma3"])
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("graphs") / request.param, request.param)


def runner_of(model_dir: Path, device: torch.device) -> ModelRunner:
    return build_runner(
        RunnerSettings(
            model_dir, (Stage.DECODE,), block_size=BLOCK_SIZE, dtype="float32",
            kv_memory_bytes=1 << 20, device=str(device),
        )
    )  # fmt: skip


def answers(runner: ModelRunner) -> tuple[list[list[int]], torch.Tensor]:
    """The output for all prompts together, one of which is longer; and the cache after them."""
    stepper = Stepper(runner)
    questions = [Question("text", (), prompt, (), ()) for prompt in PROMPTS]
    asked = [stepper.start(q, (), max_tokens=MAX_TOKENS, embeddings=()) for q in questions]
    stepper.generate(asked[:1], max_tokens=2, chunk=8, eos=None)
    stepper.generate(asked, max_tokens=MAX_TOKENS, chunk=8, eos=None)
    return [sequence.answer for sequence in asked], runner._kv_cache


def test_replayed_steps_write_and_answer_as_launched_ones(
    model_dir: Path, device: torch.device, capture: Counted
) -> None:
    launched, replayed = (runner_of(model_dir, device) for _ in range(2))
    graphs = replayed.make_graphs(graph_sizes(4), 16)
    graphs.capture(capture)
    assert graphs.sizes == (1, 2, 4)
    assert not replayed._kv_cache[0].any(), "a capture wrote into the null block"
    replayed.graphs = graphs
    (want, cache), (got, other_cache) = answers(launched), answers(replayed)
    assert got == want
    # the first token of each is a chunk's, with which one sequence decodes
    assert capture.num_replays >= MAX_TOKENS - 1
    assert not other_cache[0].any(), "padding wrote into the null block"
    torch.testing.assert_close(other_cache, cache, atol=1e-4, rtol=1e-4)


def test_logits_of_a_replayed_step_outlive_the_next(
    model_dir: Path, device: torch.device, capture: Counted
) -> None:
    runner = runner_of(model_dir, device)
    graphs = runner.make_graphs((1,), 16)
    graphs.capture(capture)
    runner.graphs = graphs
    stepper = Stepper(runner)
    one, other = (
        stepper.start(Question("text", (), (token,), (), ()), (), max_tokens=2, embeddings=())
        for token in (10, 30)
    )
    first = runner.logits(stepper.inputs([(one, 1)], [[0]]))
    kept = first.clone()
    second = runner.logits(stepper.inputs([(other, 1)], [[0]]))
    assert capture.num_replays == 2
    assert not torch.equal(second, kept), "the other token has the same logits"
    assert torch.equal(first, kept)
