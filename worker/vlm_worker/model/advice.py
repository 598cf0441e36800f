"""What the system is told of memory that is no `mmap` object of ours: madvise(2)."""

from __future__ import annotations

import ctypes
from typing import Final

DONTNEED: Final = 4
"""Nobody reads these pages again: those of a file are dropped."""
POPULATE_WRITE: Final = 23
"""Since Linux 5.14: pages are there as if written to, with what they hold."""

_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def advise(start: int, num_bytes: int, advice: int) -> bool:
    """Of memory from an address at a page's beginning on; False where the system refuses."""
    return bool(_madvise(start, num_bytes, advice) == 0)
