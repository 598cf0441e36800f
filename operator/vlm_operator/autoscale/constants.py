"""The constants of the autoscaling method: seconds, shares, multiples. No field of a manifest.

Each record contains those that its decision used. `--autoscaler-constants=FILE` of the operator
replaces them for experiments; no value but the default is supported.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from pydantic import ConfigDict, TypeAdapter


@dataclasses.dataclass(frozen=True)
class Constants:
    """The constants of the method; docs/autoscaling.md has the reasons.

    Attributes:
        smoothing_seconds: time constant of the smoothing of admitted work.
        wait_floor_seconds: minimum of the waiting time of which each pool gets its share as budget.
        band_up, band_down: share of capacity in use above which a pool grows, and below which it
            may shrink. Between them the pool keeps its size.
        bottleneck_share: minimum share of a pool's own stages in the overrun of TTFT.
        ttft_margin, itl_margin: share of the target that must not be exceeded before shrinking.
        write_off: multiple of the usual duration of a start phase after which a pod in that phase
            does not count as capacity.
        pending_seconds: minimum time without a node after which a pod of a variant with known
            start-ups does not count. Adding a node takes longer than using an existing one.
        spot_risk: share of its price by which a spot replica counts as more expensive, because a
            preempted replica must start again.
        exhausted_seconds: time until the next try of a variant that got no node; doubles each time.
        startup_seconds: start-up time of a variant until it is measured.
        startups_kept: number of start-ups kept per variant, for the 90th percentile.
        window_starts: minimum length of the scale-down window, as a multiple of the longest
            start-up time.
        growth_cap: maximum growth that extrapolation may add within one start-up time, as a share.
        stale_ticks: ticks without an answer after which a pod counts as silent.
        fresh_share: share of ready pods that must answer.
        fresh_down_share: share of ready pods that must answer before a pool shrinks.
        missing_seconds: time without metrics before fallback replicas apply.
        fit_points: minimum number of rows of a fit.
        fit_spread: minimum spread of the regressor.
        fit_seconds: memory of a fit.
        fit_shift: change of shape that restarts a fit.
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    smoothing_seconds: float = 20.0
    wait_floor_seconds: float = 0.02
    band_up: float = 0.85
    band_down: float = 0.7
    bottleneck_share: float = 0.2
    ttft_margin: float = 0.9
    itl_margin: float = 0.8
    write_off: float = 2.0
    pending_seconds: float = 120.0
    spot_risk: float = 0.1
    exhausted_seconds: float = 600.0
    startup_seconds: float = 180.0
    startups_kept: int = 20
    window_starts: float = 2.0
    growth_cap: float = 1.0
    stale_ticks: int = 3
    fresh_share: float = 0.7
    fresh_down_share: float = 0.9
    missing_seconds: float = 300.0
    fit_points: int = 10
    fit_spread: float = 0.3
    fit_seconds: float = 1800.0
    fit_shift: float = 0.2


CONSTANTS = Constants()


def parse_constants(text: str) -> Constants:
    """Read constants from a JSON object; those that it does not name keep their defaults.

    Raises:
        ValueError: it is no JSON object, a name is unknown, or a value has another type.
    """
    return TypeAdapter(Constants).validate_json(text)
