"""Freed memory is the next transfer's, unless whoever starts the worker has said otherwise."""

from __future__ import annotations

import platform
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from vlm_worker.serve.memory import keep_freed_memory

PAGES_OF_A_FRAME = (1 << 20) // resource.getpagesize()
NUM_FRAMES = 50
SCRIPT = f"""
import resource, sys
sys.path.insert(0, sys.argv[1])
from vlm_worker.serve.memory import keep_freed_memory
assert not sys.argv[2:] or keep_freed_memory({{}})
bytes(1 << 20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range({NUM_FRAMES}):
    frames = [bytes([1]) * (1 << 20), bytes([2]) * (1 << 20)]
    del frames
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(*how: str) -> int:
    """Pages that the system gave to a process that makes and drops frames."""
    worker = str(Path(__file__).parents[3] / "worker")
    command = [sys.executable, "-c", SCRIPT, worker, *how]
    environ = {"PATH": ""}
    return int(subprocess.run(command, capture_output=True, check=True, env=environ).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another malloc than glibc's")
def test_a_frame_is_made_where_the_last_one_was() -> None:
    assert faults("keep") < 4 * PAGES_OF_A_FRAME
    assert faults() > 10 * PAGES_OF_A_FRAME, "without, the same frames are new memory each time"


@pytest.mark.parametrize("name", ["MALLOC_ARENA_MAX", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_who_sets_malloc_in_the_environment_is_left_alone(name: str) -> None:
    assert not keep_freed_memory({name: "1"})


LOADED = """
import gc, sys, weakref
sys.path.insert(0, sys.argv[1])
from vlm_worker.serve.memory import keep_what_is_loaded
class Ring:
    def __init__(self):
        self.ring = self
old = weakref.ref(Ring())
loaded = [[] for _ in range(10_000)]
keep_what_is_loaded()
assert old() is None, "rings that nobody holds any more are gone before"
assert len(gc.get_objects()) < 1_000 < gc.get_freeze_count()
new = weakref.ref(Ring())
gc.collect()
assert new() is None, "what comes later is collected"
"""


def test_what_is_loaded_is_passed_over_and_what_comes_later_is_not() -> None:
    worker = str(Path(__file__).parents[3] / "worker")
    command = [sys.executable, "-c", LOADED, worker]
    subprocess.run(command, check=True, env={"PATH": ""})
