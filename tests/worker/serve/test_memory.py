"""Freed memory is the next transfer's, unless whoever starts the worker has said otherwise."""

from __future__ import annotations

import platform
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from vlm_worker.serve.process import GROWTH_BYTES, KEPT_BYTES, Growth, set_malloc_thresholds

PAGES_OF_A_FRAME = (1 << 20) // resource.getpagesize()
NUM_FRAMES = 50
SCRIPT = f"""
import resource, sys
sys.path.insert(0, sys.argv[1])
from vlm_worker.serve.process import GROWTH_BYTES, Growth, set_malloc_thresholds
assert not sys.argv[2:] or set_malloc_thresholds({{}})
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
def test_malloc_settings_in_the_environment_are_kept(name: str) -> None:
    assert not set_malloc_thresholds({name: "1"})


LOADED = """
import gc, sys, weakref
sys.path.insert(0, sys.argv[1])
from vlm_worker.serve.process import freeze_gc
class Ring:
    def __init__(self):
        self.ring = self
old = weakref.ref(Ring())
loaded = [[] for _ in range(10_000)]
freeze_gc()
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


@pytest.mark.parametrize("growth_bytes", [GROWTH_BYTES, KEPT_BYTES])
def test_memory_is_given_back_once_for_each_growth(growth_bytes: int) -> None:
    growth = Growth(growth_bytes)
    start = 1 << 30
    assert not growth.is_due(start)
    assert not growth.is_due(start + growth_bytes - 1)
    assert growth.is_due(start + growth_bytes)
    assert not growth.is_due(start + growth_bytes), "what is left is in use"
    assert not growth.is_due(start)
    assert growth.is_due(start + growth_bytes), "it fell meanwhile, and grew again"


FREED = """
import asyncio, sys, threading
import numpy as np
sys.path.insert(0, sys.argv[1])
from vlm_worker.serve import process
assert process.set_malloc_thresholds({})
process.TRIM_SECONDS = 0.01
kept = []

def work():
    pieces = []
    for _ in range(100):
        pieces.append(np.ones(1 << 20, np.uint8))
        kept.append(np.ones(4096, np.uint8))  # malloc alone gives back what is above all others
    pieces.clear()

async def main():
    before = process.resident_bytes()
    task = asyncio.create_task(process.return_freed_memory())
    await asyncio.sleep(0.05)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    most = process.resident_bytes()
    async with asyncio.timeout(20):
        while process.resident_bytes() - before > 32 << 20:
            await asyncio.sleep(0.01)
    assert not task.done()
    assert most - before > 90 << 20

asyncio.run(main())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another malloc than glibc's")
def test_free_memory_between_used_memory_is_returned_to_the_system() -> None:
    worker = str(Path(__file__).parents[3] / "worker")
    subprocess.run([sys.executable, "-c", FREED, worker], check=True, env={"PATH": ""})
