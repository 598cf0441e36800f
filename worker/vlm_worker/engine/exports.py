"""Blocks that peers may read, copied out beside the steps: a transfer waits for no step's end.

engine thread   show(key, blocks) ... withdraw(key), forget(key)    before others write there
other threads   copy: look, copy, look again                        what was withdrawn meanwhile
                read: look, where they lie; `check` when copied     counts for nothing
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from vlm_worker.engine.guard import guarded
from vlm_worker.engine.runner import Runner
from vlm_worker.errors import GoneError, InvalidRequestError
from vlm_worker.types import RequestKey
from vlm_worker.wire.copying import Lying


@dataclasses.dataclass(eq=False, slots=True)
class _Shown:
    """Of one sequence, until it loses its blocks; another object comes after that.

    Attributes:
        blocks: their ids, in order; the engine thread writes.
        read: a peer has asked for some; readers write.
    """

    blocks: tuple[int, ...] = ()
    read: bool = False


class Exports:
    """What of each sequence may be read. `copy` and `read` are for any thread but the engine's."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._shown: dict[RequestKey, _Shown] = {}

    def num_shown(self, key: RequestKey) -> int:
        """Blocks of a sequence that may be read."""
        shown = self._shown.get(key)
        return len(shown.blocks) if shown is not None else 0

    def was_read(self, key: RequestKey) -> bool:
        """Whether a peer has read blocks of it."""
        shown = self._shown.get(key)
        return shown is not None and shown.read

    def show(self, key: RequestKey, blocks: Sequence[int]) -> None:
        """All blocks of a sequence that are written, and will not be again while it has them."""
        self._shown.setdefault(key, _Shown()).blocks = tuple(blocks)

    def withdraw(self, key: RequestKey) -> None:
        """It was preempted: others may write to its blocks from now on."""
        if key in self._shown:
            self._shown[key] = _Shown(read=self._shown[key].read)

    def forget(self, key: RequestKey) -> None:
        """It has ended: as `withdraw`, for good."""
        self._shown.pop(key, None)

    def copy(
        self,
        key: RequestKey,
        first_block: int,
        num_blocks: int,
        out: memoryview | None = None,
    ) -> memoryview:
        """See `Engine.export_blocks`."""
        shown, wanted = self._wanted(key, first_block, num_blocks)
        data = guarded("copying KV blocks out", lambda: self._runner.export_blocks(wanted, out))
        self._check(key, shown)
        return data

    def read(
        self, key: RequestKey, first_block: int, num_blocks: int, out: memoryview
    ) -> memoryview | Lying:
        """See `Engine.read_blocks`."""
        shown, wanted = self._wanted(key, first_block, num_blocks)
        memory = self._runner.block_memory(wanted)
        if memory is None:
            return self.copy(key, first_block, num_blocks, out)
        return Lying(memory, lambda: self._check(key, shown))

    def _wanted(
        self, key: RequestKey, first_block: int, num_blocks: int
    ) -> tuple[_Shown, tuple[int, ...]]:
        shown = self._shown.get(key)
        if shown is None:
            raise _gone(key)
        blocks, end = shown.blocks, first_block + num_blocks
        if not 0 <= first_block <= end <= len(blocks):
            raise InvalidRequestError(
                f"blocks {first_block} to {end} were asked for; {len(blocks)} are ready"
            )
        shown.read = True
        return shown, blocks[first_block:end]

    def _check(self, key: RequestKey, shown: _Shown) -> None:
        if self._shown.get(key) is not shown:
            raise _gone(key)


def _gone(key: RequestKey) -> GoneError:
    return GoneError(f"{key.request_id} attempt {key.attempt} holds no blocks here")
