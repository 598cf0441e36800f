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

from autoscaler.waiting import least_servers
from vlm_cli.simulator.contenders import adjusted
from vlm_cli.simulator.generate import (
    OUTPUT_SIGMA,
    PATCHES_SIGMA,
    SHAPES,
    TEXT_SIGMA,
    Mix,
    generate,
)
from vlm_cli.simulator.hardware import Hardware
from vlm_cli.simulator.horizontal import choose
from vlm_cli.simulator.run import EPOCH, Choice, Reading, simulate
from vlm_cli.simulator.scenario import standard
from vlm_cli.simulator.score import Score, score
from vlm_cli.simulator.trace import Trace
from vlm_operator.autoscale.policy import PoolPolicy, ServicePolicy
from vlm_operator.names import Role

_AHEAD_SECONDS = 75.0  # of a start, the slow ones and a tick included
_WAIT_SECONDS = 0.8  # that the 95th percentile of a queue may wait
_STEP_SECONDS = 5.0
_FULL = 0.95  # of KV, beyond which requests wait
_SIGMAS = 2.0  # of the KV in use, for which capacity is kept
_RESERVED_SECONDS = 1.0  # reservation of KV before the first token


class Forecast(enum.Enum):
    """How much is known of the load to come."""

    KNOWS = "knows"
    BEGUN = "begun"
    SEES = "sees"


@dataclasses.dataclass(frozen=True)
class ForecastRun:
    """One run under ForecastBound: values alone, so that it can go to another process.

    Attributes:
        settings: fields of every pool, as `contenders.adjusted` takes them.
    """

    forecast: Forecast
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
        bound = ForecastBound(policy, setup.hardware, self.forecast, trace=trace, seed=self.seed)
        done = simulate(setup, trace, bound, seed=self.seed)
        return score(done, policy)


class ForecastBound:
    """Decides from the mixes that `generate` makes a trace of.

    Args:
        trace: what `generate` made from `seed`.
    """

    def __init__(
        self,
        policy: ServicePolicy,
        hardware: Hardware,
        forecast: Forecast,
        *,
        trace: Trace,
        seed: int,
    ) -> None:
        self._policy, self._forecast = policy, forecast
        mix_at = SHAPES[trace.name](trace.seconds, random.Random(f"{trace.name}/{seed}"))
        marks = range(math.ceil((trace.seconds + _AHEAD_SECONDS) / _STEP_SECONDS) + 1)
        mixes = [mix_at(min(mark * _STEP_SECONDS, trace.seconds)) for mark in marks]
        self._needs = {
            role: [_replicas(pool, hardware, mix) for mix in mixes]
            for role, pool in policy.pools.items()
        }
        self._rates = {role: [_load(role, hardware, mix) for mix in mixes] for role in policy.pools}

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
        """Replicas that this forecast asks for at one mark."""
        needs, rates = self._needs[role], self._rates[role]
        rises = at + 1 < len(rates) and rates[at + 1] > rates[at]
        if self._forecast is Forecast.KNOWS or (self._forecast is Forecast.BEGUN and rises):
            return max(needs[at : at + ahead + 1])
        return needs[at]


def _replicas(pool: PoolPolicy, hardware: Hardware, mix: Mix) -> int:
    load = _load(pool.role, hardware, mix)
    if pool.role is Role.DECODE:
        each = load / max(1e-9, mix.rate * _resident_seconds(hardware, mix))
        need = (load + _SIGMAS * math.sqrt(1.5 * each * load)) / _FULL
        count = math.ceil(max(load / pool.kv_occupancy, need) / hardware.kv_tokens)
    else:
        items = mix.rate * (mix.image_share if pool.role is Role.ENCODER else 1.0)
        seconds = load / items if items else 0.0
        waiting = least_servers(load, seconds=seconds, within=_WAIT_SECONDS)
        count = max(waiting, math.ceil(load / pool.utilization))
    return max(count, pool.minimum)


def _load(role: Role, hardware: Hardware, mix: Mix) -> float:
    """Mean work: seconds a second, or KV tokens in use."""
    patches, patches_squared = _moments(mix.patches, PATCHES_SIGMA)
    if role is Role.ENCODER:
        return mix.rate * mix.image_share * hardware.encode.seconds(patches, patches_squared)
    text, text_squared = _moments(mix.text_tokens, TEXT_SIGMA)
    prompt = text + mix.image_share * hardware.tokens_per_patch * patches
    if role is Role.PREFILL:
        units = prompt - text * mix.cached_share / 2
        return mix.rate * hardware.prefill.seconds(units, (text_squared + prompt**2) / 4)
    output, output_squared = _moments(mix.output_tokens, OUTPUT_SIGMA)
    grown = output_squared / 2 * _itl(hardware)
    return mix.rate * (prompt * (_RESERVED_SECONDS + output * _itl(hardware)) + grown)


def _resident_seconds(hardware: Hardware, mix: Mix) -> float:
    return _RESERVED_SECONDS + _moments(mix.output_tokens, OUTPUT_SIGMA)[0] * _itl(hardware)


def _itl(hardware: Hardware) -> float:
    """Seconds between tokens of a decode pod that is two thirds full."""
    return hardware.itl_base + hardware.itl_per_token * hardware.kv_tokens * 2 / 3


def _moments(median: float, sigma: float) -> tuple[float, float]:
    """Mean and mean square of a log-normal size."""
    return median * math.exp(sigma**2 / 2), median**2 * math.exp(2 * sigma**2)
