"""Our autoscaler against six others on the same requests: missed minutes, devices, money, turns.

    python bench/simulate.py --tune   grid search for all seven, on a seed of its own; 5 min
                             --tune triptych   for ours alone; the others' points stay as they stand
    python bench/simulate.py          the comparison on held-out seeds and shapes; 3 min
                             --floor  who knows the load once it rises, on others; 3 min

Each has a grid of as many points. Tuned are those settings of the others that have the fewest
missed minutes within `HOURS`; ours may take no more hours than the best of the others took so. All
points stand in `operator/vlm_operator/simulate/tuned.json`. The comparison writes
`results/simulate.json` and `docs/img/simulate.svg`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from operator import methodcaller
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "operator"), str(ROOT / "bench")]

from vlm_operator.simulate.baselines import BASELINES  # noqa: E402
from vlm_operator.simulate.chart import Point, draw  # noqa: E402
from vlm_operator.simulate.compare import OURS, Task, Total, best, grid, read_tuned  # noqa: E402
from vlm_operator.simulate.foresight import Outlook, Sight  # noqa: E402
from vlm_operator.simulate.generate import ALL_SHAPES, HELD_OUT_SHAPES, SHAPES  # noqa: E402
from vlm_operator.simulate.mixed import savings  # noqa: E402
from vlm_operator.simulate.score import Score, front  # noqa: E402

TUNED = ROOT / "operator" / "vlm_operator" / "simulate" / "tuned.json"
RESULT = ROOT / "bench" / "results" / "simulate.json"
CHART = ROOT / "docs" / "img" / "simulate.svg"
TUNING_SEEDS, HELD_OUT_SEEDS = (111,), (501, 502)
SECONDS = 2400.0
FLOOR_SEEDS = (101, 102, 103, 104, 105)
ROOMY = {"utilization": 0.6, "kv_occupancy": 0.48}  # with which foresight takes our hours
HOURS = 45.0  # accelerator-hours of all tuning traces together that the others may take


def main() -> int:
    """Tune, or compare; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tune", nargs="*", metavar="NAME", help="write tuned.json, all or these")
    parser.add_argument("--floor", action="store_true", help="what start-up times alone cost")
    options = parser.parse_args()
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        if options.floor:
            return floor(pool)
        return compare(pool) if options.tune is None else tune(pool, options.tune)


def tune(pool: ProcessPoolExecutor, names: Sequence[str] = ()) -> int:
    """Try every point of every grid, ours the last: it is held to the hours of the best of them.

    Where `names` are given, the points of all others are those that stand in tuned.json.
    """
    stand = json.loads(TUNED.read_text())["contenders"] if names else {}
    known: dict[str, dict[str, Any]] = {}
    hours, fewest = HOURS, math.inf
    for name in (*BASELINES, OURS):
        settings = grid(name)
        if names and name not in names:
            totals = [
                Total(item["missed"], item["accelerator_hours"]) for item in stand[name]["points"]
            ]
            points = dict(enumerate(totals))
        else:
            points = _points(pool, name, settings)
        chosen = best(points, hours=hours if name == OURS else HOURS)
        if points[chosen].missed < fewest:
            hours, fewest = points[chosen].accelerator_hours, points[chosen].missed
        known[name] = {
            "settings": settings[chosen],
            **_total(points[chosen]),
            "points": [settings[index] | _total(total) for index, total in points.items()],
        }
        line = {"bench": "simulate.tune", "name": name} | known[name] | {"points": len(points)}
        print(json.dumps(line), flush=True)
    text = {
        "command": "python bench/simulate.py --tune",
        "seeds": TUNING_SEEDS,
        "seconds": SECONDS,
        "hours": HOURS,
        "contenders": known,
    }
    TUNED.write_text(json.dumps(text, indent=1) + "\n")
    return 0


def floor(pool: ProcessPoolExecutor) -> int:
    """Play one who knows each rise when it begins: what it misses is lost to start-up times.

    Beside it, on the same seeds, ours and the rival, as tuned.
    """
    tuned = read_tuned(TUNED.read_text())
    played: dict[str, Sequence[Outlook | Task]] = {
        f"{Sight.BEGUN.value} {settings}": [
            Outlook(Sight.BEGUN, shape, seed, SECONDS, settings)
            for shape in SHAPES
            for seed in FLOOR_SEEDS
        ]
        for settings in ({}, ROOMY)
    } | {name: _tasks(name, tuned[name], FLOOR_SEEDS) for name in (OURS, "pod-p95")}
    for name, runs in played.items():
        scores = list(pool.map(methodcaller("play"), runs, chunksize=2))
        by_trace = dict.fromkeys(SHAPES, 0)
        for run, item in zip(runs, scores, strict=True):
            by_trace[run.trace] += item.missed
        line = {"bench": "simulate.floor", "seeds": FLOOR_SEEDS, "name": name}
        print(json.dumps(line | _total(Total.of(scores)) | {"by_trace": by_trace}), flush=True)
    return 0


def _points(
    pool: ProcessPoolExecutor, name: str, settings: Sequence[dict[str, object]]
) -> dict[int, Total]:
    tasks = [_tasks(name, item, TUNING_SEEDS) for item in settings]
    scores = _play(pool, [task for each in tasks for task in each])
    return {
        index: Total.of(scores[index * len(each) : (index + 1) * len(each)])
        for index, each in enumerate(tasks)
    }


