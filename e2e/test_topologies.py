"""Each topology answers the same, and however deleted ends clean, its last answer whole."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import openai
import pytest
from served import ANSWER, Served, elapsed, example, place

from vlm_local.client import Object
from vlm_local.controlplane import ControlPlane
from vlm_local.waiting import until
from vlm_operator import names
from vlm_operator.names import Role

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
LONG = 800  # tokens: seconds of decoding, which a deletion has to wait for
HALFWAY = 200  # pieces, each of a token or a few, of such an answer
DRAIN_SECONDS = 20
# Kubernetes deletes a namespace's pods first, and where it finds them still there it looks again
# after half of their grace: half of the drain and of the 30 s that follow it.
GONE_SECONDS = (DRAIN_SECONDS + 30) / 2 + 30
CHILDREN = (
    "deployments.apps,replicasets.apps,pods,services,configmaps,serviceaccounts,"
    "networkpolicies.networking.k8s.io,poddisruptionbudgets.policy,"
    "rolebindings.rbac.authorization.k8s.io,vlmpools.triptych.dev"
)
TOPOLOGIES = {
    "colocated": ("Decode", {Role.DECODE}),
    "prefill-decode": ("PrefillDecode", {Role.PREFILL, Role.DECODE}),
    "encoder-decode": ("EncoderDecode", {Role.ENCODER, Role.DECODE}),
}


@pytest.mark.parametrize(
    ("topology", "deletion"),
    [
        ("colocated", "namespace"),
        ("prefill-decode", "foreground"),
        pytest.param("encoder-decode", "background", marks=pytest.mark.full),
    ],
)
async def test_a_topology_answers_and_ends_clean_with_an_answer_in_flight(
    operator: ControlPlane,
    endless: Path,
    processes_of: Callable[[Path], list[str]],
    topology: str,
    deletion: str,
):
    with place(operator, topology, endless):
        async with operator.client() as api:
            served = Served(operator, api, topology, topology)
            began = time.monotonic()
            await served.apply(_soon_drained(example(topology)))
            service = await served.ready()
            print(f"{topology} Ready after {elapsed(began)}")
            shape, roles = TOPOLOGIES[topology]
            assert service["status"]["topology"] == shape
            pods = await served.pods()
            assert {pod["metadata"]["labels"][names.LABEL_ROLE] for pod in pods} == {
                *roles,
                Role.GATEWAY,
            }
            expected = await served.stream(max_tokens=LONG)
            assert expected.startswith(ANSWER)
            await _delete_with_an_answer_in_flight(served, deletion, expected)
            await _nothing_is_left(served)
    uids = [pod["metadata"]["uid"] for pod in pods]
    lines = processes_of(operator.folder / "pods")
    assert [line for line in lines if any(uid in line for uid in uids)] == []


def _soon_drained(manifest: Object) -> Object:
    """The same service with a short grace for its pods."""
    spec = manifest["spec"]
    for part in (*spec["pools"].values(), spec.setdefault("gateway", {})):
        part["drain"] = {"timeoutSeconds": DRAIN_SECONDS}
    return manifest


async def _delete_with_an_answer_in_flight(served: Served, deletion: str, expected: str) -> None:
    """Two clients ask by turns until the gateway gets SIGTERM: one request is then in flight."""
    command = {
        "namespace": ("namespace", served.namespace, "--wait=false"),
        "foreground": ("vlm", served.name, "--cascade=foreground"),
        "background": ("vlm", served.name, "--cascade=background"),
    }[deletion]
    gateway = await served.pod(Role.GATEWAY)
    began = time.monotonic()
    deleting = asyncio.create_task(served.kubectl("delete", *command, "--timeout=90s"))
    leaving = asyncio.create_task(
        until(lambda: _is_leaving(served), seconds=30, awaited="the gateway to be told to end")
    )
    turn = asyncio.Event()
    num_after = await asyncio.gather(
        _ask_until(leaving, served, gateway, expected, halfway=turn.set),
        _ask_until(leaving, served, gateway, expected, after=turn),
    )
    print(f"{deletion}: answered after {elapsed(began)}, ", end="")
    await deleting
    print(
        f"kubectl returned after {elapsed(began)}; pieces after the gateway's end began: ", end=""
    )
    print(num_after)
    assert max(num_after) > 1


async def _ask_until(
    leaving: asyncio.Task[bool],
    served: Served,
    gateway: Object,
    expected: str,
    *,
    halfway: Callable[[], None] = lambda: None,
    after: asyncio.Event | None = None,
) -> int:
    """Number of pieces after `leaving`; each answer that begins is whole."""
    num_after = num_pieces = 0
    if after is not None:
        await after.wait()

    async def told(count: int) -> None:
        nonlocal num_after, num_pieces
        num_pieces = count
        num_after += leaving.done()
        if count == HALFWAY:
            halfway()

    while not leaving.done():
        num_pieces = 0
        try:
            assert await served.stream(max_tokens=LONG, pod=gateway, told=told) == expected
        except openai.APIError:
            await leaving  # nobody is refused before
            assert num_pieces == 0, "a gateway that ends refuses; it cuts nobody off"
    return num_after


async def _is_leaving(served: Served) -> bool:
    """Whether the gateway of the service is being deleted."""
    gateways = await served.pods(Role.GATEWAY, leaving=True)
    return all("deletionTimestamp" in pod["metadata"] for pod in gateways)  # or is gone


async def _nothing_is_left(served: Served) -> None:
    labels = f"--selector={names.LABEL_SERVICE}={served.name}"

    async def left() -> list[str]:
        children = await served.kubectl("get", CHILDREN, labels, "-o", "name")
        service = await served.kubectl("get", "vlm", "-o", "name")
        return [line for line in (children + service).splitlines() if "/" in line]

    async def none() -> bool:
        return not await left()

    began = time.monotonic()
    try:
        await until(none, seconds=GONE_SECONDS, awaited="the service and its children to go")
    except TimeoutError as error:
        raise AssertionError(f"{error}: {await left()}") from error
    print(f"nothing left {elapsed(began)} later")
