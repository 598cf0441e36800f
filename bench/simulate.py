"""Our autoscaler against five others on the same requests: missed minutes, devices, money, turns.

    python bench/simulate.py --tune [NAME …]   grid search over ours and theirs, on seeds of its own
    python bench/simulate.py                   the comparison on held-out seeds; about 2 minutes

Tuned settings are those with the fewest missed minutes among the points of a grid that stay within
the same accelerator-hours on the tuning seeds; they stand with all points in
`operator/vlm_operator/simulate/tuned.json`. The comparison writes `results/simulate.json` and
`docs/img/simulate.svg`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "operator"), str(ROOT / "bench")]

from vlm_operator.simulate.baselines import BASELINES  # noqa: E402
from vlm_operator.simulate.chart import Point, draw  # noqa: E402
from vlm_operator.simulate.compare import OURS, Task, Total, best, grid, read_tuned  # noqa: E402
from vlm_operator.simulate.generate import SHAPES  # noqa: E402
from vlm_operator.simulate.mixed import saving  # noqa: E402
from vlm_operator.simulate.score import Score, front  # noqa: E402

TUNED = ROOT / "operator" / "vlm_operator" / "simulate" / "tuned.json"
RESULT = ROOT / "bench" / "results" / "simulate.json"
CHART = ROOT / "docs" / "img" / "simulate.svg"
TUNING_SEEDS, HELD_OUT_SEEDS = (101,), (1, 2)
TUNING_SECONDS, SECONDS = 2400.0, 2400.0
HOURS = 45.0  # accelerator-hours of the tuning traces that tuned settings may take


def main() -> int:
    """Tune, or compare; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tune", nargs="*", metavar="NAME", help="write tuned.json")
    options = parser.parse_args()
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        if options.tune is not None:
            return tune(pool, options.tune or (OURS, *BASELINES))
        return compare(pool)


def tune(pool: ProcessPoolExecutor, names: Sequence[str]) -> int:
    """Try every point of the grids of some, and keep what is known of the others."""
    known = json.loads(TUNED.read_text())["contenders"] if TUNED.exists() else {}
    for name in names:
        settings = grid(name)
        tasks = [_tasks(name, item, TUNING_SEEDS, TUNING_SECONDS) for item in settings]
        scores = _play(pool, [task for each in tasks for task in each])
        points = {
            index: Total.of(scores[index * len(each) : (index + 1) * len(each)])
            for index, each in enumerate(tasks)
        }
        chosen = best(points, hours=HOURS)
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
            "seconds": TUNING_SECONDS,
            "hours": HOURS,
            "contenders": known,
        }
        TUNED.write_text(json.dumps(text, indent=1) + "\n")
    return 0


def compare(pool: ProcessPoolExecutor) -> int:
    """Run everybody on the held-out seeds."""
    tuned = read_tuned(TUNED.read_text())
    contenders = {name: tuned[name] for name in (OURS, *BASELINES)}
    scores: dict[str, dict[str, list[Score]]] = {}
    for name, settings in contenders.items():
        tasks = _tasks(name, settings, HELD_OUT_SEEDS, SECONDS)
        played = _play(pool, tasks)
        scores[name] = {
            shape: [item for task, item in zip(tasks, played, strict=True) if task.trace == shape]
            for shape in SHAPES
        }
    totals = {
        name: Total.of(item for each in by_shape.values() for item in each)
        for name, by_shape in scores.items()
    }
    rivals = {name: total for name, total in totals.items() if name != OURS}
    rival = min(rivals, key=lambda name: (rivals[name].missed, rivals[name].accelerator_hours))
    mix = saving(seed=HELD_OUT_SEEDS[0])
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
            shape: {name: _row(scores[name][shape]) for name in scores} for shape in SHAPES
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
            minutes(OURS, shape) <= 1.1 * minutes(rival, shape) + runs for shape in SHAPES
        ),
        "one_turn_a_window": max(item.turns for item in ours) <= 1,
        "steady_parity": minutes(OURS, "steady") <= minutes(rival, "steady") + runs,
        "never_over_budget": not any(item.over_budget for item in ours),
        "no_request_lost": not any(item.unserved or item.refused for item in ours),
    }


def _tasks(
    name: str, settings: dict[str, object], seeds: Sequence[int], seconds: float
) -> list[Task]:
    return [Task(shape, seed, seconds, name, settings) for shape in SHAPES for seed in seeds]


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
    for shape in SHAPES:
        cells = [_row(scores[name][shape]) for name in scores]
        text = "".join(f"{item['missed']:>10} {item['accelerator_hours']:>9}" for item in cells)
        print(f"{shape:16}{text}", file=sys.stderr)
    text = "".join(f"{t.missed:>10} {t.accelerator_hours:>9.2f}" for t in totals.values())
    print(f"{'sum':16}{text}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
