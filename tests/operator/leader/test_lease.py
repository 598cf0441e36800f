"""One leader at a time, by clocks that are never compared."""

import asyncio
import threading
import time

import pytest

from support.fakes import FakeCluster
from vlm_operator import names
from vlm_operator.cluster import LEASE, SERVICE
from vlm_operator.errors import LeaseLostError, UnavailableError
from vlm_operator.leader import BackgroundLoop, Fenced, Lease, Timing
from vlm_operator.settings import Settings

FAST = Timing(duration=15.0, renew_deadline=10.0, retry=0.001)


class Watch:
    """A monotonic clock of one process, moved by hand."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def lease(cluster: FakeCluster, identity: str, clock: Watch) -> Lease:
    return Lease(cluster, namespace="ns", name="lock", identity=identity, clock=clock, timing=FAST)


def holder(cluster: FakeCluster) -> str:
    return str(cluster.all(LEASE)[0]["spec"]["holderIdentity"])


async def test_the_first_process_leads_and_the_second_waits():
    cluster, clock = FakeCluster(), Watch()
    one, two = lease(cluster, "one", clock), lease(cluster, "two", clock)
    await one.acquire()
    assert (one.time_left, one.epoch) == (15.0, 0)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(two.acquire(), 0.1)
    assert two.time_left == 0
    with pytest.raises(LeaseLostError):
        two.check()


async def test_a_dead_leader_is_followed_after_its_whole_duration_and_the_epoch_grows():
    cluster, ours, theirs = FakeCluster(), Watch(), Watch(5000.0)
    one, two = lease(cluster, "one", ours), lease(cluster, "two", theirs)
    await one.acquire()
    waiting = asyncio.create_task(two.acquire())
    await asyncio.sleep(0.02)
    theirs.now += 14.9
    await asyncio.sleep(0.02)
    assert not waiting.done()
    theirs.now += 0.2
    await asyncio.wait_for(waiting, 60)
    assert (holder(cluster), two.epoch) == ("two", 1)


async def test_a_leader_that_renews_is_never_followed():
    cluster, ours, theirs = FakeCluster(), Watch(), Watch()
    one, two = lease(cluster, "one", ours), lease(cluster, "two", theirs)
    await one.acquire()
    waiting = asyncio.create_task(two.acquire())
    keeping = asyncio.create_task(one.renew_loop())
    for _ in range(10):
        theirs.now += 9
        ours.now += 9
        await asyncio.sleep(0.02)
    assert not waiting.done()
    assert not keeping.done()
    for task in (waiting, keeping):
        task.cancel()


async def test_a_write_starts_only_with_more_time_left_than_it_may_take():
    cluster, clock = FakeCluster(), Watch()
    one = lease(cluster, "one", clock)
    fenced = Fenced(cluster, one)
    manifest = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "s", "namespace": "ns"}}
    with pytest.raises(LeaseLostError):
        await fenced.apply(manifest, manager="m")
    await one.acquire()
    await fenced.apply(manifest, manager="m")
    clock.now = 9.9
    await fenced.apply(manifest, manager="m")
    clock.now = 10.1
    before = list(cluster.writes)
    for write in (
        fenced.apply(manifest, manager="m"),
        fenced.merge(manifest, manager="m"),
        fenced.create(manifest),
        fenced.replace(manifest),
        fenced.delete(SERVICE, "ns", "s", uid=None),
    ):
        with pytest.raises(LeaseLostError):
            await write
    assert cluster.writes == before
    assert len(await fenced.list(SERVICE)) == 1  # reading is free


class Cut(FakeCluster):
    """A cluster that cannot be reached for a while."""

    down = False

    async def get(self, *arguments):
        if self.down:
            raise UnavailableError(0, "Unreachable", "no route")
        return await super().get(*arguments)


async def test_an_api_server_that_is_away_for_a_minute_stops_the_writing_and_not_the_process():
    cluster, clock = Cut(), Watch()
    one = lease(cluster, "one", clock)
    fenced = Fenced(cluster, one)
    await one.acquire()
    heard: list[bool] = []
    keeping = asyncio.create_task(one.renew_loop(heard.append))
    cluster.down = True
    clock.now = 9.0
    await asyncio.sleep(0.02)
    assert heard == []
    for clock.now in (10.1, 30.0, 60.0):
        await asyncio.sleep(0.02)
        assert heard == [False]
        with pytest.raises(LeaseLostError):
            await fenced.delete(SERVICE, "ns", "s", uid=None)
    cluster.down = False
    async with asyncio.timeout(60):
        while heard != [False, True]:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
    await fenced.delete(SERVICE, "ns", "s", uid=None)
    assert (one.epoch, keeping.done()) == (0, False)
    keeping.cancel()


@pytest.mark.parametrize("released", [False, True])
async def test_whoever_was_cut_off_while_another_led_ends_although_the_lease_is_free_again(
    released: bool,
):
    cluster, ours, theirs = Cut(), Watch(), Watch(5000.0)
    uncut = FakeCluster()
    uncut._objects = cluster._objects  # the same API server, reached another way
    one, two = lease(cluster, "one", ours), lease(uncut, "two", theirs)
    await one.acquire()
    heard: list[bool] = []
    keeping = asyncio.create_task(one.renew_loop(heard.append))
    waiting = asyncio.create_task(two.acquire())
    await asyncio.sleep(0.02)
    cluster.down = True
    await asyncio.sleep(0.02)
    ours.now += 60
    theirs.now += 60
    await asyncio.wait_for(waiting, 60)
    if released:
        await two.release()
    cluster.down = False
    with pytest.raises(LeaseLostError, match="no process holds" if released else "two holds"):
        await asyncio.wait_for(keeping, 60)
    assert heard in ([], [False])
    assert one.time_left == 0


async def test_a_renewal_waits_for_nothing_that_runs_on_the_event_loop_of_turns():
    cluster = FakeCluster()
    renewed = threading.Event()
    with BackgroundLoop() as background:
        one = Lease(
            cluster, namespace="ns", name="lock", identity="one", clock=time.monotonic, timing=FAST
        )
        await background.do(one.acquire())
        keeping = asyncio.create_task(background.do(one.renew_loop()))
        await asyncio.sleep(0.01)
        before = len(cluster.writes)

        def see() -> None:
            while len(cluster.writes) < before + 3:
                time.sleep(0.001)  # noqa: TID251
            renewed.set()

        threading.Thread(target=see, daemon=True).start()
        assert renewed.wait(timeout=60)  # which holds this event loop up
        keeping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await keeping


async def test_a_lease_that_was_taken_is_given_up_at_once():
    cluster, clock = FakeCluster(), Watch()
    one = lease(cluster, "one", clock)
    await one.acquire()
    cluster.edit(LEASE, "ns", "lock", lambda item: item["spec"].update(holderIdentity="two"))
    with pytest.raises(LeaseLostError, match="two holds"):
        await asyncio.wait_for(one.renew_loop(), 1)
    assert one.time_left == 0


async def test_a_released_lease_is_taken_at_once():
    cluster, clock = FakeCluster(), Watch()
    one, two = lease(cluster, "one", clock), lease(cluster, "two", clock)
    await one.acquire()
    await one.release()
    await asyncio.wait_for(two.acquire(), 1)
    assert holder(cluster) == "two"


def test_settings_default_to_the_names_of_the_chart():
    found = Settings()
    assert found.lease_namespace == names.OPERATOR_NAMESPACE
    assert found.lease_name == names.OPERATOR_LEASE


@pytest.mark.parametrize("ip", ["127.0.3.1", "10.0.0.4", "fd00::4"])
def test_workers_of_every_cluster_are_told_the_same_address_to_bind(ip: str):
    assert Settings.read([], {"POD_IP": ip}).worker_bind == "::"


def test_a_port_of_the_clusters_is_a_number_and_replaces_the_default(
    capsys: pytest.CaptureFixture[str],
):
    found = Settings.read(["--api-server-port=8443", "--dns-port=53", "--dns-port=5353"], {})
    assert (found.api_server_ports, found.dns_ports) == ((8443,), (53, 5353))
    assert Settings.read([], {}).api_server_ports == (443, 6443)
    with pytest.raises(SystemExit):
        Settings.read(["--api-server-port=https"], {})
    assert "https is not a port: give a number from 1 to 65535" in capsys.readouterr().err


def test_a_lease_that_leaves_no_time_for_a_write_is_refused(capsys):
    with pytest.raises(SystemExit):
        Settings.read(["--lease-seconds=5"], {})
    assert "5 is too short: at least 6, since a write may take 5" in capsys.readouterr().err
    assert Settings.read(["--lease-seconds=6"], {}).lease_seconds == 6


class Slow(FakeCluster):
    """A cluster that answers when told to, and counts who waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.answer = asyncio.Event()
        self.under_way = self.most = 0

    async def list(self, *arguments):
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await self.answer.wait()
        self.under_way -= 1
        return await super().list(*arguments)


async def test_a_hundred_loops_that_wake_together_queue_up_and_the_fence_is_asked_after_the_wait():
    cluster, clock = Slow(), Watch()
    one = lease(cluster, "one", clock)
    await one.acquire()
    fenced = Fenced(cluster, one, at_once=8)
    reading = [asyncio.create_task(fenced.list(SERVICE)) for _ in range(100)]
    manifest = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "s", "namespace": "ns"}}
    writing = asyncio.create_task(fenced.apply(manifest, manager="m"))
    await asyncio.sleep(0.01)
    assert cluster.under_way == 8
    clock.now = 10.1  # the write waited until the lease was too short for it
    cluster.answer.set()
    await asyncio.gather(*reading)
    assert cluster.most == 8
    with pytest.raises(LeaseLostError):
        await writing
    assert cluster.all(SERVICE) == []
