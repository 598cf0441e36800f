"""The memory of a role after loading and packing, before KV, divided by its weights.

    python bench/run.py memory           python bench/memory.py [--model DIR]

Each role is a fresh process that imports its modules, then loads Qwen2-VL with random weights
(`random_vlm`) in bfloat16. Memory is the proportional set size of `/proc/self/smaps_rollup`, which
includes mapped files. `peak` is the peak resident memory while loading, less that before. One JSON
line per role.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import random_vlm

ROOT = Path(__file__).parents[1]
ROLES = ("encoder", "prefill", "decode", "encoder,prefill,decode")
GOAL = 1.15

LOAD = """
import importlib, json, sys
from pathlib import Path

def kib(file, field):
    for line in Path(file).read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])

import vlm_worker.model.build
from vlm_worker.core.families import load_family
from vlm_worker.model.loader import load_model
from vlm_worker.types import Stage
stages = [Stage(name) for name in sys.argv[1].split(",")]
*earlier, directory = sys.argv[2:]
importlib.import_module(load_family(directory).spec.module)
for other in earlier:
    load_model(other, stages)
Path("/proc/self/clear_refs").write_text("5")  # resets the peak resident memory
before = kib("/proc/self/smaps_rollup", "Pss"), kib("/proc/self/status", "VmHWM")
loaded = load_model(directory, stages)
after = kib("/proc/self/smaps_rollup", "Pss"), kib("/proc/self/status", "VmHWM")
print(json.dumps({
    "weights_bytes": loaded.weights_bytes,
    "memory_bytes": (after[0] - before[0]) * 1024,
    "peak_bytes": (after[1] - before[1]) * 1024,
    "packed_layers": loaded.packing.num_layers,
    "copied_bytes": loaded.packing.copied_bytes,
    "load_seconds": round(loaded.load_seconds, 2),
}))
"""


def measure(model_dir: Path, stages: str, *, after: Sequence[Path] = ()) -> dict[str, Any]:
    """Figures of one role in a fresh process.

    If other models are loaded and dropped before (`after`), one-time costs of the first load do not
    count.
    """
    paths = [str(ROOT / "worker"), str(ROOT / "kernels")]
    program = f"import sys; sys.path[:0] = {paths!r}\n{LOAD}"
    done = subprocess.run(
        [sys.executable, "-c", program, stages, *map(str, after), str(model_dir)],
        check=True,
        capture_output=True,
        text=True,
    )
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    ratio = figures["memory_bytes"] / figures["weights_bytes"]
    peak_ratio = figures["peak_bytes"] / figures["weights_bytes"]
    return {**figures, "ratio": round(ratio, 3), "peak_ratio": round(peak_ratio, 3)}


def main() -> None:
    """Print every role."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, help="where the model is, or is to be made")
    args = parser.parse_args()
    with random_vlm.model_directory(args.model) as model_dir:
        for stages in ROLES:
            figures = measure(model_dir, stages)
            met = figures["ratio"] <= GOAL
            line = {"bench": "memory", "stages": stages, **figures, "goal": GOAL, "met": met}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
