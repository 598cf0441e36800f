"""Try tile sizes, warps and stages of attention and of int8 products; winners: `configs.json`.

The kernels read that table when they start: nothing is tuned while requests wait. A device's old
winners are replaced, those of other devices stay. A shape that several models have is won by what
takes least, each model's times in units of its own best.
"""

from __future__ import annotations

import functools
import itertools
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from decode import ours
from prefill import tower
from shapes import Heads, Steps, models
from timing import Bench, Case
from triton.runtime.errors import OutOfResources
from weights import SHAPES, copied

from vlm_kernels import quantise_weights, quantised_linear, varlen_attention
from vlm_kernels.gpu import configs

Grid = Mapping[str, tuple[int, ...]]

ATTENTION: Grid = {"TILE_N": (32, 64, 128), "num_warps": (2, 4, 8), "num_stages": (2, 3, 4)}
TOWERS: Grid = {**ATTENTION, "TILE_M": (64, 128), "num_warps": (4, 8), "num_stages": (2, 3)}
PRODUCTS: Grid = {"TILE_N": (16, 32, 64), "TILE_K": (128, 256), "num_warps": (2, 4, 8)}

TABLE = Path(configs.__file__).with_name("configs.json")


@dataclass(frozen=True)
class Trial:
    """A kernel on one shape of the table.

    Attributes:
        kernel: as the table names it.
        shape: likewise.
        model: whose shapes are tried.
        grid: choices of each parameter.
        make: what is measured, once per choice.
    """

    kernel: str
    shape: str
    model: str
    grid: Grid
    make: Callable[[], Callable[[], Any]]


def cases(bench: Bench) -> Iterator[Case]:
    """One line per trial, with all that was tried; then the table is written."""
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    for trial in trials(bench):
        yield functools.partial(measure, bench, trial, found)
    if not bench.is_smoke:
        table = json.loads(TABLE.read_text())
        table[configs._name(bench.device)] = winners(found)
        TABLE.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")


def measure(
    bench: Bench, trial: Trial, found: dict[tuple[str, str], list[dict[str, float]]]
) -> dict[str, Any]:
    """Times of all choices, kept in `found` too."""
    took = tried(bench, trial)
    found.setdefault((trial.kernel, trial.shape), []).append(took)
    return {
        "case": f"tune/{trial.kernel}/{trial.shape}/{trial.model}",
        "best": min(took, key=lambda name: took[name]),
        "microseconds": {name: round(s * 1e6, 1) for name, s in took.items()},
    }


def winners(
    found: Mapping[tuple[str, str], list[dict[str, float]]],
) -> dict[str, dict[str, dict[str, int]]]:
    """By kernel and shape: the fastest in all, of the choices that fit for every model."""
    table: dict[str, dict[str, dict[str, int]]] = {}
    for (kernel, shape), runs in found.items():
        shared = set.intersection(*(set(took) for took in runs))
        if shared:
            slow = {name: sum(took[name] / min(took.values()) for took in runs) for name in shared}
            best = min(sorted(shared), key=lambda name: slow[name])
            table.setdefault(kernel, {})[shape] = json.loads(best)
    return table


def trials(bench: Bench) -> Iterator[Trial]:
    """Attention over blocks, full decode and one long prompt; a tower's; products of few rows."""
    batch, total, prompt = (2, 20, 40) if bench.is_smoke else (64, 2048, 4096)
    for heads in models(bench):
        for steps in (Steps(heads, [1] * batch, [total] * batch), Steps(heads, [prompt], [prompt])):
            tiles = steps.plan(steps.cache(bench, bench.dtype), bench.dtype).tiles
            assert tiles is not None
            shape = f"d{heads.head_dim}/m{tiles.launches[0].num_rows}"
            make = functools.partial(ours, bench, steps, bench.dtype)
            yield Trial("paged_attention", shape, heads.name, ATTENTION, make)
    heads = tower(bench)
    make = functools.partial(images, bench, heads)
    yield Trial("varlen_attention", f"d{heads.head_dim}", heads.name, TOWERS, make)
    for outputs, inputs in ((40, 64),) if bench.is_smoke else SHAPES:
        yield Trial(
            "quantised_linear/few", f"int8/n{outputs}/k{inputs}", "qwen2.5-vl-7b", PRODUCTS,
            functools.partial(product, bench, outputs, inputs),
        )  # fmt: skip


def images(bench: Bench, heads: Heads) -> Callable[[], Any]:
    """A tower's attention over four of them."""
    size = 16 if bench.is_smoke else 1024
    q, k, v = (bench.randn(4 * size, heads.num_heads, heads.head_dim) for _ in range(3))
    cu = (torch.arange(5, device=bench.device) * size).int()
    return lambda: varlen_attention(q, k, v, cu, scale=heads.head_dim**-0.5)


def product(bench: Bench, outputs: int, inputs: int) -> Callable[[], Any]:
    """Of 16 rows, which is the most that are few."""
    x, weights = bench.randn(16, inputs), quantise_weights(bench.randn(outputs, inputs))
    turns = bench.rotating(weights.codes.numel(), lambda: copied(weights))
    return lambda: quantised_linear(x, next(turns))


def tried(bench: Bench, trial: Trial) -> dict[str, float]:
    """Seconds by configuration, as JSON; choices that exceed the GPU's memory are left out."""
    took = {}
    choices = itertools.product(*trial.grid.values())
    for values in itertools.islice(choices, 2 if bench.is_smoke else None):
        choice = dict(zip(trial.grid, values, strict=True))
        try:
            with tempfile.TemporaryDirectory() as directory:
                use(Path(directory), bench, {trial.kernel: {trial.shape: choice}})
                took[json.dumps(choice)] = bench.medians({"ours": trial.make()})["ours"]
        except OutOfResources:
            continue
        finally:
            configs.PATH = TABLE
            configs._table.cache_clear()
    return took


def use(directory: Path, bench: Bench, table: Mapping[str, Any]) -> None:
    """Let the kernels read another table."""
    configs.PATH = directory / "configs.json"
    configs.PATH.write_text(json.dumps({configs._name(bench.device): table}))
    configs._table.cache_clear()
    configs._table()
