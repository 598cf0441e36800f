"""`spec.autoscaling.tuning`: the constants of the autoscaler, with the unit in each name.

They are `autoscale.tuning.Tuning` as integers. docs/autoscaling.md has the reasons for the
defaults. Minimum values are small, so that experiments take seconds.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

from vlm_operator.api.base import Model, Rule, field

_DAY = 86400
_BAND_UP, _BAND_DOWN = 85, 70


def _number(default: int, what: str, *, most: int, least: int = 1) -> Any:
    return field(default, what, example=default, ge=least, le=most)


_count = _number
_seconds = functools.partial(_number, most=_DAY)
_percent = functools.partial(_number, most=100)


class Tuning(Model):
    """The constants of the autoscaler."""

    min_requests: int = _count(50, "Fewer in the window widen it threefold.", most=10_000)
    min_misses: int = _count(20, "Fewer are made up from the slowest tenth.", most=10_000)
    slow_seconds: int = _seconds(60, "Between two calibrations.")
    smoothing_seconds: int = _seconds(20, "Time constant of admitted work.")
    backlog_seconds: int = _seconds(30, "Within which a backlog should be done.")
    wait_floor_milliseconds: int = _seconds(20, "Least budget for waiting.", most=60_000)
    band_up_percent: int = _percent(_BAND_UP, "Use above which a pool grows.")
    band_down_percent: int = _percent(_BAND_DOWN, "Use below which it may shrink.")
    bottleneck_share_percent: int = _percent(20, "Least part in the overrun to grow.", least=0)
    ttft_margin_percent: int = _percent(90, "TTFT over target for shrinking, at most.")
    itl_margin_percent: int = _percent(80, "The same of the time between tokens.")
    consolidation_percent: int = _percent(80, "Of the KV cap that one less may use.")
    after_growth_seconds: int = _seconds(60, "Without shrinking after growth.", least=0)
    write_off_percent: int = _percent(
        200,
        "Of its phase of a start, after which a pod does not count.",
        least=100,
        most=1000,
    )
    pending_seconds: int = _seconds(120, "Without a node before a pod is written off.")
    spot_risk_percent: int = _percent(10, "By which spot counts as dearer.", least=0, most=1000)
    exhausted_seconds: int = _seconds(600, "Before a variant without nodes is tried again.")
    startup_seconds: int = _seconds(180, "Until a variant's own start-up is known.")
    startups_kept: int = _count(20, "Of each variant, for its percentile.", most=100)
    window_starts_percent: int = _percent(
        200, "Of the longest start, the least window to shrink.", least=0, most=1000
    )
    growth_cap_percent: int = _percent(
        100, "Most growth foreseen in one start-up.", least=0, most=1000
    )
    stale_ticks: int = _count(3, "Without an answer make a pod silent.", most=100)
    fresh_share_percent: int = _percent(70, "Of ready pods that must answer.")
    fresh_down_share_percent: int = _percent(90, "The same before a pool shrinks.")
    missing_seconds: int = _seconds(300, "Of silence before fallbackReplicas.")
    fit_points: int = _count(10, "Least rows of a fit.", most=1000)
    fit_spread_percent: int = _percent(30, "Least spread of its regressor.")
    fit_seconds: int = _seconds(1800, "Memory of a fit.")
    fit_shift_percent: int = _percent(20, "Change of shape that starts it afresh.", most=1000)

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            name="tuning-bands",
            holds=f"(has(self.bandDownPercent) ? self.bandDownPercent : {_BAND_DOWN}) < "
            f"(has(self.bandUpPercent) ? self.bandUpPercent : {_BAND_UP})",
            message="must be less than bandUpPercent: between them nothing moves",
            says="'must be less than bandUpPercent (%d): between them nothing moves'"
            f".format([has(self.bandUpPercent) ? self.bandUpPercent : {_BAND_UP}])",
            at=".bandDownPercent",
        ),
    )
