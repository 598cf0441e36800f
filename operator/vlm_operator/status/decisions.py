"""A decision as the status shows it: rounded, ages left to the reader."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

from vlm_operator.autoscale.outcome import Candidate, Decision


def decision_status(
    decision: Decision, previous: Mapping[str, Any], *, epoch: int
) -> dict[str, Any]:
    """Write `status.pools.*.lastDecision`.

    Args:
        decision: the pool's last one.
        previous: the same as it stands, whose epoch stays while it tells of the same decision.
        epoch: of the lease under which a decision that is new here was made.
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
    """Write an item of `status.pools.*.history`; the rest is a line of the operator's log."""
    moment = datetime.datetime.fromtimestamp(round(decision.time), datetime.UTC)
    return {
        "time": moment.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "from": decision.before,
        "to": decision.to,
        "reason": decision.reason,
    }


def percents(shares: Mapping[str, float]) -> dict[str, int]:
    """Shares in steps of 5 %, the small ones left out."""
    rounded = {name: round(20 * share) * 5 for name, share in sorted(shares.items())}
    return {name: share for name, share in rounded.items() if share}


def money(amount: float) -> str:
    """A cost as a quantity, in hundredths."""
    return f"{amount:.2f}"


def _candidate(item: Candidate) -> dict[str, Any]:
    return {"signal": item.signal, "replicas": item.replicas}
