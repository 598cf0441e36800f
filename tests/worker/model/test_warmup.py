"""Sizes grow to those of a request, and a slow model does not delay its own start."""

from __future__ import annotations

import pytest

from vlm_worker.model.build import GROWTH_SECONDS, warm_up_sizes


@pytest.mark.parametrize(
    ("seconds_per_unit", "largest"),
    [(0.0, 256), (GROWTH_SECONDS / 256, 256), (GROWTH_SECONDS / 255, 16), (1.0, 1)],
)
def test_sizes_grow_as_far_as_start_up_allows(seconds_per_unit: float, largest: int) -> None:
    now = 0.0
    ran: list[int] = []

    def run(size: int) -> None:
        nonlocal now
        now += size * seconds_per_unit
        ran.append(size)

    warm_up_sizes(run, [1, 16, 256], clock=lambda: now)
    assert max(ran) == largest
    assert ran == sorted(ran)
    assert now <= 2 * seconds_per_unit + 4 * GROWTH_SECONDS


def test_what_fails_is_not_hidden() -> None:
    def run(size: int) -> None:
        if size > 1:
            raise ValueError(size)

    with pytest.raises(ValueError, match="16"):
        warm_up_sizes(run, [1, 16], clock=lambda: 0.0)
