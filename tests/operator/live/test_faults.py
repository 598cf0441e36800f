"""What networks and API servers do at times, between a real one and the operator's process.

Each fault is there while a service is made; the children must be those of a service that was made
without one. Then the fault is gone, and a change must arrive: never alive and blind.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from operator_faults import LEASE_SECONDS, SILENCE_SECONDS, ProxyThread, Supervised, behind
from operator_live import Live, install, plain_children
from operator_support import body, pool

from vlm_operator.local.controlplane import ControlPlane
from vlm_operator.testing.proxy import (
    AnswerLost,
    Chaos,
    Fault,
    HalfLine,
    InStream,
    Refused,
    Rule,
    Silence,
)

pytestmark = pytest.mark.cluster

CHILDREN = ("serviceaccounts", "configmaps", "services", "vlmpools", "deployments")
BACKOFF_SECONDS = 15.0  # the longest pause of kopf and of the loop between two tries is 15 and 30


@pytest.fixture(scope="module")
def proxy(control_plane: ControlPlane) -> Iterator[ProxyThread]:
    found = ProxyThread(control_plane)
    found.start()
    yield found
    found.stop()


@pytest.fixture(scope="module")
def operator(
    control_plane: ControlPlane, proxy: ProxyThread, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Supervised]:
    name = f"faults-{uuid.uuid4().hex[:6]}"
    found = behind(control_plane, proxy, tmp_path_factory.mktemp("faults"), name)
    found.namespace = name
    try:
        found.start()
        apply(found, "reference")
        found.until(lambda: len(found.items("pods", "reference", name)) == 3, seconds=5)
        found.until(lambda: finished(found, "reference"), seconds=5)
        yield found
    finally:
        found.stop()
    control_plane.kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture(autouse=True)
def healed(proxy: ProxyThread) -> Iterator[None]:
    yield
    proxy.proxy.clear()


def apply(operator: Supervised, name: str, *, decode: int = 1) -> None:
    manifest = body(name=name, encoder=pool(), decode=pool(decode))
    manifest["metadata"] = {"name": name, "namespace": operator.namespace}
    operator.apply(manifest)


def finished(operator: Supervised, name: str) -> bool:
    """Whether the operator has said of the manifest's latest form what keeps it."""
    found = operator.get("vlm", name, operator.namespace)
    status = found.get("status", {})
    return bool(status.get("observedGeneration") == found["metadata"]["generation"])


def decode_replicas(operator: Supervised, name: str) -> list[int]:
    found = operator.items("deployments", name, operator.namespace)
    return [item["spec"]["replicas"] for item in found if "-decode-" in item["metadata"]["name"]]


def same_as_reference(operator: Supervised, name: str) -> bool:
    found = plain_children(operator.plane, operator.namespace, name)
    return found == plain_children(operator.plane, operator.namespace, "reference")


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


