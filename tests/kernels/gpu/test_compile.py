"""Every kernel compiles for a Hopper GPU, here, without one."""

from __future__ import annotations

import json
import pkgutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vlm_kernels import gpu

COMPILE_ALL = Path(__file__).with_name("compile_all.py")
SHARED_BYTES = 227 << 10  # of one program, on Hopper
HELPERS = {"attention_step", "attention_tiles", "configs", "online_softmax", "quantise"}


def compiled(*names: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, str(COMPILE_ALL), *names], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_the_kernels_of_a_decoder_layer_compile() -> None:
    found = compiled("paged_attention", "rope_store_kv int8")
    assert {line["kernel"] for line in found} == {"_attend", "_rotate", "_rotate_store", "_store"}
    assert all(line["cubin_bytes"] > 0 and line["shared_bytes"] <= SHARED_BYTES for line in found)


@pytest.mark.full
def test_all_kernels_compile() -> None:
    found = compiled()
    assert all(line["cubin_bytes"] > 0 and line["shared_bytes"] <= SHARED_BYTES for line in found)
    modules = {module.name for module in pkgutil.iter_modules(gpu.__path__)} - HELPERS
    assert {line["module"].rpartition(".")[2] for line in found} == modules
