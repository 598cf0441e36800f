"""A start without torch's compiler and its distributed half, neither of which is lost."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
MODEL = ROOT / "examples" / "shapes" / "model"

PROGRAM = f"""
import sys
from vlm_worker.model.loader import load_model
from vlm_worker.types import Stage

load_model({str(MODEL)!r}, list(Stage))
heavy = ("torch._dynamo", "torch.distributed.tensor")
assert not [name for name in heavy if name in sys.modules], "a start imports it again"

import torch
from transformers import masking_utils

assert torch.distributed.is_available()
with masking_utils.TransformGetItemToIndex():
    pass
compiled = torch.compile(lambda x: x + 1, backend="eager")
assert compiled(torch.ones(1)).item() == 2
assert hasattr(sys.modules["torch._dynamo"], "optimize")
"""


def test_a_start_imports_neither_and_both_work_when_they_are_asked_for() -> None:
    paths = [str(ROOT / "worker"), str(ROOT / "kernels")]
    program = f"import sys; sys.path[:0] = {paths!r}\n{PROGRAM}"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
