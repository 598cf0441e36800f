"""What kernels multiply, and fields of NaN around it, so that a step beside it shows."""

from __future__ import annotations

import pytest
import torch

GUARD = 64


def bf16(*shape: int, scale: float = 1.0) -> torch.Tensor:
    """Random numbers, normal with this deviation."""
    return (torch.randn(*shape) * scale).to(torch.bfloat16)


def poisoned_results(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Cut all new matrices out of fields of NaN; the fields, as they are made."""
    fields: list[torch.Tensor] = []

    def new_empty(like: torch.Tensor, *shape: int) -> torch.Tensor:
        size = shape[0] * shape[1]
        fields.append(torch.full((size + 2 * GUARD,), float("nan")).to(like.dtype))
        return fields[-1][GUARD : GUARD + size].view(shape)

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    return fields


def assert_guards_stand(fields: list[torch.Tensor]) -> None:
    """Nothing was written beside the matrices."""
    for field in fields:
        assert field[:GUARD].isnan().all()
        assert field[-GUARD:].isnan().all()


def among_nan(part: torch.Tensor) -> torch.Tensor:
    """The same matrix, its rows apart, NaN all around."""
    field = torch.full((len(part) + 2, part.shape[1] + 10), float("nan")).to(part.dtype)
    field[1:-1, 5:-5] = part
    return field[1:-1, 5:-5]
