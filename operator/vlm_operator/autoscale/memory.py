"""What outlives the operator, as JSON: the content of ConfigMap `<svc>-autoscaler`.

Rounded, and without what each tick changes, so that an idle service is not written: windows of
wants and of counters are left out. A process that reads it begins a new window, and shrinks
nothing before its end.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from vlm_operator.autoscale.codec import decode, encode
from vlm_operator.autoscale.decide import Memory
from vlm_operator.autoscale.settling.paced import Change, PaceMemory, PoolPace

VERSION = 2
_DIGITS = 3  # significant, of what is measured; times are whole seconds


def dump(memory: Memory) -> str:
    """Write what the next process should know."""
    lasting = Memory(
        estimate=memory.estimate.lasting,
        pace=PaceMemory({role: _lasting(pace) for role, pace in memory.pace.pools.items()}),
    )
    value = encode(lasting, sparse=True)
    if "estimate" in value:
        value["estimate"] = _rounded(value["estimate"])
    return json.dumps({"version": VERSION, **value}, sort_keys=True, allow_nan=False)


def load(text: str | None, *, now: float) -> Memory:
    """Read what an earlier process wrote; what is garbled or of another version is no memory.

    Every pool's window begins now: nothing shrinks before its end.
    """
    if not text:
        return Memory()
    try:
        value = json.loads(text)
        if value.pop("version") != VERSION:
            return Memory()
        found: Memory = decode(Memory, value)
    except (ValueError, KeyError, TypeError, AttributeError):
        return Memory()
    pools = {role: dataclasses.replace(pace, since=now) for role, pace in found.pace.pools.items()}
    return dataclasses.replace(found, pace=PaceMemory(pools))


def worth_writing(memory: Memory) -> bool:
    """Whether anything has been learnt or decided."""
    return any(pace.decisions or pace.foreign for pace in memory.pace.pools.values()) or bool(
        encode(memory.estimate.lasting, sparse=True)
    )


def _lasting(pace: PoolPace) -> PoolPace:
    """Decisions, conflicts, back-offs and what stands; times in whole seconds."""
    foreign = pace.foreign
    if foreign is not None:
        foreign = dataclasses.replace(foreign, since=float(round(foreign.since)))
    return PoolPace(
        since=0.0,
        mode=pace.mode,
        changes=tuple(Change(float(round(c.at)), c.before, c.to) for c in pace.changes),
        damping=pace.damping,
        damped_at=float(round(pace.damped_at)),
        panic_until=float(round(pace.panic_until)),
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
