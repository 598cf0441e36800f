"""Which steps are replayed, and what is known of memory before the KV cache is made."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import torch
from worker.model.gpu.test_decode_steps import BLOCK_SIZE, CACHE, HEAD_DIM, NUM_HEADS, decode

from vlm_worker.model.attention import StepContext
from vlm_worker.model.gpu.graphs import DecodeGraphs, Replay
from vlm_worker.types import KVLayout

LAYOUT = KVLayout("revision", 1, 2, HEAD_DIM, BLOCK_SIZE, "float32")


def squares(ids: torch.Tensor, positions: torch.Tensor, _: StepContext) -> torch.Tensor:
    """A model of two logits: the square of a token's id, and its first position."""
    return torch.stack([ids * ids, positions[0]], dim=1).float()


def graphs(sizes: tuple[int, ...] = (1, 2, 4)) -> DecodeGraphs:
    return DecodeGraphs(
        squares, CACHE, LAYOUT, num_heads=NUM_HEADS, sizes=sizes, num_position_rows=3,
        max_model_len=16,
    )  # fmt: skip


def capture(run: Callable[[], None]) -> Replay:
    run()
    return run


def test_a_step_of_decode_is_replayed_and_others_are_not() -> None:
    made = graphs()
    step = decode([5, 9, 2])
    assert made.logits(step) is None, "nothing is captured yet"
    made.capture(capture)
    logits = made.logits(step)
    assert logits is not None
    assert logits.tolist() == [[2500, 5], [2601, 9], [2704, 2]]
    assert made.logits(decode([1] * 5)) is None, "more sequences than the largest graph has"
    assert made.logits(decode([1], width=5)) is None, "a longer table than graphs have"
    chunk = dataclasses.replace(step, token_ids=np.arange(4), sample_rows=np.array([0, 1, 3]))
    assert made.logits(chunk) is None


def test_what_graphs_are_going_to_take_is_tried_with_the_two_largest() -> None:
    left = iter((1000, 900, 893))
    made = graphs((1, 2, 4, 8))
    assert made.needed_bytes(capture, free_bytes=lambda: next(left)) == 100 + 3 * 7
    assert made.sizes == (4, 8)
