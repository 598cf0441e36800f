"""Writes and reads the memory that survives the operator: ConfigMap `<svc>-autoscaler`, as JSON.

Numbers are rounded, and the windows of needs and of counters are left out, because each tick
changes them. So an idle service causes no writes. A process that loads the memory begins new
windows and shrinks no pool before their end.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from vlm_operator.autoscale.decide import Memory
from vlm_operator.autoscale.estimate import EstimateMemory
from vlm_operator.autoscale.history import Change, ScalingHistory, ScalingMemory

VERSION = 4
_MEMORY = TypeAdapter(Memory)
_DIGITS = 3  # significant digits of measured values; points in time are whole seconds


def dump(memory: Memory) -> str:
    """Return the lasting part of a memory as JSON."""
    lasting = Memory(
        estimate=memory.estimate.lasting,
        pace=ScalingMemory({role: _lasting(pace) for role, pace in memory.pace.pools.items()}),
    )
    value = _MEMORY.dump_python(lasting, mode="json", exclude_defaults=True)
    if "estimate" in value:
        value["estimate"] = _rounded(value["estimate"])
    return json.dumps({"version": VERSION, **value}, sort_keys=True, allow_nan=False)


def load(text: str | None, *, now: float) -> Memory:
    """Read the output of `dump`; text that is malformed or of another version gives `Memory()`.

    The window of every pool begins at `now` (seconds since the epoch); no pool shrinks before its
    end.
    """
    if not text:
        return Memory()
    try:
        value = json.loads(text)
        if value.pop("version") != VERSION:
            return Memory()
        found = _MEMORY.validate_python(value)
    except (ValueError, KeyError, TypeError, AttributeError):
        return Memory()
    pools = {role: dataclasses.replace(pace, since=now) for role, pace in found.pace.pools.items()}
    return dataclasses.replace(found, pace=ScalingMemory(pools))


def worth_writing(memory: Memory) -> bool:
    """Whether the memory holds a decision, a conflict or a lasting estimate."""
    moved = any(pace.decisions or pace.foreign for pace in memory.pace.pools.values())
    return moved or memory.estimate.lasting != EstimateMemory()


def _lasting(pace: ScalingHistory) -> ScalingHistory:
    """Keep decisions, conflicts, back-offs and current variants; round times to whole seconds."""
    foreign = pace.foreign
    if foreign is not None:
        foreign = dataclasses.replace(foreign, since=float(round(foreign.since)))
    return ScalingHistory(
        since=0.0,
        mode=pace.mode,
        changes=tuple(Change(float(round(c.at)), c.before, c.to) for c in pace.changes),
        exhausted={
            name: dataclasses.replace(
                item, since=float(round(item.since)), until=float(round(item.until))
            )
            for name, item in pace.exhausted.items()
        },
        foreign=foreign,
        standing=pace.standing,
        decisions=tuple(
            dataclasses.replace(item, time=float(round(item.time)), shares=_shares(item.shares))
            for item in pace.decisions
        ),
    )


def _shares(shares: Mapping[str, float]) -> dict[str, float]:
    return {name: round(share, 2) for name, share in shares.items()}


def _rounded(value: Any) -> Any:
    """Keep three significant digits of every measured number."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    return value
