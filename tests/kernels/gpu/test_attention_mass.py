"""Attention mass in Triton is its definition, for every type of cache."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernels.test_attention_mass import SCALE, sequence

from vlm_kernels import attention_mass
from vlm_kernels.attention_mass import attention_mass_reference

CASES = [
    (torch.float32, torch.float32),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.int8),
]


@pytest.mark.parametrize(("q_type", "kv_type"), CASES, ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "num_rows", "heads", "head_dim", "block_size"),
    [
        pytest.param(1, 1, (1, 1), 16, 4, id="one token"),
        pytest.param(7, 7, (2, 1), 24, 4, id="all rows"),
        pytest.param(150, 32, (2, 3), 80, 16, id="several tiles"),
    ],
)
def test_it_is_its_definition(
    num_tokens: int,
    num_rows: int,
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    q_type: torch.dtype,
    kv_type: torch.dtype,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as on_host:  # tokens are stored by the kernel of CPUs
        on_host.setattr("vlm_kernels.gpu.serves", lambda device: False)
        q, cache, blocks = sequence(
            num_tokens, num_rows, heads=heads, head_dim=head_dim, block_size=block_size,
            q_type=q_type, kv_type=kv_type,
        )  # fmt: skip
    want = attention_mass_reference(q, cache, 1, blocks, num_tokens, scale=SCALE)
    on_device = q.to(device), cache.to(device)
    got = attention_mass(*on_device, 1, blocks, num_tokens, scale=SCALE).cpu()
    # an element of int8 is exact in the type of q, and its scale multiplies the score
    torch.testing.assert_close(got, want, rtol=2e-5, atol=1e-6)
    assert got.sum().item() == pytest.approx(q.shape[0] * q.shape[1], rel=1e-5)


def test_what_does_not_fit_raises_before_anything_runs(device: torch.device) -> None:
    q, cache = torch.ones(4, 2, 8, device=device), torch.zeros(3, 1, 2, 1, 32, device=device)
    blocks = np.array([1, 2], np.int32)
    for num_tokens, given in ((3, blocks), (9, blocks), (8, blocks + 1), (8, blocks.astype(int))):
        with pytest.raises(ValueError, match="attention_mass"):
            attention_mass(q, cache, 0, given, num_tokens, scale=1.0)
