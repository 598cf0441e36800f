"""Messages that lie, at both doors: a value within bounds or our own error, nothing else."""

from __future__ import annotations

import dataclasses
import enum
import math
import tracemalloc
from collections import Counter
from typing import Any

import pytest
from worker.seeds import drawing
from worker.wire.lies import Door, client_doors, lie, server_doors

from vlm_worker.annotations import Between
from vlm_worker.errors import IncompatibleError, InvalidRequestError

MOST = 1 << 42
# any 64 bits are a seed; the logarithm of 0 is -inf
UNBOUNDED = {"seed", "logprob", "top", "logprobs", "top_logprobs"}


def check_bounded(value: Any, name: str = "") -> None:
    """Every number in a value is finite and small enough to count with."""
    if isinstance(value, enum.Enum | str | bytes | bool | Exception) or value is None:
        return
    if isinstance(value, int | float):
        assert name in UNBOUNDED or (math.isfinite(value) and abs(value) <= MOST), (name, value)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            check_bounded(getattr(value, field.name), field.name)
    else:
        for one in value:
            check_bounded(one, name)


def every_lie_is_a_value_or_our_error(doors: dict[str, Door], count: int) -> None:
    draw = drawing()
    ends: Counter[str] = Counter()
    names = sorted(doors)
    tracemalloc.start()
    try:
        for number in range(count):
            name = names[number % len(names)]
            honest, read = doors[name]
            message = lie(honest, draw)
            size = message.ByteSize()
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            try:
                value = read(message)
            except (InvalidRequestError, IncompatibleError):
                ends[f"{name} refused"] += 1
            else:
                ends[f"{name} read"] += 1
                check_bounded(value)
            peak = tracemalloc.get_traced_memory()[1] - before
            assert peak < 65_536 + 64 * size, f"{name}: {peak} bytes for a message of {size}"
    finally:
        tracemalloc.stop()
    for end, times in sorted(ends.items()):
        print(f"{end:24} {times:6}")
    assert {f"{name} refused" for name in names if name != "PrefillDone"} <= set(ends)


DOORS = {"server": server_doors, "client": client_doors}


@pytest.mark.parametrize("door", DOORS)
def test_every_honest_message_is_read(door: str) -> None:
    for name, (message, read) in DOORS[door]().items():
        assert read(type(message).FromString(message.SerializeToString())), name


@pytest.mark.parametrize("door", DOORS)
def test_five_thousand_messages_that_lie_are_values_within_bounds_or_refused(door: str) -> None:
    every_lie_is_a_value_or_our_error(DOORS[door](), 5_000)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("door", DOORS)
def test_a_hundred_thousand_messages_that_lie_are_values_within_bounds_or_refused(
    door: str,
) -> None:
    every_lie_is_a_value_or_our_error(DOORS[door](), 100_000)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 2.0])
def test_a_measure_is_a_number_within_its_bounds(value: float) -> None:
    bound = Between(0.0, 1.0)
    assert not bound.accepts(value)
    assert bound.problem(value).startswith("must be 0 to 1, not")
