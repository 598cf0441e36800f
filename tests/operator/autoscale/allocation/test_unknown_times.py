"""While service times are not credible, a pool goes by one replica at a time, and says so."""

from hypothesis import given, settings
from hypothesis import strategies as st

from support.sizing import World, need, pool, service
from vlm_operator.names import Role

DECODE = Role.DECODE


def world(size: int) -> World:
    rules = pool(maximum=40, up_pods=9, down_pods=9, down_seconds=10.0)
    return World(service(rules), {DECODE: {"a": size}})


@given(st.integers(1, 9), st.floats(0, 60))
@settings(max_examples=30)
def test_no_step_is_longer_than_one_replica(size, units):
    found = world(size)
    for _ in range(20):
        last = found.tick([need(units, credible=False)])[DECODE]
        assert abs(last.to - last.before) <= 1


def test_growth_that_is_held_back_names_what_is_not_known():
    first = world(2).tick([need(5.0, credible=False)])[DECODE]
    assert (first.to, first.reason, first.limited_by) == (3, "ScaleUp", "UnknownTimes")
    assert world(2).tick([need(3.0, credible=False)])[DECODE].limited_by is None


@given(st.floats(0, 30))
@settings(max_examples=20)
def test_both_ways_lead_to_the_same_size(units):
    sizes = []
    for credible in (True, False):
        found = world(4)
        for _ in range(40):
            last = found.tick([need(units, credible=credible)])[DECODE]
        sizes.append(last.to)
    assert sizes[0] == sizes[1]
