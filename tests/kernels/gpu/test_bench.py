"""The benchmark of GPU kernels runs as one command, without a GPU too."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

RUN = Path(__file__).parents[3] / "bench" / "gpu" / "run.py"


def test_a_smoke_run_measures_every_case() -> None:
    done = subprocess.run(
        [sys.executable, RUN, "--smoke"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines[0]["device"] == "interpreter"
    assert set(lines[1]["limits"]) == {"read", "copy", "flops"}
    assert set(lines[-1]["reached"]) == {"G3", "G6"}, "of shapes so small no other goal speaks"
    lines = lines[:-1]
    cases = {line["case"].split("/")[0] for line in lines[2:]}
    assert cases == {
        "decode", "prefill", "vision", "add_rms_norm", "silu_mul", "rope_store_kv", "step",
        "encoder", "tune",
    }  # fmt: skip
    assert all(us > 0 for line in lines[2:] for us in line["microseconds"].values())


def test_what_is_missing_is_named() -> None:
    if torch.cuda.is_available():
        pytest.skip("nothing is missing: there is a GPU")
    done = subprocess.run([sys.executable, RUN], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "torch finds no GPU; --smoke runs tiny shapes without one\n"
