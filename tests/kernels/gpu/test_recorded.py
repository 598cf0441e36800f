"""The replacement of CUDA graphs has their limits: Python runs once, at the capture."""

from __future__ import annotations

import pytest
import torch
from kernels.gpu.conftest import HAS_GPU

from vlm_kernels import rms_norm

if HAS_GPU:
    pytest.skip("CUDA's own graphs are here", allow_module_level=True)
from kernels.gpu.recorded import RecordedGraphs


def test_a_replay_computes_on_what_its_memory_holds_now(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, out, seen = torch.ones(2, 8), torch.ones(8), torch.zeros(2, 8), []

    def run() -> None:
        seen.append(x[0, 0])
        out.copy_(rms_norm(x * torch.arange(8), weight, eps=1e-6).view(8, 2).T.reshape(2, 8))

    replay = RecordedGraphs(monkeypatch)(run)
    x.copy_(torch.tensor([[1.0], [-2.0]]).expand(2, 8))
    replay()
    got = out.clone()
    assert len(seen) == 2, "Python runs before and at the capture"
    run()
    assert torch.equal(got, out)


def test_what_waits_for_the_device_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(3)
    for run in (lambda: x.sum().item(), x.nonzero, lambda: torch.tensor([1.0, 2])):
        with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
            RecordedGraphs(monkeypatch)(run)
