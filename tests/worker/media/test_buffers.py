"""Large buffers are the system's again as soon as nobody sees them; small ones are malloc's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from vlm_worker.wire.buffers import OWN_MAPPING_BYTES, new_buffer, private_memory

MIB = 1 << 20

THREADS = """
import sys, threading
from pathlib import Path
import numpy as np
from vlm_worker.wire.buffers import new_buffer
from vlm_worker.serve.process import set_malloc_thresholds

assert set_malloc_thresholds({})
make = new_buffer if sys.argv[1] == "buffers" else lambda size: memoryview(np.empty(size, np.uint8))
kept = []

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

def work():
    for _ in range(2):
        one = make(25_000_000)
        np.frombuffer(one, np.uint8)[:] = 1
        kept.append(b"a small object above it" * 100)  # malloc gives back only what is above all
        del one

before = resident()
for _ in range(8):  # one after the other: what one thread leaves, the next one does not use
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
print(resident() - before)
"""


def grown(how: str) -> int:
    """Bytes that a process keeps whose threads made and dropped patches, one after the other."""
    command = [sys.executable, "-c", THREADS, how]
    environ = {"PYTHONPATH": ":".join(filter(None, sys.path))}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environ)
    return int(done.stdout)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_patches_that_are_not_needed_any_more_are_the_systems() -> None:
    assert grown("buffers") < 20 * MIB
    assert grown("malloc") > 20 * MIB, "malloc alone keeps nothing: the test shows nothing"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_file_takes_memory_as_it_arrives() -> None:
    before = resident()
    file = memoryview(private_memory(512 * MIB))
    assert resident() - before < 16 * MIB
    file[: 32 * MIB] = bytes(32 * MIB)
    del file
    assert resident() - before < 16 * MIB


@pytest.mark.parametrize("size", [0, 1, OWN_MAPPING_BYTES - 1, OWN_MAPPING_BYTES])
def test_a_buffer_has_its_size_and_lives_as_long_as_any_view(size: int) -> None:
    array = np.frombuffer(new_buffer(size), np.uint8)
    assert array.flags.writeable
    array[:] = 7
    assert array.tobytes() == bytes([7]) * size
