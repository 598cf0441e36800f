"""Products with int8 and int4 weights, beside torch's own with bfloat16 weights.

Few rows wait for weights: `times_of_ours` of a half or a quarter of the bytes is up to 2 and 4.
Many rows wait for products, and gain nothing. Share of read bandwidth: bytes of each one's own
weights per second over what the probe read. No goal speaks of these.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from timing import Bench, Case, report
from torch.nn import functional

from vlm_kernels import QuantisedWeights, quantise_weights, quantised_linear

SHAPES = ((4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944))
"""Outputs and inputs of Qwen2.5-VL-7B's layers: q, k, v; o; gate and up; down."""
ROWS = (1, 16, 64, 1024)
KINDS: dict[str, int | None] = {"int8": None, "int4": 128}
"""And inputs that share a scale."""


def cases(bench: Bench) -> Iterator[Case]:
    """One line per kind of weights, shape and number of rows."""
    for kind, group in KINDS.items():
        for outputs, inputs in ((40, 256),) if bench.is_smoke else SHAPES:
            for rows in (3,) if bench.is_smoke else ROWS:
                yield functools.partial(measure, bench, kind, group, (rows, outputs, inputs))


def measure(
    bench: Bench, kind: str, group: int | None, shape: tuple[int, int, int]
) -> dict[str, Any]:
    """Ours, and torch's."""
    rows, outputs, inputs = shape
    x = bench.randn(rows, inputs)
    plain = bench.randn(outputs, inputs) * inputs**-0.5
    rounded = quantise_weights(plain, group=group)
    num_bytes = {"ours": bytes_of(rounded), "torch": plain.numel() * plain.element_size()}
    ours = bench.rotating(num_bytes["ours"], lambda: copied(rounded))
    theirs = bench.rotating(num_bytes["torch"], plain.clone)
    took = bench.medians(
        {
            "ours": lambda: quantised_linear(x, next(ours)),
            "torch": lambda: functional.linear(x, next(theirs)),
        }
    )
    line = report(f"weights/{kind}/{rows}x{outputs}x{inputs}", took, of=0, limit=1)
    line["share"] = {
        name: round(num_bytes[name] / s / bench.limits.read, 3) for name, s in took.items()
    }
    line["times_of_ours"] = {"torch": round(took["torch"] / took["ours"], 2)}
    return line


def bytes_of(weights: QuantisedWeights) -> int:
    """That a product reads of them."""
    return sum(x.numel() * x.element_size() for x in (weights.codes, weights.scales))


def copied(weights: QuantisedWeights) -> QuantisedWeights:
    """Of the same numbers, elsewhere."""
    codes, scales = weights.codes.clone(), weights.scales.clone()
    return QuantisedWeights(codes, scales, weights.group)
