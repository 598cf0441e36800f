"""A kernel that finds no memory raises MemoryError; its process and its threads go on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vlm_kernels.cpu import libraries, native

SECONDS = 120.0

FAILING = """
#include "threads.h"
#include <vector>

namespace {
void allocate(std::ptrdiff_t i, std::ptrdiff_t failing) {
  if (i == failing) std::vector<char> all(std::ptrdiff_t(1) << 60);
}
}  // namespace

TRIPTYCH_EXPORT bool triptych_loop(int count, int failing, int num_threads) try {
  triptych::parallel_for(num_threads, count, [&](std::ptrdiff_t i) { allocate(i, failing); });
  return true;
} catch (const std::bad_alloc&) {
  return false;
}

// Three loops; the item that fails is of the first one. `done` counts the items of the others. The
// caller reads `done` after the team has ended, also if the first loop fails.
TRIPTYCH_EXPORT bool triptych_team(int count, int failing, int num_threads, int* done) try {
  triptych::in_team(num_threads, [&](triptych::Threads& threads) {
    threads.for_each(count, [&](std::ptrdiff_t i) { allocate(i, failing); });
    for (int loop = 0; loop < 2; ++loop) {
      threads.for_each(count, [&](std::ptrdiff_t) {
        __atomic_add_fetch(done, 1, __ATOMIC_RELAXED);
      });
    }
  });
  return true;
} catch (const std::bad_alloc&) {
  return false;
}
"""

THREADS = """
import ctypes, sys
from pathlib import Path
import torch  # brings the threads
from vlm_kernels.cpu import native
library = native.load(Path(sys.argv[1]))
loop = native.typed(library, "triptych_loop", *[ctypes.c_int] * 3)
team = native.typed(library, "triptych_team", *[ctypes.c_int] * 3, ctypes.c_void_p)
done = ctypes.c_int()
for num_threads in (1, 2, 5):
    for failing in (0, 7, 39):
        for kernel, more in ((loop, ()), (team, (ctypes.byref(done),))):
            done.value = 0
            try:
                kernel(40, failing, num_threads, *more)
            except MemoryError:
                assert done.value == 0, "a loop ran without what the one before it makes"
            else:
                raise AssertionError("no error")
            kernel(40, -1, num_threads, *more)
            assert done.value == (80 if more else 0)
print("all went on")
"""

BOUNDED = """
import ctypes, resource
from pathlib import Path
import numpy as np, torch
from vlm_kernels import sampling
from vlm_kernels.cpu import native
kernel = native.function(sampling.SYMBOL, *sampling.ARGUMENTS)
logits = torch.zeros(2, 1 << 24)
rows = np.zeros(2, sampling.ROW)
rows["temperature"], rows["top_p"], rows["num_logprobs"] = 1, 1, -1
rows["edit"], rows["mask"] = -1, -1
tokens = np.full(2, -7)
def sample():
    kernel(logits.data_ptr(), logits.stride(0), False, *logits.shape, rows.ctypes.data,
           *(None,) * 5, 0, tokens.ctypes.data, *(None,) * 3, 2)
torch.ones(1 << 20).sum()  # starts the threads
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
_, hard = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (used + (16 << 20), hard))
try:
    sample()
except MemoryError:
    pass
else:
    raise AssertionError("no error")
resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
sample()
assert (tokens >= 0).all(), tokens
print("went on")
"""


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small library whose kernels can allocate too much."""
    if not any(map(shutil.which, libraries.COMPILERS)):
        pytest.skip("no C++ compiler on this machine: there is nothing to build")
    root = tmp_path_factory.mktemp("failing")
    sources = root / "sources"
    sources.mkdir()
    for name in ("threads.h", "threads.cpp"):
        shutil.copy(libraries.SOURCES / name, sources)
    (sources / "failing.cpp").write_text(FAILING)
    places = libraries.Places(root / "prebuilt", root / "cache", libraries.COMPILERS)
    return libraries.build(libraries.VARIANTS[-1], places, sources=sources)


def run(program: str, *arguments: str) -> str:
    """What a process of its own prints: without the law it would end by a signal."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        env={**os.environ, "PYTHONPATH": ":".join(filter(None, sys.path))},  # noqa: TID251
    )
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    return done.stdout


def test_a_piece_of_work_without_memory_is_a_memory_error_and_no_thread_waits_for_it(
    failing: Path,
) -> None:
    assert "all went on" in run(THREADS, str(failing))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not bound address space")
def test_a_kernel_beyond_the_bound_of_its_process_is_a_memory_error_and_works_afterwards() -> None:
    if native.library() is None:
        pytest.skip("no native library on this machine")
    assert "went on" in run(BOUNDED)
