"""Mixed against homogeneous node types: the same requests, the same autoscaler, what it costs."""

from __future__ import annotations

from typing import Any

from vlm_operator.simulate.generate import generate
from vlm_operator.simulate.ours import Ours
from vlm_operator.simulate.run import Setup, simulate
from vlm_operator.simulate.scenario import mixed, standard
from vlm_operator.simulate.score import Score, score
from vlm_operator.simulate.trace import Trace


def saving(*, seed: int, seconds: float = 3600.0) -> dict[str, Any]:
    """Run one day with one node type, and with a cheaper one for encoders and decode beside it."""
    trace = generate("diurnal", seed=seed, seconds=seconds)
    alike, various = (_score(setup, trace, seed) for setup in (standard(), mixed()))
    return {
        "homogeneous": _row(alike),
        "mixed": _row(various),
        "saving": round(1 - various.cost_per_1000 / alike.cost_per_1000, 3),
    }


def _score(setup: Setup, trace: Trace, seed: int) -> Score:
    return score(simulate(setup, trace, Ours(setup.policy), seed=seed), setup.policy)


def _row(found: Score) -> dict[str, float]:
    return {
        "cost_per_1000": round(found.cost_per_1000, 3),
        "missed": found.missed,
        "accelerator_hours": round(found.accelerator_hours, 2),
    }
