"""Streams on real nodes continue if one of two decode pods ends, or the node of both is drained."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from clients import Answer, Clients, stream
from nodes.cluster import Node, RealNodes
from served import Served, elapsed, example, stats_of

from vlm_local.client import Object
from vlm_local.controlplane import ControlPlane
from vlm_local.waiting import until
from vlm_operator.names import Role

pytestmark = [pytest.mark.nodes, pytest.mark.timeout(900)]
NAMESPACE = "faults"
LONG, SHORT = 1200, 8  # tokens: a long answer outlasts what happens to it
STREAMS = 4
BEGUN = 20  # tokens of each stream before something happens
SPARE = Node(4, "gpu-memory", gpus=2)


@pytest.fixture
async def served(endless_cluster: ControlPlane) -> AsyncIterator[Served]:
    """The quickstart with answers that last, two gateways, and two decode pods on one node."""
    async with endless_cluster.client() as api:
        one = Served(endless_cluster, api, NAMESPACE, "shapes")
        await one.apply(_manifest())
        await one.ready()
        for role in (Role.DECODE, Role.GATEWAY):
            await one.num_ready(role, 2)
        yield one


@pytest.fixture
async def undisturbed(served: Served) -> list[str]:
    """The tokens of a long answer while nothing happens."""
    answer = Answer(LONG, time.monotonic())
    await stream(served, answer)
    assert answer.fault(answer.tokens) == ""
    print(f"undisturbed, {LONG} tokens take {elapsed(answer.began)}")
    return answer.tokens


@pytest.fixture
def spare(real_nodes: tuple[ControlPlane, RealNodes], served: Served) -> None:
    """A second node for decode pods, once both are on the first; it stays, and pods with it."""
    _, nodes = real_nodes
    nodes.start(SPARE)
    nodes.ready(SPARE)


def _manifest() -> Object:
    manifest = example("quickstart")
    manifest["spec"]["model"]["maxModelLen"] = 2048
    gateway = manifest["spec"]["gateway"]
    gateway["replicas"] = 2  # a drained node may have one
    # gateways prefer the node without GPUs: both of them leave a CPU of it to the encoder
    gateway["resources"]["requests"]["cpu"] = "250m"
    decode = manifest["spec"]["pools"]["decode"]
    decode["scaling"]["replicas"] = 2
    for amounts in decode["variants"][0]["resources"].values():
        amounts["cpu"] = "500m"
    return manifest


async def _crash(served: Served, nodes: RealNodes, pod: Object) -> None:
    """SIGKILL to the first process of its container."""
    [container] = pod["status"]["containerStatuses"]
    identity = container["containerID"].removeprefix("containerd://")
    node = Node(int(pod["spec"]["nodeName"].removeprefix("n")), "")
    kill = ("tasks", "kill", "--signal", "SIGKILL", identity)
    await asyncio.to_thread(nodes.ctr, node, *kill)


async def _delete(served: Served, nodes: RealNodes, pod: Object) -> None:
    """The pod at once, as `kubectl delete --force` does."""
    name = pod["metadata"]["name"]
    await served.kubectl("delete", "pod", name, "--force", "--grace-period=0")


@pytest.mark.parametrize("happens", [_crash, _delete])
async def test_all_tokens_arrive_if_a_decode_pod_dies(
    served: Served,
    undisturbed: list[str],
    real_nodes: tuple[ControlPlane, RealNodes],
    happens: Callable[[Served, RealNodes, Object], Awaitable[None]],
):
    pod, _ = await served.pods(Role.DECODE)
    answers = [Answer(LONG, time.monotonic()) for _ in range(STREAMS)]
    streams = asyncio.gather(*(stream(served, answer) for answer in answers))

    async def begun() -> bool:
        return all(len(answer.tokens) >= BEGUN or answer.ended for answer in answers)

    await until(begun, seconds=120, awaited="all streams to have begun")
    assert (await stats_of(pod))["inflight"], "the pod was to have a stream"
    told = time.monotonic()
    await happens(served, real_nodes[1], pod)
    assert all(answer.spans(told, time.monotonic()) for answer in answers), "streams were to last"
    await streams
    print(f"{STREAMS} streams ended {elapsed(told)} after the decode pod died")
    assert [fault for one in answers if (fault := one.fault(undisturbed))] == []


async def test_a_drained_node_loses_its_decode_pods_one_by_one_and_no_answer_fails(
    served: Served, undisturbed: list[str], spare: None
):
    [drained] = {pod["spec"]["nodeName"] for pod in await served.pods(Role.DECODE)}
    clients = Clients(served, long=LONG, short=SHORT)
    drain = ("drain", drained, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=300s")
    try:
        async with clients.asking(num_long=2):
            await until(lambda: _asked(clients), seconds=120, awaited="long answers to have begun")
            began = time.monotonic()
            said = await served.kubectl(*drain)
            print(f"{drained} was drained in {elapsed(began)}:\n{said}")
        assert "would violate the pod's disruption budget" in said
        faults = [fault for one in clients.answers if (fault := one.fault(undisturbed))]
        print(f"{len(clients.answers)} answers, {len(faults)} at fault")
        assert faults == []
        now = await served.num_ready(Role.DECODE, 2)
        assert drained not in {pod["spec"]["nodeName"] for pod in now}
    finally:
        await served.kubectl("uncordon", drained)


async def _asked(clients: Clients) -> bool:
    return clients.fresh and len(clients.answers) > 2
