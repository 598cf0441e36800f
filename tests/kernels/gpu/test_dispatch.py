"""The device of a tensor decides which code computes; a slower choice is logged once."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vlm_kernels
from vlm_kernels import gpu
from vlm_kernels.gpu import configs
from vlm_kernels.resize_patches import Cut

X, W, SLOTS = torch.ones(2, 8), torch.ones(8), torch.tensor([0, 1])
HEADS, CACHE = torch.ones(2, 1, 8), torch.zeros(3, 1, 2, 1, 32)
START = np.array([0, 1, 2], np.int32)

CALLS: dict[str, Callable[[], Any]] = {
    "rms_norm": lambda: vlm_kernels.rms_norm(X, W, eps=1),
    "add_rms_norm": lambda: vlm_kernels.add_rms_norm(X, X, W, eps=1),
    "silu_mul": lambda: vlm_kernels.silu_mul(X, X),
    "rope": lambda: vlm_kernels.rope(HEADS, X, X),
    "rope_store_kv": lambda: vlm_kernels.rope_store_kv(
        HEADS, HEADS, HEADS, X, X, CACHE, 0, SLOTS
    ),
    "store_kv": lambda: vlm_kernels.store_kv(HEADS, HEADS, CACHE, 0, SLOTS),
    "gather_blocks": lambda: vlm_kernels.gather_blocks(CACHE, np.array([1])),
    "scatter_blocks": lambda: vlm_kernels.scatter_blocks(
        CACHE, np.array([1]), np.zeros((1, 256), np.uint8)
    ),
    "plan_attention": lambda: vlm_kernels.plan_attention(
        START, START[:2], np.ones((2, 1), np.int32), CACHE, head_dim=8, dtype=torch.float32,
        num_heads=2,
    ),
    "varlen_attention": lambda: vlm_kernels.varlen_attention(
        HEADS, HEADS, HEADS, torch.tensor([0, 2], dtype=torch.int32), scale=1
    ),
    "attention_mass": lambda: vlm_kernels.attention_mass(
        HEADS, CACHE, 0, np.array([1], np.int32), 2, scale=1
    ),
    "received_attention": lambda: vlm_kernels.received_attention(
        HEADS, HEADS, torch.tensor([0, 2], dtype=torch.int32), scale=1
    ),
    "quantised_linear": lambda: vlm_kernels.quantised_linear(
        X, vlm_kernels.quantise_weights(torch.ones(3, 8))
    ),
    "merge_tokens": lambda: vlm_kernels.merge_tokens(X, SLOTS, torch.tensor([0, 2])),
    "resize_patches": lambda: vlm_kernels.resize_patches(
        torch.zeros(9, 9, 3, dtype=torch.uint8), Cut(4, 4, 2, 2, 1), torch.ones(3, 256)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_every_function_asks_where_its_tensors_live(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class AskedError(Exception):
        pass

    def asked(where: torch.device) -> bool:
        assert where == torch.device("cpu")
        raise AskedError

    monkeypatch.setattr(gpu, "serves", asked)
    with pytest.raises(AskedError):
        CALLS[name]()


@pytest.mark.parametrize(
    ("module", "name", "message"),
    [
        (importlib.util, "find_spec", "triton is not installed"),
        (shutil, "which", "triton needs a C compiler and finds neither gcc nor clang"),
    ],
    ids=["triton", "compiler"],
)
def test_what_is_missing_leaves_torch_to_compute_and_the_log_says_so_once(
    module: Any, name: str, message: str,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.undo()
    monkeypatch.setattr(module, name, lambda name: None)
    monkeypatch.delenv("CC", raising=False)
    gpu._can_launch.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert [gpu.serves(torch.device(name)) for name in ("cuda", "cuda:1", "cpu")] == [
                False, False, False,
            ]  # fmt: skip
        assert [record.message for record in caplog.records] == [
            f"{message}: torch computes instead of our GPU kernels, slower"
        ]
    finally:
        gpu._can_launch.cache_clear()


def test_importing_the_kernels_imports_no_triton() -> None:
    code = "import sys, vlm_kernels; print([m for m in sys.modules if m.startswith('triton')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert "TRITON_INTERPRET" not in os.environ, "the interpreter leaks"  # noqa: TID251


def test_the_table_of_winners_goes_before_the_default(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "configs.json"
    path.write_text(json.dumps({"a GPU": {"paged_attention": {"d128/m16": {"TILE_N": 32}}}}))
    monkeypatch.setattr(configs, "PATH", path)
    monkeypatch.setattr(configs, "_name", lambda device: "a GPU")
    configs._table.cache_clear()
    default = {"TILE_N": 64, "num_warps": 4}
    try:
        where = torch.device("cuda")
        got = configs.config("paged_attention", "d128/m16", where, default)
        assert got == {"TILE_N": 32, "num_warps": 4}
        assert configs.config("paged_attention", "d64/m16", where, default) == default
    finally:
        configs._table.cache_clear()
