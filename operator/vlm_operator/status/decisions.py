"""Converts a decision to its form in the status: rounded, with times instead of ages."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

from vlm_operator.autoscale.outcome import Candidate, Decision


def decision_status(
    decision: Decision, previous: Mapping[str, Any], *, epoch: int
) -> dict[str, Any]:
    """Return `status.pools.*.lastDecision`.

    Args:
        decision: the pool's last decision.
        previous: the present `lastDecision`; its epoch stays if the decision is the same.
        epoch: the lease's epoch, for a new decision.
    """
    past = past_status(decision)
    told = all(previous.get(key) == value for key, value in past.items())
    found: dict[str, Any] = {
        **past,
        "epoch": previous.get("epoch") if told else epoch,
        "limitedBy": decision.limited_by,
        "shares": percents(decision.shares) or None,
        "candidates": [_candidate(item) for item in decision.candidates] or None,
        "message": decision.message,
    }
    if decision.cost_per_hour is not None:
        found["costPerHour"] = money(decision.cost_per_hour)
    return {key: value for key, value in found.items() if value is not None}


def past_status(decision: Decision) -> dict[str, Any]:
    """Return an item of `status.pools.*.history`; the operator's log has the full record."""
    moment = datetime.datetime.fromtimestamp(round(decision.time), datetime.UTC)
    return {
        "time": moment.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "from": decision.before,
        "to": decision.to,
        "reason": decision.reason,
    }


def percents(shares: Mapping[str, float]) -> dict[str, int]:
    """Round shares to percent in steps of 5, without those that round to 0."""
    rounded = {name: round(20 * share) * 5 for name, share in sorted(shares.items())}
    return {name: share for name, share in rounded.items() if share}


def money(amount: float) -> str:
    """Format a cost as a quantity with two decimals."""
    return f"{amount:.2f}"


def _candidate(item: Candidate) -> dict[str, Any]:
    return {"signal": item.signal, "replicas": item.replicas}
