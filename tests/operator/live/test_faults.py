"""What networks and API servers do at times, between a real one and the operator's process.

Each fault is there while a service is made; the children must be those of a service that was made
without one. Then the fault is gone, and a change must arrive: never alive and blind.
"""

from __future__ import annotations

import time
import uuid
from typing import Any

import pytest

from support.fakes.faults import (
    AnswerLost,
    Chaos,
    Fault,
    HalfLine,
    InStream,
    Refused,
    Rule,
    Silence,
)
from support.live import Live
from support.live_faults import (
    LEASE_SECONDS,
    SILENCE_SECONDS,
    ProxyThread,
    Supervised,
    apply,
    decode_replicas,
    ends,
    finished,
    same_as_reference,
)

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("healed")]

CHILDREN = ("serviceaccounts", "configmaps", "services", "vlmpools", "deployments")
BACKOFF_SECONDS = 15.0  # the longest pause of kopf and of the loop between two tries is 15 and 30


def survives(operator: Supervised, proxy: ProxyThread, *rules: Rule, seconds: float) -> None:
    """Make a service through the faults, then change it without them."""
    name = f"f-{uuid.uuid4().hex[:6]}"
    for rule in rules:
        proxy.proxy.add(rule)
    apply(operator, name)
    operator.until(lambda: all(rule.hits for rule in rules), seconds=seconds)
    operator.until(lambda: same_as_reference(operator, name), seconds=seconds)
    operator.until(lambda: finished(operator, name), seconds=seconds)
    proxy.proxy.clear()
    apply(operator, name, decode=2)
    operator.until(lambda: decode_replicas(operator, name) == [2], seconds=seconds)
    operator.kubectl("-n", operator.namespace, "delete", "vlm", name, "--wait=false")


def on_each_child(fault: Fault, *, times: int) -> list[Rule]:
    return [Rule(fault, verb="patch", plural=plural, times=times) for plural in CHILDREN]


WRITES: dict[str, list[Any]] = {
    "conflict": [Refused(409, "Conflict"), 1],
    "three conflicts": [Refused(409, "Conflict"), 3],
    "too many requests": [Refused(429, "TooManyRequests"), 1],
    "forbidden": [Refused(403, "Forbidden"), 1],
    "internal error": [Refused(500, "InternalError"), 2],
    "answer lost": [AnswerLost(), 1],
}
SAMPLED = ("conflict",)


@pytest.mark.parametrize(
    "case", [name if name in SAMPLED else pytest.param(name, marks=pytest.mark.full)
             for name in WRITES],
)  # fmt: skip
def test_a_write_that_fails_is_tried_again(operator: Supervised, proxy: ProxyThread, case: str):
    fault, times = WRITES[case]
    survives(operator, proxy, *on_each_child(fault, times=times), seconds=60)


@pytest.mark.full
def test_a_status_that_was_not_written_is_written(operator: Supervised, proxy: ProxyThread):
    fault = Refused(409, "Conflict")
    survives(operator, proxy, Rule(fault, verb="patch", plural="vlmservices", times=2), seconds=15)


STREAMS: dict[str, Fault] = {
    "410": InStream(410, "Expired"),
    "429": InStream(429, "TooManyRequests"),
    "500": InStream(500, "InternalError"),
    "504": InStream(504, "Timeout"),
    "half a line": HalfLine(),
    "silence": Silence(),
}


@pytest.mark.parametrize(
    "case", [name if name == "410" else pytest.param(name,
             marks=pytest.mark.full) for name in STREAMS],
)  # fmt: skip
def test_a_watch_that_breaks_is_opened_again(operator: Supervised, proxy: ProxyThread, case: str):
    before = proxy.proxy.watches["vlmservices"]
    rule = Rule(STREAMS[case], verb="watch", plural="vlmservices")
    with ends(operator, expected=case not in ("410", "silence")):
        survives(operator, proxy, rule, seconds=20)
    assert proxy.proxy.watches["vlmservices"] > before


def test_a_silent_watch_is_found_out_in_time(operator: Supervised, proxy: ProxyThread):
    rule = proxy.proxy.add(Rule(Silence(), verb="watch", plural="vlmservices"))
    apply(operator, "silent")
    operator.until(lambda: rule.hits == 1, seconds=SILENCE_SECONDS)
    # kopf's patience, and five seconds to list and to act: 75 s in production
    operator.until(
        lambda: len(operator.items("pods", "silent", operator.namespace)) == 3,
        seconds=SILENCE_SECONDS + 5,
    )


@pytest.mark.full
@pytest.mark.parametrize("plural", ["vlmservices", "deployments"])
def test_a_watch_answered_with_410_is_listed_again(
    operator: Supervised, proxy: ProxyThread, plural: str
):
    rule = proxy.proxy.add(Rule(Refused(410, "Expired"), verb="watch", plural=plural))
    proxy.break_watches(plural)
    # kopf, which follows the services alone, ends
    with ends(operator, expected=plural == "vlmservices"):
        operator.until(lambda: rule.hits == 1, seconds=SILENCE_SECONDS)
        survives(operator, proxy, seconds=BACKOFF_SECONDS)


def chaos(operator: Supervised, proxy: ProxyThread, seed: int) -> None:
    survives(operator, proxy, Rule(Chaos(seed), verb="watch", times=None), seconds=20)


def test_events_dropped_doubled_and_late_change_nothing(operator: Supervised, proxy: ProxyThread):
    chaos(operator, proxy, 11)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(20))
def test_many_muddled_histories_change_nothing(operator: Supervised, proxy: ProxyThread, seed: int):
    chaos(operator, proxy, seed)


@pytest.mark.full
@pytest.mark.parametrize("seconds", [2.0, 60.0])
def test_an_api_server_that_is_away_for_a_while_is_found_again_by_the_same_process(
    operator: Supervised, proxy: ProxyThread, seconds: float
):
    name = f"away-{seconds:.0f}"
    lapses = operator.lapses()
    with ends(operator, expected=False):
        proxy.call(proxy.proxy.stop())
        apply(operator, name)
        time.sleep(seconds)  # noqa: TID251  it is away for that long
        assert operator.items("deployments", name, operator.namespace) == []
        assert (operator.lapses() > lapses) == (seconds > LEASE_SECONDS)
        proxy.call(proxy.proxy.start())
        operator.until(
            lambda: len(operator.items("pods", name, operator.namespace)) == 3,
            seconds=BACKOFF_SECONDS,
        )


def test_an_operator_whose_watch_failed_ends_although_the_api_server_is_away(
    operator: Supervised, proxy: ProxyThread
):
    rule = proxy.proxy.add(Rule(Refused(410, "Expired"), verb="watch", plural="vlmservices"))
    proxy.break_watches("vlmservices")
    exits = len(operator.exits)
    operator.until(lambda: rule.hits == 1, seconds=SILENCE_SECONDS)
    proxy.call(proxy.proxy.stop())
    try:
        Live.until(operator, lambda: not operator.running, seconds=5)
    finally:
        proxy.call(proxy.proxy.start())
    operator.until(lambda: len(operator.exits) > exits, seconds=5)
