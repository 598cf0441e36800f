"""Mixed against homogeneous node types: the same requests, the same autoscaler, what it costs."""

from __future__ import annotations

from typing import Any

from vlm_cli.simulator.contenders import TriptychAutoscaler
from vlm_cli.simulator.generate import generate
from vlm_cli.simulator.run import Setup, simulate
from vlm_cli.simulator.scenario import mixed, standard
from vlm_cli.simulator.score import Score, score
from vlm_cli.simulator.trace import Trace

PRICES = (0.7, 0.5, 0.33, 0.2)  # of the cheaper node type, relative to the other


def savings(*, seed: int, seconds: float = 3600.0) -> dict[str, Any]:
    """Run one day on one node type, and beside a cheaper one for encoder and decode, by price."""
    trace = generate("diurnal", seed=seed, seconds=seconds)
    alike = _score(standard(), trace, seed)
    found = []
    for price in PRICES:
        various = _score(mixed(price), trace, seed)
        saved = round(1 - various.cost_per_1000 / alike.cost_per_1000, 3)
        found.append({"price": price, **_row(various), "saving": saved})
    return {"homogeneous": _row(alike), "mixed": found}


def _score(setup: Setup, trace: Trace, seed: int) -> Score:
    return score(simulate(setup, trace, TriptychAutoscaler(setup.policy), seed=seed), setup.policy)


def _row(found: Score) -> dict[str, float]:
    return {
        "cost_per_1000": round(found.cost_per_1000, 3),
        "missed": found.missed,
        "accelerator_hours": round(found.accelerator_hours, 2),
    }
