"""Decode-only steps, padded to the sizes of graphs, in arrays at fixed addresses.

    3 sequences in size 4     ids  [a b c 0]   slots  [s t u -1]   limit  [9 4 7 1]   table  [.. 0]

A padding row is token 0 at position 0. It reads one position of the null block, which is zero, so
its values are finite. Its KV is not written (slot -1). The choice of steps and sizes uses only
numpy; a `StaticStep` is the memory of one size, on the host and on the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch

from vlm_kernels import AttentionPlan
from vlm_kernels.segments import seen_by
from vlm_kernels.tiled_attention import check_blocks, plan_captured
from vlm_worker.core.step_values import StepInputs

T = TypeVar("T")

SMALL_SIZES, STRIDE = (1, 2, 4), 8
"""The small sizes, and the stride of larger ones: 7 rows of padding cost less than the weights."""

NUM_WINDOWS = 2
"""Number of different attention windows of a model's layers; no family has more."""

NUM_LONG = 3
"""The first NUM_LONG arrays of a step are int64, the others int32."""

NO_SLOT, NULL_BLOCK = -1, 0


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """The sizes 1, 2, 4, 8, 16, 24, ... and `max_num_seqs`; empty if that is 0."""
    sizes = {*SMALL_SIZES, *range(STRIDE, max_num_seqs, STRIDE), max_num_seqs}
    return tuple(sorted(size for size in sizes if 0 < size <= max_num_seqs))


def size_for(num_seqs: int, sizes: tuple[int, ...]) -> int | None:
    """The smallest size of at least `num_seqs`; None if there is none."""
    return min((size for size in sizes if size >= num_seqs), default=None)


def is_decode(inputs: StepInputs) -> bool:
    """Whether each sequence has exactly one new token, sampled, and no image is involved."""
    num_seqs = len(inputs.context_lens)
    return (
        len(inputs.token_ids) == num_seqs
        and not inputs.image_rows
        and not any(inputs.spans)
        and np.array_equal(inputs.sample_rows, np.arange(num_seqs))
    )


class StepFields(NamedTuple, Generic[T]):
    """The inputs of a step of one size: arrays on the host, or tensors on the device.

    Attributes:
        ids: int64 `[S]`.
        slots: int64 `[S]`; -1 for padding.
        positions: int64 `[P, S]`.
        firsts: int32 `[NUM_WINDOWS, S]`, the first position that a layer attends to, by window.
        limit: int32 `[S]`, the last position that it attends to, plus 1.
        table: int32 `[S, B]`, the block table.
    """

    ids: T
    slots: T
    positions: T
    firsts: T
    limit: T
    table: T


class StaticStep:
    """The memory of one size: `load` fills the host arrays and copies them; a graph reads those."""

    def __init__(
        self, host: torch.Tensor, device: torch.Tensor, shapes: Sequence[tuple[int, ...]]
    ) -> None:
        self._host, self._device = host, device
        self._arrays = StepFields(*(part.numpy() for part in _cut(host, shapes)))
        self.fields = StepFields(*_cut(device, shapes))
        self._windows: list[int | None] = []

    @property
    def size(self) -> int:
        """Sequences, padding included."""
        return len(self.fields.ids)

    def plan(
        self, window: int | None, kv_cache: torch.Tensor, *, head_dim: int, num_heads: int
    ) -> AttentionPlan:
        """The attention plan of layers with this window; each later `load` fills it.

        At most NUM_WINDOWS different windows are supported.
        """
        if window not in self._windows:
            self._windows.append(window)
        assert len(self._windows) <= NUM_WINDOWS, f"windows {self._windows}"
        return plan_captured(
            self.fields.firsts[self._windows.index(window)],
            self.fields.limit,
            self.fields.table,
            kv_cache,
            head_dim=head_dim,
            num_heads=num_heads,
        )

    def fits(self, inputs: StepInputs) -> bool:
        """Whether the block table of `inputs` is not wider than that of this size."""
        return inputs.block_table.shape[1] <= self._arrays.table.shape[1]

    def load(self, inputs: StepInputs, kv_cache: torch.Tensor, *, head_dim: int) -> None:
        """Fill the arrays, pad them, and copy them to the device.

        Raises:
            ValueError: a block is not in the cache, or a sequence is longer than its blocks.
        """
        to, count = self._arrays, len(inputs.context_lens)
        check_blocks(inputs.context_lens + 1, inputs.block_table, kv_cache, head_dim=head_dim)
        to.ids[:count] = inputs.token_ids
        to.slots[:count] = inputs.slot_mapping
        to.positions[:, :count] = inputs.positions
        for number, window in enumerate(self._windows):
            to.firsts[number, :count], to.limit[:count] = seen_by(
                inputs.context_lens, window=window
            )
        to.table[:count, : inputs.block_table.shape[1]] = inputs.block_table
        self._pad(count)

    def clear(self) -> None:
        """Load only padding, for a capture."""
        self._pad(0)

    def _pad(self, count: int) -> None:
        """Pad the rows from `count` on, and copy all arrays to the device."""
        to = self._arrays
        to.ids[count:], to.slots[count:], to.positions[:, count:] = 0, NO_SLOT, 0
        to.firsts[:, count:], to.limit[count:], to.table[count:, 0] = 0, 1, NULL_BLOCK
        self._device.copy_(self._host, non_blocking=True)


def static_steps(
    sizes: Sequence[int], *, num_position_rows: int, table_width: int, device: torch.device
) -> dict[int, StaticStep]:
    """Make a StaticStep per size. They share the memory of the largest: one is used at a time.

    The runner waits for the tokens of a step before it loads the next, so the asynchronous copy has
    ended by then.
    """
    shapes = {
        size: (
            *((size,), (size,), (num_position_rows, size)),
            *((NUM_WINDOWS, size), (size,), (size, table_width)),
        )
        for size in sizes
    }
    words = max(map(_num_words, shapes.values()))
    host = torch.zeros(words, dtype=torch.int64, pin_memory=device.type == "cuda")
    on_device = torch.zeros(words, dtype=torch.int64, device=device)
    return {
        size: StaticStep(host[: _num_words(cut)], on_device[: _num_words(cut)], cut)
        for size, cut in shapes.items()
    }


def _num_words(shapes: Sequence[tuple[int, ...]]) -> int:
    """Words of 8 bytes that arrays of these shapes need."""
    longs, shorts = map(math.prod, shapes[:NUM_LONG]), map(math.prod, shapes[NUM_LONG:])
    return sum(longs) + -(-sum(shorts) // 2)


def _cut(flat: torch.Tensor, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
    """Cut int64 memory into views of these shapes."""
    counts = [math.prod(shape) for shape in shapes]
    num_longs = sum(counts[:NUM_LONG])
    longs, shorts = flat[:num_longs], flat[num_longs:].view(torch.int32)
    parts = [
        *torch.split(longs, counts[:NUM_LONG]),
        *torch.split(shorts[: sum(counts[NUM_LONG:])], counts[NUM_LONG:]),
    ]
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
