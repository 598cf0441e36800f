"""The same tests on a GPU, and without one under Triton's interpreter on the CPU.

Every output that a kernel's launcher allocates is poisoned, and is between guards.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kernels.gpu import interpreter
from torch._subclasses.fake_tensor import FakeTensor

from vlm_kernels import gpu

GUARD = 64  # elements on both sides

HAS_TRITON = importlib.util.find_spec("triton") is not None
HAS_GPU = torch.cuda.is_available()

if HAS_TRITON and not HAS_GPU:
    interpreter.load_kernels()


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where tensors of a test live; its kernels are Triton's."""
    if not HAS_TRITON:
        pytest.skip("triton is not installed")
    if HAS_GPU:
        return torch.device("cuda")
    monkeypatch.setattr(gpu, "serves", lambda device: True)
    return torch.device("cpu")


@pytest.fixture(autouse=True)
def guards(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`new_empty` returns poisoned memory; after the test the memory around it still is."""
    fields: list[torch.Tensor] = []
    real = torch.Tensor.new_empty

    def new_empty(
        x: torch.Tensor, *size: Any, dtype: torch.dtype | None = None, **others: Any
    ) -> torch.Tensor:
        if others or isinstance(x, FakeTensor):  # the interpreter's own, and torch's compiler's
            return real(x, *size, dtype=dtype, **others)
        shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        field = poisoned(math.prod(shape) + 2 * GUARD, dtype or x.dtype, x.device)
        fields.append(field)
        return field[GUARD:-GUARD].view(shape)

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    yield
    for field in fields:
        for side in (field[:GUARD], field[-GUARD:]):
            want = poisoned(GUARD, field.dtype, field.device)
            assert torch.equal(side.view(torch.uint8), want.view(torch.uint8)), "beside an output"


def poisoned(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """NaN, or a number that no test expects."""
    if dtype.is_floating_point:
        return torch.full((size,), float("nan"), device=device).to(dtype)
    return torch.full((size,), 77, dtype=dtype, device=device)
