"""What each mechanism of the autoscaler is worth: the policy without it, on every traffic shape.

    python bench/autoscaler/ablate.py                      all rows; 15 minutes of one core
                                      --only slope solver  these rows, and the full policy
                                      --shapes diurnal     these shapes
                                      --table              print the last results, run nothing

A row replaces one constant or one function. All rows see the same requests, seeds and noise. Runs
last 25 minutes of simulated time: eight windows to shrink, and the six windows that one surplus
replica stays. A mechanism that needs longer is listed as inert. Results: `results/ablation.json`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "operator")]

from vlm_cli.simulator.generate import ALL_SHAPES, generate  # noqa: E402
from vlm_cli.simulator.run import Choice, Reading, Setup, simulate  # noqa: E402
from vlm_cli.simulator.scenario import mixed, standard  # noqa: E402
from vlm_cli.simulator.score import score  # noqa: E402
from vlm_cli.simulator.trace import Trace  # noqa: E402
from vlm_operator.autoscale.decide import Memory, decide  # noqa: E402
from vlm_operator.autoscale.policy import ServicePolicy  # noqa: E402
from vlm_operator.names import Role  # noqa: E402

RESULT = ROOT / "bench" / "results" / "ablation.json"
SEEDS = (501, 502)
SECONDS = 1500.0
TIGHT_DEVICES = 10
PAYS = 0.02
METRICS = ("missed", "hours", "changes")
Totals = Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Row:
    """The policy without one mechanism.

    Attributes:
        off: what the variant does instead.
        constants, pool: constants of the method and fields of every pool with other values.
        functions: "module:attribute" under vlm_operator.autoscale, with its replacement.
        inert: why the mechanism cannot act in these runs; such a row is not run.
    """

    off: str
    constants: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    pool: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    functions: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    inert: str = ""


def _always(value: Any) -> Callable[..., Any]:
    return lambda *_args, **_kwargs: value


def _first(value: Any, *_args: Any, **_kwargs: Any) -> Any:
    return value


def _empty_need(*_args: Any) -> Any:
    need = importlib.import_module("vlm_operator.autoscale.size").SignalNeed
    return need("overrun", 0.0, 0.0, bottleneck_only=True)


def _greedy(problem: Any) -> Any:
    """Counts of the greedy fill; None if they do not meet every need."""
    fill = importlib.import_module("vlm_operator.autoscale.solve").fill
    holds = importlib.import_module("vlm_operator.autoscale.solve").holds
    found = fill(dataclasses.replace(problem, ratios=()))
    totals = {role: sum(counts) for role, counts in found.items()}
    met = all(
        pool.units(found[pool.role]) >= pool.need and totals[pool.role] >= pool.least
        for pool in problem.pools
    )
    return found if met and all(holds(ratio, totals) for ratio in problem.ratios) else None


def _target_bands(_policy: Any, target: float, _neutral: float) -> tuple[float, float]:
    return target, target


_SOLVER = {"allocate:solve": _greedy}
_OVERRUN = {"size:_overrun": _empty_need}

ROWS: Mapping[str, Row] = {
    "wait-budget": Row(
        "no waiting budgets, and nothing that uses one",
        functions={"estimate:wait_budget": _always(None)},
    ),
    "solver": Row("greedy allocation", functions=_SOLVER),
    "unknown-times": Row(
        "service times are always credible", functions={"estimate:credible": _always(True)}
    ),
    "overrun": Row("no signal for an unexplained queue", functions=_OVERRUN),
    "slope": Row("no growth from a slope", constants={"growth_cap": 0.0}),
    "chance": Row(
        "no allowance for chance in the slope and before shrinking",
        functions={"estimate:Tick._chance": _always(0.0)},
    ),
    "flow": Row("all promised KV counts", functions={"estimate:Tick._flow": _always(1.0)}),
    "kv-noise": Row("KV in use is not smoothed against chance", functions={"demand:NOISE": 0.0}),
    "bands": Row("grow and shrink at the target", functions={"size:bands": _target_bands}),
    "attribution-gate": Row("every pool may grow", constants={"bottleneck_share": 0.0}),
    "ttft-margin": Row("shrinks however close TTFT is", constants={"ttft_margin": 1e9}),
    "window-starts": Row("window without start-ups", constants={"window_starts": 0.0}),
    "dead-zone": Row("no dead zone", functions={"pace:DEAD_ZONE": 0.0}),
    "falling": Row("shrinks while the need falls", functions={"pace:CALM_SHARE": 1.0}),
    "shared-exhaustion": Row(
        "pools of a node class share nothing",
        functions={"decide:_share_exhausted": _first},
    ),
    "correction": Row("predictions are not corrected", functions={"readings:Measured.ratio": 1.0}),
}


def _tight() -> Setup:
    setup = mixed()
    budget = dataclasses.replace(setup.policy.budget, accelerators=TIGHT_DEVICES)
    return dataclasses.replace(setup, policy=dataclasses.replace(setup.policy, budget=budget))


def scenarios() -> dict[str, tuple[str, Callable[[], Setup]]]:
    """The shape and the service of each scenario, by name."""
    found: dict[str, tuple[str, Callable[[], Setup]]] = {
        shape: (shape, functools.partial(standard, shape)) for shape in ALL_SHAPES
    }
    found["diurnal, mixed types"] = ("diurnal", mixed)
    found[f"diurnal, mixed types, {TIGHT_DEVICES} devices"] = ("diurnal", _tight)
    return found


class Policy:
    """Calls `decide`, as the operator does."""

    def __init__(self, policy: ServicePolicy) -> None:
        self._policy, self._memory = policy, Memory()

    def decide(self, reading: Reading) -> Mapping[Role, Choice]:
        """See `run.Autoscaler`."""
        outcome = decide(self._policy, reading.view, self._memory)
        self._memory = outcome.memory
        return {role: Choice(item.variants, item.claim) for role, item in outcome.decisions.items()}


@contextlib.contextmanager
def replaced(functions: Mapping[str, Any]) -> Iterator[None]:
    """Replace attributes of modules and classes, and restore them at the end."""
    undo: list[tuple[Any, str, Any]] = []
    try:
        for path, new in functions.items():
            module, _, attribute = path.partition(":")
            owner: Any = importlib.import_module(f"vlm_operator.autoscale.{module}")
            *parents, name = attribute.split(".")
            for parent in parents:
                owner = getattr(owner, parent)
            old = getattr(owner, name)
            undo.append((owner, name, old))
            setattr(owner, name, new.func(old) if isinstance(new, functools.partial) else new)
        yield
    finally:
        for owner, name, old in reversed(undo):
            setattr(owner, name, old)


def changed(setup: Setup, row: Row) -> Setup:
    """The same service with the constants of a row."""
    policy = setup.policy
    pools = {role: dataclasses.replace(pool, **row.pool) for role, pool in policy.pools.items()}
    constants = dataclasses.replace(policy.constants, **row.constants)
    return dataclasses.replace(
        setup, policy=dataclasses.replace(policy, pools=pools, constants=constants)
    )


@functools.lru_cache(maxsize=64)
def _trace(shape: str, seed: int) -> Trace:
    return generate(shape, seed=seed, seconds=SECONDS)


def play(row: Row, names: Sequence[str], seed: int) -> dict[str, dict[str, float]]:
    """Run one row on scenarios: missed minutes, accelerator-hours and changes by scenario."""
    known = scenarios()
    found: dict[str, dict[str, float]] = {}
    with replaced(row.functions):
        for name in names:
            shape, make = known[name]
            setup = changed(make(), row)
            done = simulate(setup, _trace(shape, seed), Policy(setup.policy), seed=seed)
            result = score(done, setup.policy)
            found[name] = {
                "missed": result.missed,
                "hours": round(result.accelerator_hours, 3),
                "changes": result.changes,
                "lost": result.unserved + result.refused,
                "over_budget": result.over_budget,
            }
    return found


def totals(played: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Sums over scenarios."""
    return {name: round(sum(item[name] for item in played.values()), 3) for name in METRICS}


