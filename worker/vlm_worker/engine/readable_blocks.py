"""Blocks that peers may read while steps run: a transfer does not wait for the end of a step.

engine thread   publish(key, blocks) ... revoke(key), forget(key)    before another sequence writes
other threads   copy: check, copy, check again       a copy of blocks revoked meanwhile is void
                read: check, views; call `check` after copying them
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from vlm_worker.engine.attempts import ResourceKind
from vlm_worker.engine.runner import Runner, run_device_copy
from vlm_worker.errors import GoneError, InvalidRequestError
from vlm_worker.types import RequestKey
from vlm_worker.wire.buffers import BufferViews


@dataclasses.dataclass(eq=False, slots=True)
class _Readable:
    """The readable blocks of one sequence. `revoke` replaces the object.

    Attributes:
        blocks: block ids, in order; written by the engine thread.
        read: a peer has read some; written by readers.
    """

    blocks: tuple[int, ...] = ()
    read: bool = False


class ReadableBlocks:
    """Readable blocks by sequence. Any thread except the engine's calls `copy` and `read`."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._readable: dict[RequestKey, _Readable] = {}

    def num_readable(self, key: RequestKey) -> int:
        """Number of readable blocks of a sequence."""
        readable = self._readable.get(key)
        return len(readable.blocks) if readable is not None else 0

    def was_read(self, key: RequestKey) -> bool:
        """Whether a peer has read blocks of a sequence."""
        readable = self._readable.get(key)
        return readable is not None and readable.read

    def publish(self, key: RequestKey, blocks: Sequence[int]) -> None:
        """Make `blocks` readable: they are written, and not written again while they are held."""
        self._readable.setdefault(key, _Readable()).blocks = tuple(blocks)

    def revoke(self, key: RequestKey) -> None:
        """Revoke the blocks of a preempted sequence: other sequences may write to them."""
        if key in self._readable:
            self._readable[key] = _Readable(read=self._readable[key].read)

    def forget(self, key: RequestKey) -> None:
        """Remove an ended sequence."""
        self._readable.pop(key, None)

    def copy(
        self,
        key: RequestKey,
        first_block: int,
        num_blocks: int,
        out: memoryview | None = None,
    ) -> memoryview:
        """See `Engine.export_blocks`."""
        readable, wanted = self._wanted(key, first_block, num_blocks)
        data = run_device_copy(
            "copying KV blocks out", lambda: self._runner.export_blocks(wanted, out)
        )
        self._check(key, readable)
        return data

    def read(
        self, key: RequestKey, first_block: int, num_blocks: int, out: memoryview
    ) -> memoryview | BufferViews:
        """See `Engine.read_blocks`."""
        readable, wanted = self._wanted(key, first_block, num_blocks)
        memory = self._runner.block_memory(wanted)
        if memory is None:
            return self.copy(key, first_block, num_blocks, out)
        return BufferViews(memory, lambda: self._check(key, readable))

    def _wanted(
        self, key: RequestKey, first_block: int, num_blocks: int
    ) -> tuple[_Readable, tuple[int, ...]]:
        readable = self._readable.get(key)
        if readable is None:
            raise _gone(key)
        blocks, end = readable.blocks, first_block + num_blocks
        if not 0 <= first_block <= end <= len(blocks):
            raise InvalidRequestError(
                f"blocks {first_block} to {end} were asked for; {len(blocks)} are ready"
            )
        readable.read = True
        return readable, blocks[first_block:end]

    def _check(self, key: RequestKey, readable: _Readable) -> None:
        if self._readable.get(key) is not readable:
            raise _gone(key)


@dataclasses.dataclass(eq=False, frozen=True, slots=True)
class ReadableResource:
    """The blocks of one attempt that peers may read."""

    key: RequestKey
    owner: ReadableBlocks
    kind = ResourceKind.READABLE_BLOCKS
    num_bytes = 0

    def release(self) -> bool:
        self.owner.forget(self.key)
        return True


def _gone(key: RequestKey) -> GoneError:
    return GoneError(f"{key.request_id} attempt {key.attempt} holds no blocks here")
