"""The runs of the comparison, and the tuned point of a grid."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from autoscaler.perturb import TROUBLES
from vlm_cli.simulator.baselines import BASELINES
from vlm_cli.simulator.contenders import GRID, OURS, Settings, adjusted, contender
from vlm_cli.simulator.generate import generate
from vlm_cli.simulator.run import simulate
from vlm_cli.simulator.scenario import standard
from vlm_cli.simulator.score import Score, score
from vlm_cli.simulator.trace import Trace


@dataclasses.dataclass(frozen=True)
class Task:
    """One run of the comparison: values alone, so that it can go to another process.

    Attributes:
        trouble: what goes wrong, of `perturb.TROUBLES`; "" is the service of the trace.
    """

    trace: str
    seed: int
    seconds: float
    name: str
    settings: Settings
    trouble: str = ""

    def play(self) -> Score:
        """Run it."""
        setup = TROUBLES[self.trouble]() if self.trouble else standard(self.trace)
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
