"""Erlang's C against its table and against a simulated M/M/N; W95 against the same simulation."""

import heapq
import math
import random

import pytest
from autoscaler.waiting import MOST, erlang_c, least_servers, wait_p95
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("servers", "erlangs", "waits"),
    [
        (1, 0.5, 0.5),
        (2, 1.0, 1 / 3),
        (3, 2.0, 4 / 9),
        (5, 4.0, 0.5541),
        (10, 8.0, 0.4092),
        (20, 15.0, 0.1604),
    ],
)
def test_erlang_c_is_that_of_the_tables(servers, erlangs, waits):
    assert erlang_c(servers, erlangs) == pytest.approx(waits, abs=5e-4)


def simulated(servers: int, erlangs: float, *, items: int, seed: int) -> list[float]:
    """Waits of items of mean 1 s that come at rate `erlangs` to so many servers."""
    draw = random.Random(seed)
    free = [0.0] * servers
    now, waits = 0.0, []
    for _ in range(items):
        now += draw.expovariate(erlangs)
        start = max(now, heapq.heappop(free))
        waits.append(start - now)
        heapq.heappush(free, start + draw.expovariate(1.0))
    return sorted(waits[items // 20 :])


@pytest.mark.parametrize(("servers", "erlangs"), [(1, 0.6), (3, 2.2), (8, 6.4)])
def test_erlang_c_and_the_percentile_are_those_of_a_simulated_queue(servers, erlangs):
    waits = simulated(servers, erlangs, items=60_000, seed=7)
    share = sum(wait > 0 for wait in waits) / len(waits)
    assert erlang_c(servers, erlangs) == pytest.approx(share, abs=0.03)
    true = waits[math.ceil(0.95 * len(waits)) - 1]
    assert wait_p95(servers, erlangs, seconds=1.0) == pytest.approx(true, rel=0.12, abs=0.02)


loads = st.floats(0.01, 60)


@given(loads, st.integers(1, 80))
def test_more_servers_and_less_load_never_wait_longer(erlangs, servers):
    def wait(count, load):
        return wait_p95(count, load, seconds=1.0)

    assert 0 <= erlang_c(servers, erlangs) <= 1
    assert wait(servers + 1, erlangs) <= wait(servers, erlangs) + 1e-12
    assert wait(servers, erlangs / 2) <= wait(servers, erlangs) + 1e-12


@given(loads, st.floats(0.01, 5), st.floats(0.001, 10), st.floats(0.25, 4))
def test_the_fewest_servers_meet_the_bound_and_one_fewer_does_not(erlangs, seconds, within, phi):
    found = least_servers(erlangs, seconds=seconds, within=within, variability=phi)
    assert found > erlangs
    assert wait_p95(found, erlangs, seconds=seconds, variability=phi) <= within
    if found > 1:
        assert wait_p95(found - 1, erlangs, seconds=seconds, variability=phi) > within


@pytest.mark.parametrize(
    ("erlangs", "servers"),
    [(0.0, 0), (-1.0, 0), (MOST, MOST), (1e18, MOST), (math.inf, MOST), (math.nan, MOST)],
)
def test_no_load_needs_no_server_and_one_without_bounds_needs_the_most(erlangs, servers):
    assert least_servers(erlangs, seconds=1.0, within=0.1) == servers
