"""Writes and reads the memory that survives the operator: ConfigMap `<svc>-autoscaler`, as JSON.

Numbers are rounded, and the windows of needs and of counters are left out, because each tick
changes them. So an idle service causes no writes. A process that loads the memory begins new
windows and shrinks no pool before their end.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from pydantic import TypeAdapter

from vlm_operator.autoscale.decide import Memory
from vlm_operator.autoscale.estimate import EstimateMemory
from vlm_operator.autoscale.history import ScalingMemory

VERSION = 4
_MEMORY = TypeAdapter(Memory)
_TIMES = {"at", "since", "time", "until"}


def dump(memory: Memory) -> str:
    """Return the lasting part of a memory as JSON."""
    pools = {
        role: dataclasses.replace(history, since=0.0, wants=(), over_since=None, idle_since=None)
        for role, history in memory.pace.pools.items()
    }
    sleep = memory.pace.sleep
    lasting = Memory(
        estimate=memory.estimate.lasting,
        pace=ScalingMemory(pools, sleep=None if sleep is None else sleep.lasting),
    )
    value = _MEMORY.dump_python(lasting, mode="json", exclude_defaults=True)
    return json.dumps({"version": VERSION, **_rounded(value)}, sort_keys=True, allow_nan=False)


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
    return dataclasses.replace(found, pace=ScalingMemory(pools, sleep=found.pace.sleep))


def worth_writing(memory: Memory) -> bool:
    """Whether the memory holds a decision, a conflict or a lasting estimate."""
    moved = any(pace.decisions or pace.foreign for pace in memory.pace.pools.values())
    return moved or memory.estimate.lasting != EstimateMemory()


def _rounded(value: Any, *path: str) -> Any:
    """Round what ticks measure: times to seconds, shares to 0.01, estimates to three digits."""
    if isinstance(value, dict):
        return {key: _rounded(item, *path, key) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item, *path) for item in value]
    if not isinstance(value, float):
        return value
    if "estimate" in path:
        return float(f"{value:.3g}")
    if "shares" in path:
        return round(value, 2)
    return float(round(value)) if path[-1] in _TIMES else value