@contextlib.contextmanager
def ends(operator: Supervised, *, expected: bool) -> Iterator[None]:
    """The process ends with status 1 once, or it does not; a kubelet starts the next one."""
    before = len(operator.exits)
    yield
    assert operator.exits[before:] == ([1] if expected else [])


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
    with ends(operator, expected=True):
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
def test_an_api_server_that_is_away_for_a_while_is_found_again(
    operator: Supervised, proxy: ProxyThread
):
    proxy.call(proxy.proxy.stop())
    apply(operator, "away")
    time.sleep(2.0)  # noqa: TID251  it is away for that long
    assert operator.items("deployments", "away", operator.namespace) == []
    proxy.call(proxy.proxy.start())
    operator.until(
        lambda: len(operator.items("pods", "away", operator.namespace)) == 3,
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


def test_a_lease_that_cannot_be_renewed_ends_the_writing_before_others_may_begin(
    operator: Supervised, proxy: ProxyThread
):
    apply(operator, "unled")
    operator.until(lambda: finished(operator, "unled"), seconds=5)
    rule = proxy.proxy.add(
        Rule(Refused(500, "InternalError"), verb="replace", plural="leases", times=None)
    )
    time.sleep(LEASE_SECONDS - 4.5)  # noqa: TID251  less than a write's five seconds are left
    assert rule.hits
    before = operator.writes()
    apply(operator, "unled", decode=3)
    with ends(operator, expected=True):
        # `Live.until` starts no new one
        Live.until(operator, lambda: not operator.running, seconds=LEASE_SECONDS)
        assert operator.writes() == before
        rule.times = 0
        operator.until(lambda: decode_replicas(operator, "unled") == [3], seconds=15)


def writes_seen(proxy: ProxyThread) -> int:
    """The operator's own writes that passed the proxy so far, its Lease's apart."""
    return sum(
        call.verb in ("create", "replace", "patch", "delete") and call.plural != "leases"
        for call in list(proxy.proxy.calls)
    )


def kill(operator: Supervised, proxy: ProxyThread, *, after: int) -> None:
    """Make a service, kill the process after so many writes, and let the next one finish."""
    name = f"k-{uuid.uuid4().hex[:6]}"
    begun = writes_seen(proxy)
    apply(operator, name)
    Live.until(operator, lambda: writes_seen(proxy) >= begun + after, seconds=5)
    operator.kill()
    operator.until(lambda: same_as_reference(operator, name), seconds=30)
    operator.until(lambda: finished(operator, name), seconds=30)
    assert operator.exits[-1] == -signal.SIGKILL
    operator.kubectl("-n", operator.namespace, "delete", "vlm", name, "--wait=false")


def test_a_process_killed_while_it_writes_is_made_up_for(operator: Supervised, proxy: ProxyThread):
    kill(operator, proxy, after=9)


@pytest.mark.full
@pytest.mark.parametrize("after", range(1, 22))
def test_a_process_killed_at_any_moment_is_made_up_for(
    operator: Supervised, proxy: ProxyThread, after: int
):
    kill(operator, proxy, after=after)


def hand_over(
    operator: Supervised, proxy: ProxyThread, control_plane: ControlPlane, folder: pathlib.Path
) -> None:
    """Stop the leader past its lease, let another lead, wake it: it ends without a write."""
    name = f"h-{uuid.uuid4().hex[:6]}"
    apply(operator, name)
    operator.until(lambda: finished(operator, name), seconds=5)
    install(control_plane, folder)  # past the proxy, which so tells them apart
    other = Live(
        control_plane, folder, f"--namespace={operator.namespace}", "--identity=other",
        f"--lease-seconds={LEASE_SECONDS}",
    )  # fmt: skip
    os.kill(operator.pid, signal.SIGSTOP)
    try:
        state = pathlib.Path(f"/proc/{operator.pid}/stat").read_text().rpartition(")")[2].split()
        assert state[0] == "T"
        other.start()
        apply(operator, name, decode=2)
        other.until(lambda: decode_replicas(operator, name) == [2], seconds=5)
        before = writes_seen(proxy)
    finally:
        os.kill(operator.pid, signal.SIGCONT)
    with ends(operator, expected=True):
        Live.until(operator, lambda: not operator.running, seconds=10)
        assert writes_seen(proxy) == before
        assert other.stop() == 0
        operator.until(lambda: operator.running, seconds=30)


def test_a_leader_that_stood_still_past_its_lease_wakes_and_writes_nothing(
    operator: Supervised, proxy: ProxyThread, control_plane: ControlPlane, tmp_path: pathlib.Path
):
    hand_over(operator, proxy, control_plane, tmp_path)


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_twenty_leaders_that_stood_still_write_nothing(
    operator: Supervised, proxy: ProxyThread, control_plane: ControlPlane, tmp_path: pathlib.Path
):
    for number in range(20):
        folder = tmp_path / str(number)
        folder.mkdir()
        hand_over(operator, proxy, control_plane, folder)
