"""What one scheduler step costs while everything decodes: microseconds, and how they grow.

    python bench/scheduler.py        one JSON object on stdout

A step here is all that the engine does besides the model: schedule, build the arrays, update. Sizes
are measured in interleaved rounds, so that a slow moment falls on all of them; medians.
"""

from __future__ import annotations

import json
import statistics
import time

import numpy as np

from vlm_worker.core.batch import BatchBuilder
from vlm_worker.core.blocks import BlockPool
from vlm_worker.core.scheduler import Scheduler
from vlm_worker.core.sequence import Sequence
from vlm_worker.core.table import SequenceTable
from vlm_worker.types import Request, RequestKey, SamplingParams

SIZES = (16, 64, 256)
BLOCK_SIZE = 16
MAX_MODEL_LEN = 4096
PROMPT = 100
ROUNDS = 40
STEPS = 25
TARGET_US = 150


class Decoding:
    """`size` sequences in the middle of their answers."""

    def __init__(self, size: int) -> None:
        self.table = SequenceTable(
            size, max_model_len=MAX_MODEL_LEN, block_size=BLOCK_SIZE, eos_token_ids=(2,)
        )
        blocks_each = -(-(PROMPT + 50 + ROUNDS * STEPS + 100) // BLOCK_SIZE)
        budget = size * (PROMPT + 50)
        self.scheduler = Scheduler(
            BlockPool(size * blocks_each + 1, block_size=BLOCK_SIZE),
            self.table,
            max_num_batched_tokens=budget,
        )
        self.builder = BatchBuilder(self.table, max_num_batched_tokens=budget, whole_images=False)
        for number in range(size):
            self.scheduler.add(_sequence(number))
        while self.table.prefill_rows or self.scheduler.waiting:
            self.step()
        self.sampled = np.full(size, 7, np.int64)

    def step(self) -> None:
        """One step, the model left out."""
        plan = self.scheduler.schedule(now=0.0).plan
        assert plan is not None
        inputs = self.builder.build(plan)
        self.scheduler.update(plan, np.full(len(inputs.sample_rows), 7, np.int64))

    def measure(self) -> float:
        """Microseconds of a step, mean of one round."""
        started = time.perf_counter()
        for _ in range(STEPS):
            self.step()
        return (time.perf_counter() - started) / STEPS * 1e6


def _sequence(number: int) -> Sequence:
    length = PROMPT + number % 50
    token_ids = tuple(range(number, number + length))
    request = Request(
        RequestKey(str(number), 0), token_ids, length, SamplingParams(max_tokens=MAX_MODEL_LEN)
    )
    return Sequence(
        request=request,
        arrival=number,
        token_ids=np.array(token_ids, np.int32),
        positions=np.arange(length)[None],
        position_delta=0,
    )


def main() -> None:
    """Measure and print."""
    decoding = {size: Decoding(size) for size in SIZES}
    rounds: dict[int, list[float]] = {size: [] for size in SIZES}
    for _ in range(ROUNDS):
        for size in SIZES:
            rounds[size].append(decoding[size].measure())
    step_us = {size: statistics.median(rounds[size]) for size in SIZES}
    report = {
        "bench": "scheduler",
        "step_us": {str(size): round(step_us[size], 1) for size in SIZES},
        "ratio_largest_to_smallest": round(step_us[SIZES[-1]] / step_us[SIZES[0]], 2),
        "size_ratio": SIZES[-1] / SIZES[0],
        "target_us_at_256": TARGET_US,
        "met": step_us[256] <= TARGET_US,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
