"""KV blocks lent to a transfer, whose thread writes into them beside the steps.

    lend ─▶ the thread writes ... `confirm` what has come and was checked ... ─▶ give back

A loan has a reference of its own to each block. The request may end meanwhile, cancelled or failed:
its blocks are nobody else's before the thread has said that it writes no more.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from vlm_worker.core.blocks import BlockPool
from vlm_worker.engine.runner import Runner
from vlm_worker.types import RequestKey


class Loans:
    """What of each request is lent. Lives on the engine thread."""

    def __init__(self, runner: Runner, pool: BlockPool) -> None:
        self._runner = runner
        self._pool = pool
        self._lent: dict[RequestKey, Sequence[int]] = {}

    def __len__(self) -> int:
        """Loans that have not come back."""
        return len(self._lent)

    def num_without(self, live: Container[RequestKey]) -> int:
        """Loans whose request is not among these any more."""
        return sum(key not in live for key in self._lent)

    def lend(self, key: RequestKey, blocks: Sequence[int]) -> list[memoryview] | None:
        """The memory of blocks in use; None where the runner lets no other thread write."""
        assert key not in self._lent, f"{key} has a loan"
        memory = self._runner.block_memory(blocks, to_write=True)
        if memory is not None:
            self._pool.take(0, shared=blocks)
            self._lent[key] = blocks
        return memory

    def give_back(self, key: RequestKey) -> None:
        """Nobody writes there any more; idempotent."""
        self._pool.release(self._lent.pop(key, ()))
