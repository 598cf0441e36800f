"""What a process keeps: freed memory, for what comes next, and all that is loaded.

A new page costs more than what is written to it; and what is loaded, the collector of cycles need
not look through again.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Mapping
from typing import Final

MAPPED_FROM_BYTES: Final = 32 << 20
"""A single piece so large is the system's again as soon as it is freed; glibc's own way ends here
too, once such a piece was freed, but begins at 128 KiB."""
KEPT_BYTES: Final = 128 << 20
"""Most that stays at the end of an arena."""

# of malloc.h
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3


def keep_freed_memory(environ: Mapping[str, str]) -> bool:
    """Let malloc reuse what a frame of a transfer was in for the next one.

    False where nothing was set: the environment sets malloc's thresholds, or it is not glibc's.
    """
    if any(name.startswith("MALLOC_") for name in environ) or "GLIBC_TUNABLES" in environ:
        return False
    process = ctypes.CDLL(None)
    if not hasattr(process, "mallopt"):
        return False
    thresholds = {_M_MMAP_THRESHOLD: MAPPED_FROM_BYTES, _M_TRIM_THRESHOLD: KEPT_BYTES}
    return all(process.mallopt(which, num_bytes) for which, num_bytes in thresholds.items())


def keep_what_is_loaded() -> None:
    """Let the collector of cycles pass over all that lives by now, to this process's end.

    Modules and weights are about a million objects, which it looks through in a quarter of a
    second, with every thread at rest, and does so again and again as requests come.
    """
    gc.collect()
    gc.freeze()
