"""Try tile sizes, warps and stages of attention; the winners become `configs.json`.

The kernels read that table when they start: nothing is tuned while requests wait. A device's old
winners are replaced, those of other devices stay.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from decode import ours
from shapes import Heads, Steps, models
from timing import Bench
from triton.runtime.errors import OutOfResources

from vlm_kernels.gpu import configs

TILES, WARPS, STAGES = (32, 64, 128), (2, 4, 8), (2, 3, 4)
TABLE = Path(configs.__file__).with_name("configs.json")


def cases(bench: Bench) -> Iterator[dict[str, Any]]:
    """One line per model and kind of step, with all that was tried."""
    found: dict[str, dict[str, int]] = {}
    for heads in models(bench):
        for kind, steps in kinds(bench, heads):
            took = tried(bench, kind, steps)
            best = min(took, key=lambda name: took[name])
            found[kind] = json.loads(best)
            microseconds = {name: round(s * 1e6, 1) for name, s in took.items()}
            yield {"case": f"tune/{heads.name}/{kind}", "best": best, "microseconds": microseconds}
    if not bench.is_smoke:
        table = json.loads(TABLE.read_text())
        table[configs._name(bench.device)] = {"paged_attention": found}
        TABLE.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")


def kinds(bench: Bench, heads: Heads) -> Iterator[tuple[str, Steps]]:
    """Full decode, and one long prompt, by the shape that the table knows them by."""
    batch, total, prompt = (2, 20, 40) if bench.is_smoke else (64, 2048, 4096)
    for steps in (Steps(heads, [1] * batch, [total] * batch), Steps(heads, [prompt], [prompt])):
        tiles = steps.plan(steps.cache(bench, bench.dtype), bench.dtype).tiles
        assert tiles is not None
        yield f"d{heads.head_dim}/m{tiles.launches[0].num_rows}", steps


def tried(bench: Bench, kind: str, steps: Steps) -> dict[str, float]:
    """Seconds by configuration, as JSON; what the GPU has no room for is left out."""
    took = {}
    grid = itertools.product(TILES, WARPS, STAGES)
    for tile, warps, stages in itertools.islice(grid, 2 if bench.is_smoke else None):
        choice = {"TILE_N": tile, "num_warps": warps, "num_stages": stages}
        try:
            with tempfile.TemporaryDirectory() as directory:
                use(Path(directory), bench, {"paged_attention": {kind: choice}})
                took[json.dumps(choice)] = bench.medians({"ours": ours(bench, steps, bench.dtype)})[
                    "ours"
                ]
        except OutOfResources:
            continue
    configs.PATH = TABLE
    configs._table.cache_clear()
    return took


def use(directory: Path, bench: Bench, table: Mapping[str, Any]) -> None:
    """Let the kernels read another table."""
    configs.PATH = directory / "configs.json"
    configs.PATH.write_text(json.dumps({configs._name(bench.device): table}))
    configs._table.cache_clear()
    configs._table()
