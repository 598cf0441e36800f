"""Decode attention over KV blocks against memory bandwidth and torch's operations.

    python bench/run.py paged_attention      python bench/paged_attention.py --threads 2 --rounds 7

Each shape has a bfloat16 cache of about 600 MB and an int8 cache of as many tokens. Blocks of 64
tokens are in random order, and layers follow each other, so that no call finds its KV in a CPU
cache. The native kernel over both caches, torch's operations and the bandwidth probe run in turn.
`share` is the kernel's KV bytes per second divided by the probe's in the same round;
`int8_against_bfloat16` is bfloat16's time divided by int8's. Both are medians over rounds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from probes import seconds_per_call
from sides import read_bandwidth

from vlm_kernels import paged_attention, plan_attention, store_kv
from vlm_worker.model.memory import make_kv_cache
from vlm_worker.types import KVLayout

BLOCK_SIZE, HEAD_DIM = 64, 128
CACHE_BYTES = 600 << 20
SECONDS = 0.15


@dataclass(frozen=True)
class Shape:
    """Heads, sequences and their length; `goal` is the minimum share of bandwidth."""

    name: str
    num_heads: int
    num_kv_heads: int
    num_seqs: int
    num_kv: int
    goal: float


SHAPES = (
    Shape("MHA 32/32", 32, 32, 4, 1024, 0.70),
    Shape("MHA 32/32", 32, 32, 1, 8192, 0.70),
    Shape("GQA-4 8/2", 8, 2, 16, 1024, 0.55),
    Shape("GQA-4 8/2", 8, 2, 1, 8192, 0.55),
    Shape("GQA-7 28/4", 28, 4, 16, 1024, 0.40),
    Shape("GQA-8 64/8", 64, 8, 16, 1024, 0.40),
)


class Case:
    """One shape with its cache."""

    def __init__(self, shape: Shape, kv_dtype: str) -> None:
        elements = 2 * shape.num_seqs * shape.num_kv * shape.num_kv_heads * HEAD_DIM
        self.num_layers = max(1, CACHE_BYTES // (2 * elements))
        num_blocks = shape.num_kv // BLOCK_SIZE
        layout = KVLayout(
            "bench", self.num_layers, shape.num_kv_heads, HEAD_DIM, BLOCK_SIZE, kv_dtype
        )
        self.bytes_read = shape.num_seqs * shape.num_kv * layout.token_bytes // self.num_layers
        cache = make_kv_cache(layout, shape.num_seqs * num_blocks + 1, torch.device("cpu"))
        rng = np.random.default_rng(0)
        slots = torch.arange(BLOCK_SIZE, len(cache) * BLOCK_SIZE)
        noise = torch.from_numpy(
            rng.standard_normal((2, len(slots), shape.num_kv_heads, HEAD_DIM), np.float32)
        ).bfloat16()
        for layer in range(self.num_layers):
            store_kv(noise[0], noise[1], cache, layer, slots)
        self.cache = cache
        table = 1 + rng.permutation(shape.num_seqs * num_blocks).reshape(shape.num_seqs, -1)
        self._args = (
            np.arange(shape.num_seqs + 1, dtype=np.int32),
            np.full(shape.num_seqs, shape.num_kv - 1, np.int32),
            table.astype(np.int32),
            cache,
        )
        self.q = torch.randn(shape.num_seqs, shape.num_heads, HEAD_DIM).bfloat16()

    def runner(self, *, native: bool) -> Callable[[], torch.Tensor]:
        """A call that computes the next layer each time."""
        plan = plan_attention(
            *self._args, head_dim=HEAD_DIM, dtype=torch.bfloat16, use_native=native
        )
        assert native == (plan.rows is not None), "no native kernel on this machine"
        layers = itertools.cycle(range(self.num_layers))
        return lambda: paged_attention(self.q, self.cache, next(layers), plan, scale=HEAD_DIM**-0.5)


def measure(shape: Shape, rounds: int, threads: int) -> dict[str, object]:
    """The figures of one shape."""
    case, eight = Case(shape, "bfloat16"), Case(shape, "int8")
    native, torch_ops = case.runner(native=True), case.runner(native=False)
    over_int8 = eight.runner(native=True)
    error = (native().float() - torch_ops().float()).abs().max().item()
    shares, times, speedups, probes, gains = [], [], [], [], []
    for _ in range(rounds):
        own, other, eight_bits = (
            seconds_per_call(run, seconds=SECONDS) for run in (native, torch_ops, over_int8)
        )
        gains.append(own / eight_bits)
        probes.append(read_bandwidth(threads))
        shares.append(case.bytes_read / own / probes[-1])
        times.append(own)
        speedups.append(other / own)
    share = statistics.median(shares)
    return {
        "bench": "paged_attention",
        "shape": shape.name,
        "sequences": shape.num_seqs,
        "tokens": shape.num_kv,
        "threads": threads,
        "microseconds": round(statistics.median(times) * 1e6),
        "gb_per_second": round(case.bytes_read / statistics.median(times) / 1e9, 1),
        "read_gb_per_second": round(statistics.median(probes) / 1e9, 1),
        "share": round(share, 2),
        "spread": [round(min(shares), 2), round(max(shares), 2)],
        "against_torch_operations": round(statistics.median(speedups), 1),
        "int8_against_bfloat16": round(statistics.median(gains), 2),
        "largest_difference": round(error, 4),
        "goal": shape.goal,
        "met": share >= shape.goal,
    }


def main() -> None:
    """One JSON line per shape."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for shape in SHAPES:
        print(json.dumps(measure(shape, args.rounds, args.threads)), flush=True)


if __name__ == "__main__":
    main()
