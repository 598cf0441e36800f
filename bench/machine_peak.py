"""Probes the peak of the processor with registers only.

`probes.peak_probe` times oneDNN's product, which other code can exceed. `machine_peak.cpp` keeps
the multipliers busy and reads no memory, so nothing exceeds it.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCE = Path(__file__).with_name("machine_peak.cpp")
COMPILERS = ("g++", "clang++", "c++")


def machine_peak_probe(num_threads: int, *, seconds: float) -> Callable[[], float | None]:
    """A probe of operations per second of all threads, with the fastest instruction.

    It gives None if no compiler is here, or if the processor has no fused multiply-add.
    """
    library = _library()
    if library is None or not library.num_kinds():
        return lambda: None
    speed = library.operations_per_second
    kinds = range(library.num_kinds())
    fastest = max(kinds, key=lambda kind: speed(kind, seconds / 5))

    def probe() -> float:
        with ThreadPoolExecutor(num_threads) as threads:
            return sum(threads.map(lambda _: speed(fastest, seconds), range(num_threads)))

    return probe


@functools.cache
def _library() -> ctypes.CDLL | None:
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "machine_peak.so"
        command = [compiler, "-O3", "-march=native", "-shared", "-fPIC", SOURCE, "-o", target]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            return None
        library = ctypes.CDLL(str(target))
    library.num_kinds.restype = ctypes.c_int
    library.operations_per_second.argtypes = (ctypes.c_int, ctypes.c_double)
    library.operations_per_second.restype = ctypes.c_double
    return library
