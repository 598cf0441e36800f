"""The constants of the method in its own units: seconds, shares, multiples.

api.Tuning: band_up_percent 85 ─▶ Tuning: band_up 0.85
"""

from __future__ import annotations

import dataclasses
from typing import Any

from vlm_operator.api import tuning as api

# API suffix, the constant's own suffix, and how many of the former are one of the latter.
_UNITS = (
    ("_milliseconds", "_seconds", 1000.0),
    ("_percent", "", 100.0),
)


def _converted(written: api.Tuning) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in api.Tuning.model_fields:
        value = getattr(written, name)
        for suffix, own, scale in _UNITS:
            if name.endswith(suffix):
                found[name.removesuffix(suffix) + own] = value / scale
                break
        else:
            found[name] = float(value) if name.endswith("_seconds") else value
    return found


_DEFAULTS = _converted(api.Tuning())


@dataclasses.dataclass(frozen=True)
class Tuning:
    """The constants of the method, by default the API's; docs/autoscaling.md argues for them.

    Attributes:
        min_requests: fewer within the window widen it threefold.
        min_misses: fewer are made up from the slowest tenth.
        slow_seconds: between two calibrations and re-weightings.
        smoothing_seconds: time constant of admitted work.
        drain_seconds: within which a backlog should be worked off.
        wait_floor_seconds: least budget for waiting in a queue.
        band_up, band_down: share of capacity in use above which a pool grows, below which it may
            shrink; between them nothing moves.
        guilty_share: least share of a pool's own stages in the overrun of TTFT.
        ttft_margin, itl_margin: share of the target that must not be exceeded before shrinking.
        consolidation: share of the waiting budget and of the KV cap that one replica fewer may use.
        after_growth_seconds: without shrinking after any pool of the service grew.
        write_off: multiple of its phase of a start after which a pod is no capacity.
        pending_seconds: without a node, before which no pod is written off that starts were seen
            of: a cluster that adds nodes takes longer than one that has some.
        spot_risk: how much dearer, as a share of its price, a spot replica counts in choosing: it
            may be taken away and must start again.
        exhausted_seconds: without another try of a variant that got no node; doubles each time.
        startup_seconds: until a variant's own is known.
        startups_kept: of each variant, for its 90th percentile.
        window_starts: multiple of the longest start that the window to shrink lasts at least.
        growth_cap: most growth that a slope may foresee within one start-up time, as a share.
        stale_ticks: without an answer after which a pod is silent.
        fresh_share: of ready pods that must answer.
        fresh_down_share: of ready pods that must answer before shrinking.
        missing_seconds: of silence before fallback replicas are taken.
        flap_changes, flap_seconds: changes of direction within a time that double the window.
        max_down_seconds: to which it may be doubled.
        fit_points, fit_spread, fit_seconds, fit_shift: least rows, least spread of the regressor,
            memory, and the change of shape that starts a fit afresh.
        warm_share: of the growth that a start-up usually sees, that is held ready beyond the load.
        forecast_seconds: of load that must be known before a forecast is a floor.
    """

    min_requests: int = _DEFAULTS["min_requests"]
    min_misses: int = _DEFAULTS["min_misses"]
    slow_seconds: float = _DEFAULTS["slow_seconds"]
    smoothing_seconds: float = _DEFAULTS["smoothing_seconds"]
    drain_seconds: float = _DEFAULTS["drain_seconds"]
    wait_floor_seconds: float = _DEFAULTS["wait_floor_seconds"]
    band_up: float = _DEFAULTS["band_up"]
    band_down: float = _DEFAULTS["band_down"]
    guilty_share: float = _DEFAULTS["guilty_share"]
    ttft_margin: float = _DEFAULTS["ttft_margin"]
    itl_margin: float = _DEFAULTS["itl_margin"]
    consolidation: float = _DEFAULTS["consolidation"]
    after_growth_seconds: float = _DEFAULTS["after_growth_seconds"]
    write_off: float = _DEFAULTS["write_off"]
    pending_seconds: float = _DEFAULTS["pending_seconds"]
    spot_risk: float = _DEFAULTS["spot_risk"]
    exhausted_seconds: float = _DEFAULTS["exhausted_seconds"]
    startup_seconds: float = _DEFAULTS["startup_seconds"]
    startups_kept: int = _DEFAULTS["startups_kept"]
    window_starts: float = _DEFAULTS["window_starts"]
    growth_cap: float = _DEFAULTS["growth_cap"]
    stale_ticks: int = _DEFAULTS["stale_ticks"]
    fresh_share: float = _DEFAULTS["fresh_share"]
    fresh_down_share: float = _DEFAULTS["fresh_down_share"]
    missing_seconds: float = _DEFAULTS["missing_seconds"]
    flap_changes: int = _DEFAULTS["flap_changes"]
    flap_seconds: float = _DEFAULTS["flap_seconds"]
    max_down_seconds: float = _DEFAULTS["max_down_seconds"]
    fit_points: int = _DEFAULTS["fit_points"]
    fit_spread: float = _DEFAULTS["fit_spread"]
    fit_seconds: float = _DEFAULTS["fit_seconds"]
    fit_shift: float = _DEFAULTS["fit_shift"]
    warm_share: float = _DEFAULTS["warm_share"]
    forecast_seconds: float = _DEFAULTS["forecast_seconds"]


def constants(written: api.Tuning) -> Tuning:
    """Turn the API's integers into the method's own units."""
    return Tuning(**_converted(written))
