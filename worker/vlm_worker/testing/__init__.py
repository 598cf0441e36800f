"""A runner whose tokens are checksums of its inputs, and a check that a worker is idle.

`ChecksumRunner` implements `engine.runner.Runner`. `answer_alone` computes the same answer without
blocks, batches or chunks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Protocol

from vlm_worker.testing.arithmetic import (
    IMAGE_TOKEN,
    UNWRITTEN,
    VOCABULARY,
    answer_alone,
    embed,
    folded_positions,
    make_image,
    next_token,
    plain_positions,
    slot_values,
    token_logprobs,
    told,
)
from vlm_worker.testing.runner import (
    ChecksumRunner,
    Faults,
)

__all__ = [
    "IMAGE_TOKEN",
    "UNWRITTEN",
    "VOCABULARY",
    "Accountable",
    "ChecksumRunner",
    "Faults",
    "answer_alone",
    "assert_idle",
    "embed",
    "folded_positions",
    "make_image",
    "next_token",
    "plain_positions",
    "slot_values",
    "token_logprobs",
    "told",
]


class Accountable(Protocol):
    """A worker that counts what has not ended: `server.worker_server.WorkerServer`."""

    @property
    def outstanding(self) -> Mapping[str, int]:
        """Nonzero counts of everything that has not ended, by kind."""

    @property
    def num_violations(self) -> int:
        """Accounting mismatches so far."""


async def assert_idle(worker: Accountable, *, within_seconds: float = 15.0) -> None:
    """Wait until a worker has freed everything: blocks, pins, leases, calls, tasks, segments.

    Raises:
        AssertionError: something is outstanding, with its kind and count, or the worker counted an
            accounting mismatch.
    """
    deadline = time.monotonic() + within_seconds
    while outstanding := worker.outstanding:
        assert time.monotonic() < deadline, f"after {within_seconds:g} s: {outstanding}"
        await asyncio.sleep(0.005)
    assert not worker.num_violations, f"{worker.num_violations} accounting mismatches"
