"""Small services and traces for tests of the simulator."""

import dataclasses
import random
from collections.abc import Mapping

from vlm_cli.simulator.hardware import QUIET, Curve, Hardware, NodeType
from vlm_cli.simulator.run import Autoscaler, Choice, Reading, Run, Setup, simulate
from vlm_cli.simulator.scenario import standard
from vlm_cli.simulator.trace import Request, Trace
from vlm_operator.autoscale.policy import Budget
from vlm_operator.names import Role


class Still:
    """Changes no pool."""

    def decide(self, reading: Reading) -> Mapping[Role, Choice]:
        return {}


class Restless:
    """Chooses random replica counts at every tick."""

    def __init__(self, setup: Setup, seed: int) -> None:
        self._setup, self._rng = setup, random.Random(seed)

    def decide(self, reading: Reading) -> Mapping[Role, Choice]:
        return {
            role: Choice({item.name: self._rng.randint(0, 6) for item in pool.variants})
            for role, pool in self._setup.policy.pools.items()
        }


def poisson(
    rate: float, seconds: float, *, seed: int = 0, tokens: float = 300.0, **fields
) -> Trace:
    """Arrivals without memory; prompts of exponentially distributed length."""
    rng = random.Random(seed)
    found, at = [], rng.expovariate(rate)
    while at < seconds:
        found.append(Request(at, text_tokens=max(1, round(rng.expovariate(1 / tokens))), **fields))
        at += rng.expovariate(rate)
    return Trace("poisson", seconds, tuple(found))


def with_budget(setup: Setup, accelerators: int) -> Setup:
    policy = dataclasses.replace(setup.policy, budget=Budget(accelerators=accelerators))
    return dataclasses.replace(setup, policy=policy)


def one_of_each(**hardware) -> Setup:
    """Three pools of one pod, with this hardware."""
    setup = standard()
    return dataclasses.replace(
        setup,
        hardware=dataclasses.replace(setup.hardware, **hardware),
        start=dict.fromkeys(setup.policy.pools, 1),
        noise=QUIET,
    )


def quick_start(setup: Setup, seconds: float) -> Setup:
    """The same, with pods that are ready after `seconds`."""
    kinds = {
        role: {
            item.name: NodeType(startup_seconds=seconds, startup_spread=0.0)
            for item in pool.variants
        }
        for role, pool in setup.policy.pools.items()
    }
    return dataclasses.replace(
        setup, hardware=dataclasses.replace(setup.hardware, node_types=kinds)
    )


def run(setup: Setup, trace: Trace, autoscaler: Autoscaler | None = None, *, seed: int = 0) -> Run:
    return simulate(setup, trace, autoscaler or Still(), seed=seed)


__all__ = [
    "Curve",
    "Hardware",
    "Restless",
    "Still",
    "one_of_each",
    "poisson",
    "quick_start",
    "run",
    "with_budget",
]
