"""Pages of a KV cache on a CPU, had from the system a little ahead of their use.

    |  written before  |  had, AHEAD_BYTES at most  |  address space alone  |
                      ^ the last block in use, so far

A page that is new when a step writes to it is found and zeroed in that step's time, up to a tenth
of a prompt's (docs/decisions/0026). The block pool gives new blocks out in order, so that those
ahead are the next ones.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from vlm_worker.model.advice import POPULATE_WRITE, advise

AHEAD_BYTES: Final = 128 << 20
"""A burst of prompts; a worker at rest has no more than this beyond what it has used."""
STEP_BYTES: Final = 2 << 20
"""A huge page: some tenths of a millisecond, 3 ms on a machine that is slow at it."""


class KVPages:
    """Of a cache whose first axis is blocks; the cache outlives it. Used by one thread."""

    def __init__(self, kv_cache: torch.Tensor) -> None:
        self._start, self._num_bytes = kv_cache.data_ptr(), kv_cache.nbytes
        self._block_bytes = kv_cache.nbytes // len(kv_cache)
        self._end_of_used = self._end_of_had = 0

    def use(self, block_ids: np.ndarray) -> None:
        """Blocks `[N]` are about to be written: their pages come with that."""
        end = (int(block_ids.max(initial=-1)) + 1) * self._block_bytes
        self._end_of_used = max(self._end_of_used, end)

    def have_more(self) -> bool:
        """One step ahead; False where enough is had, or the system gives none unused."""
        begin = max(self._end_of_had, self._end_of_used // STEP_BYTES * STEP_BYTES)
        if begin >= min(self._end_of_used + AHEAD_BYTES, self._num_bytes):
            return False
        end = min(begin + STEP_BYTES, self._num_bytes)
        is_had = advise(self._start + begin, end - begin, POPULATE_WRITE)
        self._end_of_had = end if is_had else self._num_bytes
        return is_had
