"""Who runs against whom: our autoscaler and the tuned baselines, by name."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Iterable, Mapping
from typing import Any

from vlm_operator.autoscale.policy import ServicePolicy
from vlm_operator.simulate.baselines import BASELINES, baseline
from vlm_operator.simulate.generate import generate
from vlm_operator.simulate.ours import GRID, Ours, adjusted
from vlm_operator.simulate.run import Autoscaler, simulate
from vlm_operator.simulate.scenario import standard
from vlm_operator.simulate.score import Score, score
from vlm_operator.simulate.trace import Trace

OURS = "triptych"
Settings = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Task:
    """One run of the comparison: values alone, so that it can go to another process."""

    trace: str
    seed: int
    seconds: float
    name: str
    settings: Settings

    def play(self) -> Score:
        """Run it."""
        setup = standard(self.trace)
        if self.name == OURS:
            setup = dataclasses.replace(setup, policy=adjusted(setup.policy, self.settings))
        trace = _generated(self.trace, self.seed, self.seconds)
        done = simulate(
            setup, trace, contender(self.name, setup.policy, self.settings), seed=self.seed
        )
        return score(done, setup.policy)


@functools.lru_cache(maxsize=8)
def _generated(name: str, seed: int, seconds: float) -> Trace:
    return generate(name, seed=seed, seconds=seconds)


def contender(name: str, policy: ServicePolicy, settings: Settings) -> Autoscaler:
    """Build one by name.

    Raises:
        KeyError: there is none of that name.
    """
    return Ours(policy) if name == OURS else baseline(name, policy, settings)


def grid(name: str) -> list[dict[str, Any]]:
    """All settings that one of them is tuned over."""
    axes = GRID if name == OURS else BASELINES[name][1]
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


@dataclasses.dataclass(frozen=True)
class Total:
    """Several runs of one contender together."""

    missed: int
    accelerator_hours: float

    @classmethod
    def of(cls, scores: Iterable[Score]) -> Total:
        """Add up."""
        known = list(scores)
        return cls(
            sum(item.missed for item in known), sum(item.accelerator_hours for item in known)
        )


def best(points: Mapping[int, Total], *, hours: float) -> int:
    """Which point of a grid is the tuned one.

    The fewest missed minutes of those within the accelerator-hours; none within: the fewest hours.
    """
    within = {key: total for key, total in points.items() if total.accelerator_hours <= hours}
    if within:
        return min(within, key=lambda key: (within[key].missed, within[key].accelerator_hours))
    return min(points, key=lambda key: points[key].accelerator_hours)


def read_tuned(text: str) -> dict[str, dict[str, Any]]:
    """Settings by name from what `bench/simulate.py --tune` wrote."""
    return {name: item["settings"] for name, item in json.loads(text)["contenders"].items()}
