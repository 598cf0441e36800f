"""How fast a pool follows its need: up at once, down by rules, and never in the dark."""

import dataclasses

import pytest

from support.sizing import TICK, World, attribution, need, pool, service, variant
from vlm_operator.api.enums import AutoscalingPolicy, MissingMetrics, WhileAtZero
from vlm_operator.autoscale.constants import Constants
from vlm_operator.autoscale.policy import ZeroPolicy
from vlm_operator.names import Role

DECODE, ENCODER = Role.DECODE, Role.ENCODER


def world(size=2, *, constants=None, **changes) -> World:
    return World(
        service(pool(**changes), constants=constants or Constants(), itl_seconds=0.1),
        {DECODE: {"a": size}},
    )


def ask(found: World, units: float, **said):
    """One tick of a decode pool that needs so many units."""
    wants = {key: said.pop(key) for key in ("bottleneck", "known", "idle") if key in said}
    return found.tick([need(units, **wants)], **said)[DECODE]


def wait(found: World, units: float, seconds: float, **said):
    for _ in range(int(seconds / TICK)):
        last = ask(found, units, **said)
    return last


def test_a_pool_grows_in_the_tick_that_needs_it_and_says_what_asked():
    found = ask(world(up_pods=4), 3.5)
    assert (found.before, found.to, found.reason, found.claim) == (2, 4, "ScaleUp", 4)
    assert found.candidates[0].signal == "kvTokens"
    assert found.cost_per_hour == 4.0


def test_growth_keeps_to_pods_a_minute_then_goes_on():
    found = world(4, up_pods=2, maximum=20)
    first = ask(found, 9)
    assert (first.to, first.limited_by) == (6, "MaxPodsPerMinute")
    again = ask(found, 9)
    assert (again.to, again.reason, again.limited_by) == (6, "Steady", "MaxPodsPerMinute")
    assert wait(found, 9, 65).to == 8
    assert wait(found, 9, 65).to == 9


def test_a_need_must_last_where_the_manifest_says_so():
    found = world(up_seconds=15.0)
    held = [ask(found, 3) for _ in range(3)]
    assert [(item.to, item.limited_by) for item in held] == [(2, "UpWindow")] * 3
    assert ask(found, 3).to == 3
    found = world(up_seconds=15.0)
    for _ in range(20):  # never three ticks on end
        ask(found, 3)
        assert ask(found, 1.9).to == 2


def test_pods_that_start_count_so_a_need_is_met_once():
    found = world()
    found.startup = 60.0
    assert ask(found, 5).to == 5
    assert {ask(found, 5).to for _ in range(10)} == {5}


def test_down_takes_a_whole_window_and_one_pod_a_minute():
    found = world(6)
    for _ in range(60):
        assert ask(found, 1.0).to == 6
    sizes = [ask(found, 1.0).to for _ in range(60)]
    assert sizes[0] == 5
    assert sizes[11:13] == [5, 4]
    assert min(sizes) == 2  # its stricter need is 1.2


def test_one_replica_too_many_stays_until_six_windows_did_not_need_it():
    found = world(3)
    kept = wait(found, 1.0, 1795)
    assert (kept.to, kept.limited_by) == (3, "Window")
    assert "until 1800 s did not need it" in kept.message
    assert wait(found, 1.0, 10).to == 2


def test_two_replicas_too_many_go_in_one_change_after_one_window():
    found = world(4, down_pods=4)
    assert wait(found, 1.0, 295).to == 4
    assert wait(found, 1.0, 10).to == 2


def test_while_the_need_still_falls_a_pool_waits_and_then_shrinks_once():
    found = world(8, down_pods=8)
    falling = [6.0] * 60 + [5.0] * 24 + [4.0] * 24 + [3.0] * 24 + [1.0] * 90
    sizes = [ask(found, units).to for units in falling]
    assert len(set(sizes)) == 2, "one change"
    assert sizes[-1] == 2


def test_one_moment_of_need_within_the_window_keeps_the_pool():
    found = world(4)
    wait(found, 1.0, 200)
    ask(found, 3.2)
    held = wait(found, 1.0, 200)
    assert (held.to, held.limited_by) == (4, "Window")
    assert wait(found, 1.0, 115).to == 3  # its slot of the window may end 10 s later


def test_the_window_is_twice_the_start_up_time_where_that_is_longer():
    slow = variant(startup_seconds=400.0)
    found = World(service(pool(DECODE, slow)), {DECODE: {"a": 4}})
    assert wait(found, 1.0, 795).to == 4
    assert wait(found, 1.0, 10).to == 3


