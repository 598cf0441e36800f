"""Flash attention of packed segments against torch's SDPA and the peak of bfloat16 products.

    python bench/run.py attention      python bench/attention.py --threads 2 --rounds 7

The native kernel, SDPA and a square product that probes the peak run in turn. `against_sdpa` is
SDPA's time divided by ours. `of_peak` is our operations per second (two products over the attended
keys) divided by the probe's. Both are medians over rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from dataclasses import dataclass

import numpy as np
import torch
from probes import peak_probe, seconds_per_call
from torch.nn import functional

from vlm_kernels.flash_attention import can_attend_segments, flash_attention
from vlm_kernels.segments import plan_segments, seen_by

SECONDS = 0.12


@dataclass(frozen=True)
class Shape:
    """Equal segments; each has `num_queries` queries, the last positions of `num_keys` keys."""

    name: str
    num_segments: int
    num_queries: int
    num_keys: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    causal: bool
    goal: float | None = None


SHAPES = (
    Shape("ViT 1024 x 12 x 64", 1, 1024, 1024, 12, 12, 64, False, 2.0),
    Shape("CLIP-L 576 x 16 x 64", 1, 576, 576, 16, 16, 64, False, 2.0),
    Shape("causal 575, 8/2 x 128", 1, 575, 575, 8, 2, 128, True, 2.0),
    Shape("windows 16 of 64 x 16 x 80", 16, 64, 64, 16, 16, 80, False),
    Shape("chunk 256 after 1792, 8/2 x 128", 1, 256, 2048, 8, 2, 128, True),
)


class Case:
    """One shape with its tensors, as a model passes them: the packed axis is not the first."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        tokens, keys = (shape.num_segments * each for each in (shape.num_queries, shape.num_keys))
        self.q = torch.randn(shape.num_heads, tokens, shape.head_dim).bfloat16().transpose(0, 1)
        self.k, self.v = (
            torch.randn(2, shape.num_kv_heads, keys, shape.head_dim).bfloat16().transpose(1, 2)
        )
        positions = np.arange(shape.num_keys - shape.num_queries, shape.num_keys)
        first, end = seen_by(positions)
        if not shape.causal:
            end = np.full_like(end, shape.num_keys)
        number = shape.num_segments
        self._segments = plan_segments(
            np.full(number, shape.num_queries),
            np.full(number, shape.num_keys),
            np.tile(first, number),
            np.tile(end, number),
        )
        self.flops = 4 * number * shape.num_heads * shape.head_dim * int((end - first).sum())
        self._out = torch.empty(self.q.shape, dtype=torch.bfloat16)
        groups = shape.num_heads // shape.num_kv_heads
        self._repeated = [x.repeat_interleave(groups, dim=1) for x in (self.k, self.v)]
        is_square = shape.num_queries == shape.num_keys
        self._mask = None
        if shape.causal and not is_square:
            self._mask = torch.from_numpy(np.arange(shape.num_keys) < end[:, None])
        self._is_causal = shape.causal and is_square

    def ours(self) -> torch.Tensor:
        """The native kernel."""
        scale = self.shape.head_dim**-0.5
        flash_attention(self._segments, self.q, self.k, self.v, self._out, scale=scale)
        return self._out

    def sdpa(self) -> torch.Tensor:
        """Torch's fused kernel on the segments as a batch."""
        number = self.shape.num_segments
        q, k, v = (
            x.view(number, -1, *x.shape[1:]).transpose(1, 2) for x in (self.q, *self._repeated)
        )
        o = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=self._mask, is_causal=self._is_causal
        )
        return o.transpose(1, 2).flatten(0, 1)


def measure(shape: Shape, rounds: int, threads: int) -> dict[str, object]:
    """The figures of one shape."""
    case = Case(shape)
    peak = peak_probe(seconds=SECONDS)
    error = (case.ours().float() - case.sdpa().float()).abs().max().item()
    times, speedups, peaks, shares = [], [], [], []
    for _ in range(rounds):
        own, other = (seconds_per_call(run, seconds=SECONDS) for run in (case.ours, case.sdpa))
        peaks.append(peak())
        times.append(own)
        speedups.append(other / own)
        shares.append(case.flops / own / peaks[-1])
    speedup = statistics.median(speedups)
    figures: dict[str, object] = {
        "bench": "attention",
        "shape": shape.name,
        "threads": threads,
        "microseconds": round(statistics.median(times) * 1e6),
        "gflop_per_second": round(case.flops / statistics.median(times) / 1e9),
        "peak_gflop_per_second": round(statistics.median(peaks) / 1e9),
        "of_peak": round(statistics.median(shares), 2),
        "against_sdpa": round(speedup, 2),
        "spread": [round(min(speedups), 2), round(max(speedups), 2)],
        "largest_difference": round(error, 4),
    }
    return figures | ({"goal": shape.goal, "met": speedup >= shape.goal} if shape.goal else {})


def main() -> None:
    """One JSON line per shape."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if not can_attend_segments(torch.bfloat16, torch.device("cpu")):
        print(json.dumps({"bench": "attention", "skipped": "no native kernel on this machine"}))
        return
    for shape in SHAPES:
        print(json.dumps(measure(shape, args.rounds, args.threads)), flush=True)


if __name__ == "__main__":
    main()
