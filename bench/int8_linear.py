"""Products on int8 weights: a scale for each row of the inputs, against one known scale.

    python bench/int8_linear.py [--threads 1] [--rounds 9]

Three kernels run in turn: bfloat16, int8 with a scale for each row, int8 with a known scale.
Copies of the weights follow each other, so that no call finds them in a CPU cache. One line per
shape: `static_ratio` is the time with the known scale divided by that with a scale for each row,
and `int8_ratio` the latter divided by bfloat16's. Both are medians over rounds. The last shape has
one panel of outputs, so that it takes as long as making codes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from probes import seconds_per_call

from vlm_kernels.packed_linear import packed_linear
from vlm_kernels.packed_weights import InputScale, PackedWeights, pack

WEIGHTS_BYTES = 64 << 20
SECONDS = 0.1
SCALE = InputScale(4.0 / 127)


@dataclass(frozen=True)
class Shape:
    """Rows, inputs and outputs of a product."""

    name: str
    num_rows: int
    num_inputs: int
    num_outputs: int


SHAPES = (
    Shape("tower qkv, image of 448", 1024, 1280, 3840),
    Shape("tower down, image of 448", 1024, 3420, 1280),
    Shape("layers up, chunk of 256", 256, 1536, 8960),
    Shape("layers up, 16 sequences", 16, 1536, 8960),
    Shape("layers down, 1 sequence", 1, 8960, 1536),
    Shape("codes alone", 1024, 1280, 32),
)


def measure(shape: Shape, rounds: int) -> dict[str, object]:
    """The figures of one shape."""
    torch.manual_seed(0)
    num_copies = max(1, WEIGHTS_BYTES // (shape.num_inputs * shape.num_outputs))
    w = (torch.randn(shape.num_outputs, shape.num_inputs) * 0.02).bfloat16()
    x = torch.randn(shape.num_rows, shape.num_inputs).bfloat16()
    wide = [pack(w) for _ in range(num_copies)]
    by_row = [pack(w, int8=True) for _ in range(num_copies)]
    static = [one.calibrated(SCALE) for one in by_row]
    calls = [caller(x, weights) for weights in (wide, by_row, static)]
    ratios, times = [], []
    for _ in range(rounds):
        bfloat16, dynamic, known = (seconds_per_call(call, seconds=SECONDS) for call in calls)
        ratios.append((known / dynamic, dynamic / bfloat16))
        times.append(dynamic)
    static_ratios, int8_ratios = zip(*ratios, strict=True)
    return {
        "bench": "int8_linear",
        "shape": shape.name,
        "rows": shape.num_rows,
        "microseconds": round(statistics.median(times) * 1e6),
        "static_ratio": round(statistics.median(static_ratios), 3),
        "spread": [round(min(static_ratios), 3), round(max(static_ratios), 3)],
        "int8_ratio": round(statistics.median(int8_ratios), 3),
    }


def caller(x: torch.Tensor, weights: Sequence[PackedWeights]) -> Callable[[], torch.Tensor]:
    """A call that multiplies by the next copy each time."""
    copies = itertools.cycle(weights)
    return lambda: packed_linear(x, next(copies))


def main() -> None:
    """Print one JSON line per shape."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for shape in SHAPES:
        print(json.dumps(measure(shape, args.rounds)), flush=True)


if __name__ == "__main__":
    main()