def compare(ours: Sequence[Totals], without: Sequence[Totals]) -> dict[str, Any]:
    """Relative change of each metric without the mechanism, and its spread over seeds.

    A metric counts if its change is at least `PAYS` and has the same sign on every seed.
    """
    change: dict[str, float] = {}
    spread: dict[str, float] = {}
    worse: list[str] = []
    better: list[str] = []
    for name in METRICS:
        each = [
            (after[name] - before[name]) / max(before[name], 1.0)
            for before, after in zip(ours, without, strict=True)
        ]
        before, after = (sum(item[name] for item in items) for items in (ours, without))
        change[name] = round((after - before) / max(before, 1.0), 4)
        spread[name] = round(max(each) - min(each), 4)
        if abs(change[name]) >= PAYS and (min(each) > 0 or max(each) < 0):
            (worse if change[name] > 0 else better).append(name)
    verdict = ("trades" if better else "pays") if worse else "does not pay"
    return {"change": change, "spread": spread, "verdict": verdict}


def main() -> int:
    """Run, write and print; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="*", metavar="ROW", default=[], help="of these rows")
    parser.add_argument("--shapes", nargs="*", metavar="SHAPE", help="scenarios by name")
    parser.add_argument("--table", action="store_true", help="print the last results")
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(RESULT.read_text())))
        return 0
    names = options.shapes or list(scenarios())
    known = {"full": Row(""), **ROWS}
    unknown = ({*options.only} - {*known}) | ({*names} - {*scenarios()})
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    chosen = {
        name: row
        for name, row in known.items()
        if name == "full" or not options.only or name in options.only
    }
    began, rows = time.process_time(), dict[str, Any]()
    result = {"bench": "ablation", "seeds": SEEDS, "seconds": SECONDS, "rows": rows}
    for name, row in chosen.items():
        rows[name] = {"off": row.off, "inert": row.inert}
        if not row.inert:
            played = [play(row, names, seed) for seed in SEEDS]
            rows[name] |= {"total": [totals(item) for item in played], "by_scenario": played}
            rows[name] |= compare(rows["full"]["total"], rows[name]["total"])
        result["cpu_seconds"] = round(time.process_time() - began, 1)
        if not options.only and not options.shapes:
            RESULT.write_text(json.dumps(result) + "\n")
        print(_line(name, rows[name]), flush=True)
    return 0


def table(result: Mapping[str, Any]) -> str:
    """One line per row."""
    return "\n".join(_line(name, row) for name, row in result["rows"].items())


def _line(name: str, row: Mapping[str, Any]) -> str:
    if row["inert"]:
        return f"| {name} | | | | inert: {row['inert']} |"
    total = {key: sum(item[key] for item in row["total"]) for key in METRICS}
    cells = [
        f"{total[key]:.4g} ({row['change'][key]:+.1%} ± {row['spread'][key] / 2:.1%})"
        for key in METRICS
    ]
    return f"| {name} | {' | '.join(cells)} | {row['verdict']} |"


if __name__ == "__main__":
    sys.exit(main())
