"""A tower that torch compiles around Triton's kernels answers as one that it does not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters
from worker.checkpoints import make_checkpoint
from worker.model.gpu.compiling import num_graphs, rows, runner_of, traced

from vlm_kernels import gpu
from vlm_worker.model.gpu.compiled import compile_layers


@pytest.mark.parametrize("weights", ["auto", pytest.param("int8", marks=pytest.mark.full)])
def test_kernels_are_single_operations_of_what_is_compiled(
    tmp_path: Path, device: torch.device, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.compiler.reset()
    counters.clear()
    runner = runner_of(make_checkpoint(tmp_path / "model", "qwen2_5_vl"), device, weights=weights)
    want = rows(runner, ((28,),))
    parts = compile_layers(runner._model, traced)
    asked = []
    serves = gpu.serves
    monkeypatch.setattr(gpu, "serves", lambda where: asked.append(where) or serves(where))
    got = rows(runner, ((28,),))
    assert all(part.is_compiled for part in parts)
    assert num_graphs() == len(parts)
    assert asked, "no kernel was asked for"
    for one, exact in zip(got, want, strict=True):
        torch.testing.assert_close(one, exact, atol=1e-4, rtol=1e-4)
