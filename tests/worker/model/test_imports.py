"""A start without torch's compiler and its distributed half, neither of which is lost.

And transformers' list of its own names is read once, and whole.
"""

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


LISTED = """
import builtins, contextlib, json, sys
from pathlib import Path
from vlm_worker.model.loader import skip_unused_imports

read = []

def counting(file, *args, **kwargs):
    if "/transformers/models/" in str(file):
        read.append(str(file))
    return plain(file, *args, **kwargs)

plain, builtins.open = builtins.open, counting
lean = sys.argv[1] == "lean"
with skip_unused_imports() if lean else contextlib.nullcontext():
    import transformers, transformers.models
if lean:
    assert len(read) > 1000, "transformers lists its names in another way"
    assert len(read) == len(set(read)), "it reads its files again"
    assert not [each for each in sys.meta_path if "vlm_worker" in type(each).__module__]
modules = (transformers, sys.modules["transformers.models"])
names = [[sorted(set(each.__all__)), each._class_to_module] for each in modules]
print(json.dumps(names, sort_keys=True))
"""


def test_the_names_that_transformers_lists_are_read_once_and_are_all_there() -> None:
    paths = [str(ROOT / "worker"), str(ROOT / "kernels")]
    program = f"import sys; sys.path[:0] = {paths!r}\n{LISTED}"
    listed = []
    for way in ("lean", "plain"):
        done = subprocess.run(
            [sys.executable, "-c", program, way], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        listed.append(done.stdout)
    assert listed[0] == listed[1]
