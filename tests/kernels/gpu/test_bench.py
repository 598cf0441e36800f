"""The benchmark of GPU kernels runs as one command, without a GPU too."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

RUN = Path(__file__).parents[3] / "bench" / "gpu" / "run.py"


def test_a_smoke_run_measures_every_case() -> None:
    done = subprocess.run(
        [sys.executable, RUN, "--smoke"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines[0]["device"] == "interpreter"
    assert set(lines[1]["limits"]) == {"read", "copy", "flops"}
    cases = {line["case"].split("/")[0] for line in lines[2:]}
    assert cases == {
        "decode", "prefill", "vision", "add_rms_norm", "silu_mul", "rope_store_kv", "step", "tune",
    }  # fmt: skip
    assert all(us > 0 for line in lines[2:] for us in line["microseconds"].values())