def compare(pool: ProcessPoolExecutor) -> int:
    """Run everybody on the held-out seeds."""
    tuned = read_tuned(TUNED.read_text())
    contenders = {name: tuned[name] for name in (OURS, *BASELINES)}
    scores: dict[str, dict[str, list[Score]]] = {}
    for name, settings in contenders.items():
        tasks = _tasks(name, settings, HELD_OUT_SEEDS, ALL_SHAPES)
        played = _play(pool, tasks)
        scores[name] = {
            shape: [item for task, item in zip(tasks, played, strict=True) if task.trace == shape]
            for shape in ALL_SHAPES
        }
    totals = {
        name: Total.of(item for each in by_shape.values() for item in each)
        for name, by_shape in scores.items()
    }
    rivals = {name: total for name, total in totals.items() if name != OURS}
    rival = min(rivals, key=lambda name: (rivals[name].missed, rivals[name].accelerator_hours))
    mix = savings(seed=HELD_OUT_SEEDS[0])
    result = {
        "bench": "simulate",
        "seeds": HELD_OUT_SEEDS,
        "totals": {name: _total(total) for name, total in totals.items()},
        "rival": rival,
        "missed_ratio": round(totals[OURS].missed / max(1, rivals[rival].missed), 3),
        "hours_ratio": round(totals[OURS].accelerator_hours / rivals[rival].accelerator_hours, 3),
        "front": front(
            {name: (total.accelerator_hours, total.missed) for name, total in totals.items()}
        ),
        "by_trace": {
            shape: {name: _row(scores[name][shape]) for name in scores} for shape in ALL_SHAPES
        },
        "held_out_shapes": {
            name: _total(Total.of(item for shape in HELD_OUT_SHAPES for item in by_shape[shape]))
            for name, by_shape in scores.items()
        },
        "changes": {
            name: sum(item.changes for each in by_shape.values() for item in each)
            for name, by_shape in scores.items()
        },
        "mixed_node_types": mix,
    }
    result["met"] = _met(result, scores, rival)
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    CHART.write_text(_chart(totals))
    print(json.dumps(result | {"by_trace": None}))
    _table(scores, totals)
    return 0


def _met(
    result: dict[str, object], scores: dict[str, dict[str, list[Score]]], rival: str
) -> dict[str, bool]:
    def minutes(name: str, shape: str) -> int:
        return sum(item.missed for item in scores[name][shape])

    runs = len(HELD_OUT_SEEDS)
    ours = [item for each in scores[OURS].values() for item in each]
    return {
        "half_the_missed_minutes": float(str(result["missed_ratio"])) <= 0.5,
        "no_more_accelerator_hours": float(str(result["hours_ratio"])) <= 1.0,
        "no_trace_worse": all(
            minutes(OURS, shape) <= 1.1 * minutes(rival, shape) + runs for shape in ALL_SHAPES
        ),
        "one_turn_a_window": max(item.turns for item in ours) <= 1,
        "steady_parity": minutes(OURS, "steady") <= minutes(rival, "steady") + runs,
        "never_over_budget": not any(item.over_budget for item in ours),
        "no_request_lost": not any(item.unserved or item.refused for item in ours),
    }


def _tasks(
    name: str,
    settings: dict[str, object],
    seeds: Sequence[int],
    shapes: Iterable[str] = SHAPES,
) -> list[Task]:
    return [Task(shape, seed, SECONDS, name, settings) for shape in shapes for seed in seeds]


def _play(pool: ProcessPoolExecutor, tasks: list[Task]) -> list[Score]:
    return list(pool.map(Task.play, tasks, chunksize=2))


def _total(total: Total) -> dict[str, float]:
    return {"missed": total.missed, "accelerator_hours": round(total.accelerator_hours, 2)}


def _row(scores: list[Score]) -> dict[str, float]:
    return {
        **_total(Total.of(scores)),
        "cost_per_1000": round(sum(item.cost_per_1000 for item in scores) / len(scores), 3),
        "turns": max(item.turns for item in scores),
        "turns_total": sum(item.turns_total for item in scores),
        "changes": sum(item.changes for item in scores),
    }


def _chart(totals: dict[str, Total]) -> str:
    """All grid points as dots, the tuned ones and ours by name."""
    data = json.loads(TUNED.read_text())
    cloud = [
        Point(item["accelerator_hours"], item["missed"], name)
        for name, entry in data["contenders"].items()
        for item in entry["points"]
    ]
    scale = data["contenders"][OURS]["accelerator_hours"] / totals[OURS].accelerator_hours
    named = [
        Point(total.accelerator_hours * scale, total.missed * scale, name)
        for name, total in totals.items()
    ]
    return draw(
        "SLO-miss minutes by accelerator-hours",
        x_name="accelerator-hours (grid points: tuning seeds; names: held-out seeds, to scale)",
        cloud=cloud,
        named=named,
        highlight=OURS,
    )


def _table(scores: dict[str, dict[str, list[Score]]], totals: dict[str, Total]) -> None:
    """Missed minutes and hours by trace, for people."""
    print(f"{'':16}" + "".join(f"{name:>20}" for name in scores), file=sys.stderr)
    for shape in ALL_SHAPES:
        cells = [_row(scores[name][shape]) for name in scores]
        text = "".join(f"{item['missed']:>10} {item['accelerator_hours']:>9}" for item in cells)
        print(f"{shape:16}{text}", file=sys.stderr)
    text = "".join(f"{t.missed:>10} {t.accelerator_hours:>9.2f}" for t in totals.values())
    print(f"{'sum':16}{text}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
