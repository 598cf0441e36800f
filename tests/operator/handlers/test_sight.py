"""A dead watch is told apart from a quiet cluster."""

from typing import Any

from support.fakes import Clock
from vlm_operator.handlers import App
from vlm_operator.sight import Sight


def listed(uid: str, generation: int = 1, **meta: Any) -> dict[str, Any]:
    return {"metadata": {"uid": uid, "generation": generation, **meta}}


def sight() -> tuple[Sight, Clock]:
    clock = Clock()
    return Sight(lambda: clock.now), clock


def test_a_quiet_cluster_is_seen_for_ever():
    found, clock = sight()
    found.told("a", 1)
    for _ in range(100):
        clock.now += 30
        found.compare([listed("a")])
        assert found.blind_seconds == 0


def test_a_service_that_no_event_announced_counts_from_the_first_list_that_has_it():
    found, clock = sight()
    clock.now += 1000
    found.compare([listed("a")])
    clock.now += 130
    found.compare([listed("a")])
    assert found.blind_seconds == 130
    found.told("a", 1)
    found.compare([listed("a")])
    assert found.blind_seconds == 0


def test_a_change_that_no_event_announced_counts_too():
    found, clock = sight()
    found.told("a", 1)
    found.compare([listed("a", 2)])
    clock.now += 40
    assert found.blind_seconds == 40


def test_events_of_others_show_that_the_watch_lives():
    # kopf itself holds one object back after errors with it; a restart would help nobody
    found, clock = sight()
    found.compare([listed("a"), listed("b")])
    clock.now += 500
    found.told("b", 1)
    clock.now += 10
    found.compare([listed("a"), listed("b")])
    assert found.blind_seconds == 10


def test_a_service_in_its_drain_is_not_waited_for():
    found, clock = sight()
    found.told("a", 1)
    found.compare([listed("a", 2, deletionTimestamp="2026-01-01T00:00:00Z")])
    clock.now += 500
    assert found.blind_seconds == 0


def test_what_is_gone_is_forgotten():
    found, clock = sight()
    found.compare([listed("a")])
    clock.now += 500
    found.compare([])
    assert found.blind_seconds == 0


def test_health_says_what_is_stuck_or_dead():
    found, clock = sight()
    app = App(
        make_reconciler=lambda *_: None,
        connect=lambda: None,
        clock=lambda: clock.now,
        sight=found,
    )
    assert app.problem() == ""
    app.turning["ns", "demo"] = clock.now
    found.compare([listed("a")])
    clock.now += 119
    assert app.problem() == ""
    clock.now += 2
    assert app.problem() == "a turn has taken 121 s"
    app.turning.clear()
    assert app.problem() == "no event came for 121 s"
