"""What the engine thread has at hand: nothing that writes text or answers."""

import subprocess
import sys
from pathlib import Path

WORKER = Path(__file__).parents[3] / "worker"

PROGRAM = """
import sys
import vlm_worker.engine.engine
import vlm_worker.testing

text = {"tokenizers", "msgspec", "jinja2", "starlette", "vlm_worker.gateway"}
assert not text & set(sys.modules), text & set(sys.modules)
"""


def test_detokenising_and_json_are_out_of_the_engines_reach() -> None:
    program = f"import sys; sys.path.insert(0, {str(WORKER)!r})\n{PROGRAM}"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
