"""Answers by teacher forcing: one step of the worker's runner over prompt and right answer.

    prompt tokens ... answer tokens but the last     one chunk per sequence, several sequences
              └─▶ logits before each answer token ─▶ the greedy token there

A greedy decode gives the right answer if and only if each of these tokens is the answer's. A
reduced image lacks the placeholders of dropped cells; every other token keeps the position that it
has with the whole image (M-RoPE).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from vlm_worker.core.block_kinds import BlockKinds, BlockShape
from vlm_worker.core.step_values import ImageRows, SampleParams, StepInputs
from vlm_worker.model.vision import Embedding
from vlm_worker.types import ImageItem


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Forced:
    """One sequence.

    Attributes:
        token_ids: int64 `[T]`, the prompt and the answer but for its last token.
        positions: int64 `[P, T]`.
        rows: `[N, hidden_size]`, the visual tokens that the prompt has.
        first: index of the first of these.
        num_answer: tokens of the answer.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    rows: torch.Tensor
    first: int
    num_answer: int


def forced(
    family: Any,
    token_ids: Sequence[int],
    item: ImageItem,
    kept: np.ndarray,
    rows: torch.Tensor,
    *,
    num_answer: int,
) -> Forced:
    """A sequence whose image has the cells `kept` only.

    Args:
        family: of the model (`core.families.Family`).
        token_ids: with the whole image.
        item: the whole image's place among them.
        kept: int64 `[N]`, numbers of cells in raster order, ascending.
        rows: `[N, hidden_size]`.
        num_answer: tokens of the answer; all but the last one are in `token_ids`.
    """
    assert len(kept) == len(rows)
    positions, _ = family.positions(token_ids, (item,))
    rest = np.arange(item.end, len(token_ids))
    index = np.concatenate([np.arange(item.offset), item.offset + kept, rest])
    ids = np.asarray(token_ids, np.int64)[index]
    return Forced(ids, positions[:, index], rows, item.offset, num_answer)


def greedy_tokens(runner: Any, sequences: Sequence[Forced]) -> list[tuple[int, ...]]:
    """The greedy token at each place of the answers, all sequences in one step."""
    kinds = BlockKinds.of_layout(runner.kv_layout)
    output = runner.execute(step_inputs(sequences, kinds=kinds))
    ends = np.cumsum([one.num_answer for one in sequences])
    return [tuple(part.tolist()) for part in np.split(output.token_ids, ends[:-1])]


def shape_of(sequence: Forced, kinds: BlockKinds) -> BlockShape:
    """The KV blocks of a sequence."""
    image = ImageItem(b"", sequence.first, len(sequence.rows), (1, 1, len(sequence.rows)))
    return kinds.of_items((image,))


def step_inputs(sequences: Sequence[Forced], *, kinds: BlockKinds) -> StepInputs:
    """One chunk per sequence, from its first token on; blocks are given from 1 on."""
    lengths = np.array([len(one.token_ids) for one in sequences])
    starts = np.concatenate([[0], np.cumsum(lengths)])
    size = kinds.block_size
    width = -(-int(lengths.max()) // size) + kinds.num_parts
    table = np.zeros((len(sequences), width), np.int32)
    slots, image_rows, sampled = [], [], []
    block = 1
    for number, (one, start) in enumerate(zip(sequences, starts[:-1], strict=True)):
        shape = shape_of(one, kinds)
        num_blocks = shape.num_blocks(int(lengths[number]))
        entries = shape.entries(range(block, block + num_blocks))
        table[number, : len(entries)] = entries
        index = np.arange(lengths[number])
        slots.append(table[number, index // size].astype(np.int64) * size + index % size)
        block += num_blocks
        image_rows.append(ImageRows(Embedding(one.rows), 0, int(start) + one.first, len(one.rows)))
        sampled.append(np.arange(start + lengths[number] - one.num_answer, start + lengths[number]))
    rows = np.concatenate(sampled)
    return StepInputs(
        token_ids=np.concatenate([one.token_ids for one in sequences]),
        positions=np.concatenate([one.positions for one in sequences], axis=1),
        slot_mapping=np.concatenate(slots),
        query_start=starts.astype(np.int32),
        context_lens=np.zeros(len(sequences), np.int32),
        block_table=table,
        spans=((),) * len(sequences),
        image_rows=tuple(image_rows),
        sample_rows=rows,
        sampling=SampleParams.all_greedy(len(rows)),
    )
