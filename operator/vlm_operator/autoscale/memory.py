"""History and decisions as JSON: what ConfigMap `<svc>-autoscaler` and the status show."""

from __future__ import annotations

import dataclasses
import datetime
import json
from typing import Any

from vlm_operator.autoscale.types import Candidate, Decision, Foreign, History

VERSION = 1


def dump_history(history: History) -> str:
    """Write what outlives the operator, rounded: whole seconds, no per-tick counters.

    The window's wants and the last tick's counters change at every tick; they are left out, and a
    new process waits one window before it shrinks anything.
    """
    value = {
        "version": VERSION,
        "changes": [[round(at), old, to] for at, old, to in history.changes],
        "decisions": [record(item) for item in history.decisions],
        "foreign": None if history.foreign is None else _foreign(history.foreign),
    }
    return json.dumps(value, sort_keys=True)


def load_history(text: str | None, *, now: float) -> History:
    """Read what an earlier process wrote; a garbled or unknown version is an empty memory."""
    empty = History(since=now)
    if not text:
        return empty
    try:
        value = json.loads(text)
        if value["version"] != VERSION:
            return empty
        foreign = value["foreign"]
        return dataclasses.replace(
            empty,
            changes=tuple((float(at), int(old), int(to)) for at, old, to in value["changes"]),
            decisions=tuple(_decision(item) for item in value["decisions"]),
            foreign=None if foreign is None else Foreign(**foreign),
        )
    except (ValueError, KeyError, TypeError):
        return empty


def record(decision: Decision, *, epoch: int | None = None) -> dict[str, Any]:
    """Write a decision as `status.pools.*.lastDecision` shows it."""
    moment = datetime.datetime.fromtimestamp(round(decision.time), datetime.UTC)
    found: dict[str, Any] = {
        "time": moment.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "epoch": epoch,
        "from": decision.before,
        "to": decision.to,
        "reason": decision.reason,
        "limitedBy": decision.limited_by,
        "candidates": [dataclasses.asdict(item) for item in decision.candidates] or None,
        "message": decision.message,
    }
    if decision.cost_per_hour is not None:
        found["costPerHour"] = f"{decision.cost_per_hour:.2f}"
    return {key: value for key, value in found.items() if value is not None}


def _foreign(foreign: Foreign) -> dict[str, Any]:
    return {**dataclasses.asdict(foreign), "since": round(foreign.since)}


def _decision(value: dict[str, Any]) -> Decision:
    moment = datetime.datetime.fromisoformat(value["time"])
    return Decision(
        time=moment.timestamp(),
        before=int(value["from"]),
        to=int(value["to"]),
        claim=None,
        reason=str(value["reason"]),
        message=str(value["message"]),
        limited_by=value.get("limitedBy"),
        candidates=tuple(Candidate(**item) for item in value.get("candidates", ())),
    )
