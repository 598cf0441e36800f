"""Operators are killed, stopped, or lose their Lease, with a real API server."""

from __future__ import annotations

import functools
import os
import pathlib
import signal
import time
import uuid
from collections.abc import Callable

import pytest

from support.fakes.faults import Refused, Rule
from support.live import Live, install, plain_children
from support.live_faults import (
    LEASE_SECONDS,
    ProxyThread,
    Supervised,
    apply,
    decode_replicas,
    ends,
    finished,
    is_write,
    writes_seen,
)
from support.operations import OPERATIONS, Operation
from vlm_local.controlplane import ControlPlane
from vlm_operator.cluster import Manifest

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("healed")]


def test_a_lease_that_cannot_be_renewed_ends_the_writing_until_it_can(
    operator: Supervised, proxy: ProxyThread
):
    apply(operator, "unled")
    operator.until(lambda: finished(operator, "unled"), seconds=5)
    lapses = operator.lapses()
    rule = proxy.proxy.add(
        Rule(Refused(500, "InternalError"), verb="replace", plural="leases", times=None)
    )
    time.sleep(LEASE_SECONDS - 4.5)  # noqa: TID251  less than a write's five seconds are left
    assert rule.hits
    before = operator.writes()
    apply(operator, "unled", decode=3)
    with ends(operator, expected=False):
        operator.until(lambda: operator.lapses() > lapses, seconds=LEASE_SECONDS)
        assert operator.writes() == before
        rule.times = 0
        operator.until(lambda: decode_replicas(operator, "unled") == [3], seconds=5)


def ask(operator: Supervised, name: str, manifest: Manifest | None) -> None:
    """Apply a manifest under another name, or delete the service."""
    if manifest is None:
        operator.kubectl("-n", operator.namespace, "delete", "vlm", name, "--wait=false")
    else:
        meta = {"name": name, "namespace": operator.namespace}
        operator.apply({**manifest, "metadata": meta})


def begun(operator: Supervised, proxy: ProxyThread, operation: Operation) -> str:
    """The name of a service that is at rest where the operation begins."""
    name = f"k-{uuid.uuid4().hex[:6]}"
    if operation.before is not None:
        ask(operator, name, operation.before)
        operator.until(lambda: finished(operator, name), seconds=10)
    rest(operator, proxy)
    return name


def rest(operator: Supervised, proxy: ProxyThread) -> None:
    """Wait until a second passes without a write."""
    while True:
        before = writes_seen(proxy)
        time.sleep(1.0)  # noqa: TID251  no event shows that there is no event
        if writes_seen(proxy) == before:
            return


def children(operator: Supervised, name: str) -> str:
    return plain_children(operator.plane, operator.namespace, name)


@pytest.fixture(scope="module")
def undisturbed(operator: Supervised, proxy: ProxyThread) -> Callable[[str], str]:
    """The children at the end of an operation without a kill, each found once."""

    @functools.cache
    def find(named: str) -> str:
        operation = OPERATIONS[named]
        if operation.after is None:
            return "[]"
        name = begun(operator, proxy, operation)
        ask(operator, name, operation.after)
        operator.until(lambda: finished(operator, name), seconds=10)
        rest(operator, proxy)
        found = children(operator, name)
        ask(operator, name, None)
        return found

    return find


def kill(operator: Supervised, proxy: ProxyThread, named: str, *, after: int, wanted: str) -> None:
    """Kill the process after some writes of an operation, and let the next process finish it."""
    operation = OPERATIONS[named]
    name = begun(operator, proxy, operation)
    before = writes_seen(proxy)
    ask(operator, name, operation.after)
    Live.until(operator, lambda: writes_seen(proxy) >= before + after, seconds=5)
    operator.kill()
    # garbage collection discovers a new kind within half a minute
    operator.until(lambda: children(operator, name) == wanted, seconds=30)
    assert operator.exits[-1] == -signal.SIGKILL
    if operation.after is not None:
        operator.until(lambda: finished(operator, name), seconds=30)
        ask(operator, name, None)


def test_a_process_killed_while_it_writes_is_made_up_for(
    operator: Supervised, proxy: ProxyThread, undisturbed: Callable[[str], str]
):
    kill(operator, proxy, "create", after=9, wanted=undisturbed("create"))


KILLS = {"create": 21, "scale": 6, "rollout": 8, "topology": 6, "delete": 2}


@pytest.mark.full
@pytest.mark.parametrize(
    ("named", "after"),
    [(named, after) for named, most in KILLS.items() for after in range(1, most + 1)],
)
def test_a_process_killed_at_any_moment_of_an_operation_is_made_up_for(
    operator: Supervised,
    proxy: ProxyThread,
    undisturbed: Callable[[str], str],
    named: str,
    after: int,
):
    kill(operator, proxy, named, after=after, wanted=undisturbed(named))


def successor(
    operator: Supervised, control_plane: ControlPlane, folder: pathlib.Path, name: str
) -> Live:
    """Another operator, with a service at rest before it starts."""
    apply(operator, name)
    operator.until(lambda: finished(operator, name), seconds=5)
    install(control_plane, folder)  # without the proxy: it has only the operator's writes
    return Live(
        control_plane, folder, f"--namespace={operator.namespace}", "--identity=other",
        f"--lease-seconds={LEASE_SECONDS}",
    )  # fmt: skip


def stand_still(
    operator: Supervised, proxy: ProxyThread, control_plane: ControlPlane, folder: pathlib.Path
) -> None:
    """Stop the leader past its lease, let another lead, wake it: it ends without a write."""
    name = f"h-{uuid.uuid4().hex[:6]}"
    other = successor(operator, control_plane, folder, name)
    os.kill(operator.pid, signal.SIGSTOP)
    try:
        stat = pathlib.Path(f"/proc/{operator.pid}/stat")
        Live.until(
            operator, lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", seconds=1
        )
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


def step_down(
    operator: Supervised, proxy: ProxyThread, control_plane: ControlPlane, folder: pathlib.Path
) -> None:
    """Tell the leader to end while it has something to do: it gives the lease up last of all."""
    name = f"h-{uuid.uuid4().hex[:6]}"
    other = successor(operator, control_plane, folder, name)
    exits, begun = len(operator.exits), len(proxy.proxy.calls)
    apply(operator, name, decode=2)
    os.kill(operator.pid, signal.SIGTERM)
    other.start()
    other.until(lambda: decode_replicas(operator, name) == [2], seconds=5)
    Live.until(operator, lambda: not operator.running, seconds=5)
    calls = proxy.proxy.calls[begun:]
    renewals = [at for at, call in enumerate(calls) if is_write(call, of="leases")]
    assert renewals
    assert [call for call in calls[renewals[-1] :] if is_write(call)] == []
    assert other.stop() == 0
    operator.until(lambda: operator.running, seconds=30)
    assert operator.exits[exits:] == [0]


def test_a_leader_that_stood_still_past_its_lease_wakes_and_writes_nothing(
    operator: Supervised, proxy: ProxyThread, control_plane: ControlPlane, tmp_path: pathlib.Path
):
    stand_still(operator, proxy, control_plane, tmp_path)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_of_twenty_leaders_that_stood_still_or_were_told_to_end_none_writes_afterwards(
    operator: Supervised, proxy: ProxyThread, control_plane: ControlPlane, tmp_path: pathlib.Path
):
    for number in range(20):
        folder = tmp_path / str(number)
        folder.mkdir()
        lose = step_down if number % 2 else stand_still
        lose(operator, proxy, control_plane, folder)
