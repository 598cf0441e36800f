"""Allocates buffers for files, pixels and patches. Large ones return to the system when freed.

malloc keeps freed memory in the arena of each thread. Threads that make patches of 25 MB in turn
would leave that much unused memory in each arena. A large buffer is therefore an mmap of its own,
which is unmapped with its last view. Smaller buffers come from malloc, which reuses them without
page faults.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from vlm_worker.wire.buffers import private_memory

OWN_MAPPING_BYTES: Final = 8 << 20
"""Buffers from this size on are mapped. With huge pages they are as fast to write as others."""


def new_buffer(num_bytes: int) -> memoryview:
    """Uninitialised memory; it lives as long as any view of it."""
    if num_bytes < OWN_MAPPING_BYTES:
        return np.empty(num_bytes, np.uint8).data
    return memoryview(private_memory(num_bytes, huge=True))


def growing_buffer(num_bytes: int) -> memoryview:
    """As `new_buffer`, for bytes that arrive in parts: pages are allocated when written."""
    return memoryview(private_memory(num_bytes))
