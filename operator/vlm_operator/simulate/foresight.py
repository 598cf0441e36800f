"""What no autoscaler can beat by much: one that knows the mean load of a made-up trace, and when.

KNOWS   orders what the greatest load of the next start-up needs
BEGUN   does so from the tick on at which a rise begins: before it nobody could know
SEES    orders what this tick's load needs, without delay or noise

All three shrink to the most that a window needed. What BEGUN misses is lost to start-up times.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import random
from collections.abc import Mapping
from typing import Any

from vlm_operator.autoscale.estimating.size import FULL
from vlm_operator.autoscale.estimating.waiting import least_servers
from vlm_operator.autoscale.policy import PoolPolicy, ServicePolicy
from vlm_operator.names import Role
from vlm_operator.simulate.baselines.horizontal import choose
from vlm_operator.simulate.generate import (
    OUTPUT_SIGMA,
    PATCHES_SIGMA,
    SHAPES,
    TEXT_SIGMA,
    Mix,
    generate,
)
from vlm_operator.simulate.ours import adjusted
from vlm_operator.simulate.plant import Plant
from vlm_operator.simulate.run import EPOCH, Choice, Reading, simulate
from vlm_operator.simulate.scenario import standard
from vlm_operator.simulate.score import Score, score
from vlm_operator.simulate.trace import Trace

_AHEAD_SECONDS = 75.0  # of a start, the slow ones and a tick included
_WAIT_SECONDS = 0.8  # that the 95th percentile of a queue may wait
_STEP_SECONDS = 5.0
_SIGMAS = 2.0  # of the KV in use, for which there is room
_RESERVED_SECONDS = 1.0  # that room is promised before the first token


class Sight(enum.Enum):
    """How much is known of the load to come."""

    KNOWS = "knows"
    BEGUN = "begun"
    SEES = "sees"


@dataclasses.dataclass(frozen=True)
class Outlook:
    """One run with foresight: values alone, so that it can go to another process.

    Attributes:
        settings: fields of every pool, as `ours.adjusted` takes them.
    """

    sight: Sight
    trace: str
    seed: int
    seconds: float
    settings: Mapping[str, Any]

    def play(self) -> Score:
        """Run it."""
        setup = standard(self.trace)
        policy = adjusted(setup.policy, self.settings)
        setup = dataclasses.replace(setup, policy=policy)
        trace = generate(self.trace, seed=self.seed, seconds=self.seconds)
        foresight = Foresight(policy, setup.plant, self.sight, trace=trace, seed=self.seed)
        done = simulate(setup, trace, foresight, seed=self.seed)
        return score(done, policy)


class Foresight:
    """Decides from the mixes that `generate` makes a trace of.

    Args:
        trace: what `generate` made from `seed`.
    """

    def __init__(
        self,
        policy: ServicePolicy,
        plant: Plant,
        sight: Sight,
        *,
        trace: Trace,
        seed: int,
    ) -> None:
        self._policy, self._sight = policy, sight
        mix_at = SHAPES[trace.name](trace.seconds, random.Random(f"{trace.name}/{seed}"))
        marks = range(math.ceil((trace.seconds + _AHEAD_SECONDS) / _STEP_SECONDS) + 1)
        mixes = [mix_at(min(mark * _STEP_SECONDS, trace.seconds)) for mark in marks]
        self._needs = {
            role: [_replicas(pool, plant, mix) for mix in mixes]
            for role, pool in policy.pools.items()
        }
        self._rates = {role: [_load(role, plant, mix) for mix in mixes] for role in policy.pools}

    def decide(self, reading: Reading) -> Mapping[Role, Choice]:
        """See `run.Autoscaler`."""
        now = min(
            int((reading.view.now - EPOCH) / _STEP_SECONDS), len(self._rates[Role.DECODE]) - 1
        )
        ahead = int(_AHEAD_SECONDS / _STEP_SECONDS)
        found = {}
        for role, pool in self._policy.pools.items():
            window = int(pool.down_seconds / _STEP_SECONDS)
            needed = [self._known(role, at, ahead) for at in range(max(0, now - window), now + 1)]
            found[role] = choose(pool, min(max(needed), pool.maximum))
        return found

    def _known(self, role: Role, at: int, ahead: int) -> int:
        """Replicas that this sight asks for at one mark."""
        needs, rates = self._needs[role], self._rates[role]
        rises = at + 1 < len(rates) and rates[at + 1] > rates[at]
        if self._sight is Sight.KNOWS or (self._sight is Sight.BEGUN and rises):
            return max(needs[at : at + ahead + 1])
        return needs[at]


def _replicas(pool: PoolPolicy, plant: Plant, mix: Mix) -> int:
    load = _load(pool.role, plant, mix)
    if pool.role is Role.DECODE:
        each = load / max(1e-9, mix.rate * _resident_seconds(plant, mix))
        room = (load + _SIGMAS * math.sqrt(1.5 * each * load)) / FULL
        count = math.ceil(max(load / pool.kv_occupancy, room) / plant.kv_tokens)
    else:
        items = mix.rate * (mix.image_share if pool.role is Role.ENCODER else 1.0)
        seconds = load / items if items else 0.0
        waiting = least_servers(load, seconds=seconds, within=_WAIT_SECONDS)
        count = max(waiting, math.ceil(load / pool.utilization))
    return max(count, pool.minimum)


def _load(role: Role, plant: Plant, mix: Mix) -> float:
    """Mean work: seconds a second, or KV tokens in use."""
    patches, patches_squared = _moments(mix.patches, PATCHES_SIGMA)
    if role is Role.ENCODER:
        return mix.rate * mix.image_share * plant.encode.seconds(patches, patches_squared)
    text, text_squared = _moments(mix.text_tokens, TEXT_SIGMA)
    prompt = text + mix.image_share * plant.tokens_per_patch * patches
    if role is Role.PREFILL:
        units = prompt - text * mix.cached_share / 2
        return mix.rate * plant.prefill.seconds(units, (text_squared + prompt**2) / 4)
    output, output_squared = _moments(mix.output_tokens, OUTPUT_SIGMA)
    grown = output_squared / 2 * _itl(plant)
    return mix.rate * (prompt * (_RESERVED_SECONDS + output * _itl(plant)) + grown)


def _resident_seconds(plant: Plant, mix: Mix) -> float:
    return _RESERVED_SECONDS + _moments(mix.output_tokens, OUTPUT_SIGMA)[0] * _itl(plant)


def _itl(plant: Plant) -> float:
    """Seconds between tokens of a decode pod that is two thirds full."""
    return plant.itl_base + plant.itl_per_token * plant.kv_tokens * 2 / 3


def _moments(median: float, sigma: float) -> tuple[float, float]:
    """Mean and mean square of a log-normal size."""
    return median * math.exp(sigma**2 / 2), median**2 * math.exp(2 * sigma**2)
