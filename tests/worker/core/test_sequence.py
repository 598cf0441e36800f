"""The moves of a sequence are a table; what is not in it is refused and changes nothing."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from vlm_worker.core.sequence import TRANSITIONS, Sequence, Status
from vlm_worker.types import Request, RequestKey, SamplingParams


def sequence(status: Status) -> Sequence:
    request = Request(RequestKey("r", 0), (1,), 1, SamplingParams(max_tokens=1))
    return Sequence(request, 0, np.array([1], np.int32), np.zeros((1, 1)), 0, status=status)


@pytest.mark.parametrize(("a", "b"), list(itertools.product(Status, Status)))
def test_only_the_moves_of_the_table_are_made(a: Status, b: Status) -> None:
    moving = sequence(a)
    if b in TRANSITIONS[a]:
        moving.move(b)
        assert moving.status is b
    else:
        with pytest.raises(AssertionError, match="no transition from"):
            moving.move(b)
        assert moving.status is a


def test_every_status_can_end_and_the_end_is_final() -> None:
    for status in Status:
        assert (Status.FINISHED in TRANSITIONS[status]) == (status is not Status.FINISHED)
    assert not TRANSITIONS[Status.FINISHED]