@pytest.mark.parametrize(
    ("said", "bound"),
    [
        ({"attributions": (attribution(p95_seconds=0.95),)}, "SLOMargin"),
        ({"itl": 0.09}, "SLOMargin"),
    ],
    ids=["ttft", "itl"],
)
def test_no_shrinking_while_a_target_is_close_nor_for_a_window_after(said, bound):
    found = world(4)
    held = wait(found, 1.0, 400, **said)
    assert (held.to, held.reason, held.limited_by) == (4, "Stabilizing", bound)
    assert wait(found, 1.0, 290).to == 4
    assert wait(found, 1.0, 15).to == 3


def test_an_unattainable_target_does_not_keep_a_pool_large():
    beyond = attribution(p95_seconds=2.0, attainable=False)
    assert wait(world(4), 1.0, 305, attributions=(beyond,)).to == 3


def test_no_shrinking_while_pods_roll_or_many_are_silent():
    found = world(4)
    found.rolling = True
    assert wait(found, 1.0, 400).limited_by == "Rollout"
    found.rolling, found.silent = False, 1.0
    assert ask(found, 1.0).limited_by == "Freshness"
    found.silent = 0.0
    assert ask(found, 1.0).to == 3


def test_a_pool_that_is_not_a_bottleneck_does_not_grow():
    found = ask(world(), 5, bottleneck=False)
    assert (found.to, found.reason, found.recommendation) == (2, "NotBottleneck", 5)
    beyond = attribution(attainable=False)
    found = ask(world(), 5, bottleneck=False, attributions=(beyond,))
    assert (found.to, found.reason) == (2, "Unattainable")


def test_little_known_holds_and_the_fallback_comes_after_long_if_it_is_more():
    found = world(4)
    held = wait(found, 0.0, 900, fresh=False, missing=100.0)
    assert (held.to, held.reason, held.held) == (4, "MissingMetrics", True)
    policy = dataclasses.replace(found.policy, missing=MissingMetrics.FALLBACK)
    for fallback, to in ((3, 4), (6, 6), (99, 8)):
        found = World(dataclasses.replace(policy, fallback={DECODE: fallback}), {DECODE: {"a": 4}})
        assert ask(found, 0.0, fresh=False, missing=299.0).to == 4
        late = ask(found, 0.0, fresh=False, missing=300.0)
        assert (late.to, late.reason) == (to, "Fallback")


def test_bounds_that_move_past_the_pool_move_it_at_once():
    found = world(6)
    ask(found, 5.5)
    found.policy = service(pool(maximum=4))
    last = ask(found, 5.5)
    assert (last.to, last.reason, last.limited_by) == (4, "Bounds", "Max")
    found.policy = service(pool(minimum=5))
    last = ask(found, 1.0)
    assert (last.to, last.reason, last.limited_by) == (5, "Bounds", "Min")


def encoder(size=2, **changes) -> World:
    rules = pool(
        ENCODER, minimum=0, zero=ZeroPolicy(600.0, WhileAtZero.INLINE_AT_PREFILL), **changes
    )
    return World(service(rules), {ENCODER: {"a": size}})


def images(found: World, units: float, seconds: float = TICK, **changes):
    for _ in range(int(seconds / TICK)):
        last = found.tick([need(units, ENCODER, **changes)])[ENCODER]
    return last


def test_the_encoder_goes_to_zero_after_its_idle_seconds_and_no_sooner():
    found = encoder(2)
    assert images(found, 0.0, 310).to == 1
    held = images(found, 0.0, 285)
    assert (held.to, held.limited_by) == (1, "IdleSeconds")
    gone = images(found, 0.0, 15)
    assert (gone.to, found.memory.pools[ENCODER].decisions[-1].reason) == (0, "Idle")
    assert images(found, 0.0).reason == "AtZero"


def test_a_silence_of_reports_is_not_idleness():
    found = encoder(1)
    images(found, 0.0, 590)
    images(found, 0.0, known=False)
    assert images(found, 0.0, 500).to == 1
    assert images(found, 0.0, 110).to == 0


def test_the_encoder_wakes_in_the_tick_that_asks_for_it():
    found = encoder(0, up_seconds=60.0)
    assert images(found, 0.0).to == 0
    woken = images(found, 0.2, idle=False)
    assert (woken.to, woken.reason) == (1, "Wake")


def test_advice_is_given_and_not_followed():
    found = world()
    found.policy = dataclasses.replace(found.policy, apply=AutoscalingPolicy.ADVISORY)
    advised = ask(found, 4)
    assert (advised.to, advised.recommendation, advised.claim) == (2, 4, None)
    assert "Advisory" in advised.message
    assert found.memory.pools[DECODE].changes == ()
    found.policy = dataclasses.replace(found.policy, apply=AutoscalingPolicy.OFF)
    off = ask(found, 4)
    assert (off.to, off.reason, off.claim) == (2, "Off", None)


def test_no_more_than_eight_decisions_are_kept():
    found = world(1, maximum=30, up_pods=1)
    wait(found, 15.0, 900)
    assert len(found.memory.pools[DECODE].decisions) == 8
