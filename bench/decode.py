"""Decode steps against what the machine can do: tokens per second over the limit, per batch size.

    python bench/run.py decode      python bench/decode.py --rounds 9 --model DIR

The limit of a step is the longer of two: reading weights and KV once at the read bandwidth, and
multiplying at the bfloat16 peak. Both are probed in every round, between the batches, so that what
else the machine does slows all alike. Qwen2-VL with random weights in bfloat16 (`random_vlm`), the
model runner alone: no engine, greedy sampling included. One JSON line per batch size.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import random_vlm
from sides import read_bandwidth

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / part) for part in ("worker", "kernels")]

GOALS = {1: 0.75, 4: 0.60, 16: 0.65}
BATCHES = (1, 4, 7, 16)
CONTEXT = 300
SECONDS = 0.5  # of one batch size in one round
PEAK_SIZE = 2048
MOST_MOVED = 1.3
"""Where a probe's best round is more than this times its worst, the machine had other work: the
limits are not known, and `met` is null."""


def main() -> None:
    """Measure, and print one JSON line per batch size."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--model", type=Path, help="where the model is, or is to be made")
    args = parser.parse_args()
    os.putenv("OMP_WAIT_POLICY", "PASSIVE")  # as a worker has it; torch is not imported yet
    with random_vlm.model_directory(args.model) as model_dir:
        bench = Bench(model_dir, args.threads)
    for _ in range(args.rounds):
        bench.round()
    for batch in BATCHES:
        print(json.dumps(bench.figures(batch)), flush=True)


class Bench:
    """One model, its decode steps, and the two probes."""

    def __init__(self, model_dir: Path, threads: int) -> None:
        import torch

        from vlm_worker.model.runner import RunnerSettings, build_runner
        from vlm_worker.types import Stage

        settings = RunnerSettings(
            model_dir, (Stage.DECODE,), dtype="bfloat16", kv_memory_bytes=1 << 28,
            num_threads=threads,
        )  # fmt: skip
        self._torch, self._threads = torch, threads
        self._runner = build_runner(settings)
        self._steps = {batch: self._step(batch) for batch in BATCHES}
        self._seconds: dict[int, list[float]] = {batch: [] for batch in BATCHES}
        self._bandwidths: list[float] = []
        self._peaks: list[float] = []
        a, b = (torch.randn(PEAK_SIZE, PEAK_SIZE).to(torch.bfloat16) for _ in range(2))
        self._square = lambda: torch.nn.functional.linear(a, b)
        for step in self._steps.values():
            self._runner.execute(step)

    def round(self) -> None:
        """Both probes, then each batch size."""
        self._bandwidths.append(read_bandwidth(self._threads))
        self._peaks.append(2 * PEAK_SIZE**3 / _seconds_each(self._square, SECONDS))
        for batch, step in self._steps.items():
            each = _seconds_each(lambda step=step: self._runner.execute(step), SECONDS)
            self._seconds[batch].append(each)

    def figures(self, batch: int) -> dict[str, Any]:
        """Medians over the rounds, each round against its own probes."""
        layout = self._runner.kv_layout
        assert layout is not None
        num_bytes = self._runner.weights_bytes + batch * CONTEXT * layout.token_bytes
        flops = self._runner.weights_bytes * batch  # 2 per weight of 2 bytes
        limits = [
            max(num_bytes / bandwidth, flops / peak)
            for bandwidth, peak in zip(self._bandwidths, self._peaks, strict=True)
        ]
        seconds = self._seconds[batch]
        share = [limit / each for limit, each in zip(limits, seconds, strict=True)]
        figures: dict[str, Any] = {
            "bench": "decode",
            "batch": batch,
            "threads": self._threads,
            "context": CONTEXT,
            "step_ms": round(statistics.median(seconds) * 1e3, 2),
            "tokens_per_second": round(batch / statistics.median(seconds), 1),
            "of_limit": round(statistics.median(share), 3),
            "of_limit_per_round": [round(value, 2) for value in share],
            "read_gb_per_second": round(statistics.median(self._bandwidths) / 1e9, 1),
            "peak_gflop_per_second": round(statistics.median(self._peaks) / 1e9),
        }
        moved = max(max(probe) / min(probe) for probe in (self._bandwidths, self._peaks))
        figures["probes_moved"] = round(moved, 2)
        if (goal := GOALS.get(batch)) is not None:
            is_quiet = moved <= MOST_MOVED
            figures |= {"goal": goal, "met": figures["of_limit"] >= goal if is_quiet else None}
        return figures

    def _step(self, batch: int) -> Any:
        """One new token for each of `batch` sequences that have `CONTEXT` tokens each."""
        from vlm_worker.core.inputs import SampleParams, StepInputs

        layout = self._runner.kv_layout
        assert layout is not None
        num_blocks = CONTEXT // layout.block_size + 1
        table = 1 + np.arange(batch * num_blocks, dtype=np.int32).reshape(batch, num_blocks)
        positions = np.full(batch, CONTEXT, np.int64)
        offset = CONTEXT % layout.block_size
        return StepInputs(
            token_ids=np.arange(batch, dtype=np.int64) + random_vlm.FIRST_WORD,
            positions=np.tile(positions, (self._runner.family.num_position_rows, 1)),
            slot_mapping=table[:, -1].astype(np.int64) * layout.block_size + offset,
            query_start=np.arange(batch + 1, dtype=np.int32),
            context_lens=positions.astype(np.int32),
            block_table=table,
            spans=((),) * batch,
            image_rows=(),
            sample_rows=np.arange(batch),
            sampling=SampleParams.all_greedy(batch),
        )


def _seconds_each(run: Any, at_least: float) -> float:
    began, count = time.perf_counter(), 0
    while (passed := time.perf_counter() - began) < at_least:
        run()
        count += 1
    return passed / count


if __name__ == "__main__":
    main()
