"""Pods replaced and taken away under answers that outlast their drains: none fails, none is cut."""

import copy
import time
from collections.abc import AsyncIterator, Collection

import pytest
from clients import Answer, Clients, stream
from ends import End, watched
from served import (
    START_SECONDS,
    Served,
    elapsed,
    example,
    hold,
    is_ready,
    names_of,
    num_restarts,
    stats_of,
)

from vlm_local.client import Object
from vlm_local.controlplane import ControlPlane
from vlm_local.waiting import until
from vlm_operator import names
from vlm_operator.names import POOL_ROLES, Role

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
NAMESPACE = "rolling"
DRAIN_SECONDS = 3
LONG = 800  # tokens: far more than the seconds of a drain, on a throttled decode pod
SHORT = 8
NUM_LONG = 2
HELD_MILLISECONDS = 200  # how long encoder and prefill keep a request, so that a change meets it
OPERATOR = f"/apis/apps/v1/namespaces/{names.OPERATOR_NAMESPACE}/deployments/triptych-operator"
NEW_IMAGE = "triptych/worker:9.9.9"


@pytest.fixture
async def served(endless_cluster: ControlPlane) -> AsyncIterator[Served]:
    """The quickstart with pods that are given little time to drain, Ready."""
    async with endless_cluster.client() as api:
        one = Served(endless_cluster, api, NAMESPACE, "shapes")
        await one.apply(_manifest())
        await one.ready()
        await one.num_ready(Role.GATEWAY, 1)
        yield one


@pytest.fixture(scope="module")
def tokens() -> list[str]:
    """Those of a long answer, once somebody has asked for one."""
    return []


@pytest.fixture
async def undisturbed(served: Served, tokens: list[str]) -> list[str]:
    """The tokens of a long answer while nothing happens."""
    if not tokens:
        answer = Answer(LONG, time.monotonic())
        await stream(served, answer)
        assert answer.fault(answer.tokens) == ""
        print(f"undisturbed, {LONG} tokens take {elapsed(answer.began)}")
        tokens += answer.tokens
    return tokens


def _manifest() -> Object:
    """A slow decode pod makes long answers; encoder and prefill keep each request for a while."""
    manifest = example("quickstart")
    manifest["spec"]["model"]["maxModelLen"] = 2048
    pools = manifest["spec"]["pools"]
    for pool in pools.values():
        pool["drain"] = {"timeoutSeconds": DRAIN_SECONDS}
    hold(pools, milliseconds=HELD_MILLISECONDS)
    pools["decode"]["engine"] = {}
    for amounts in pools["decode"]["variants"][0]["resources"].values():
        amounts["cpu"] = "250m"
    return manifest


@pytest.mark.parametrize(
    ("rounds", "together"),
    [
        pytest.param(1, True, id="all-pools-together"),
        pytest.param(3, False, id="3-of-each", marks=[pytest.mark.full, pytest.mark.timeout(1800)]),
        pytest.param(
            20, False, id="20-of-each", marks=[pytest.mark.full, pytest.mark.timeout(7200)]
        ),
    ],
)
async def test_pods_are_taken_away_and_replaced_and_no_answer_notices(
    served: Served, undisturbed: list[str], rounds: int, together: bool
):
    batches = [POOL_ROLES] if together else [(role,) for role in POOL_ROLES]
    manifest = _manifest()
    clients = Clients(served, long=LONG, short=SHORT)
    async with clients.asking(num_long=NUM_LONG), watched(served) as ends:
        for number in range(rounds):
            await _grow(served, manifest)
            for roles in batches:
                await _shrink(served, manifest, roles, ends, clients)
            for roles in batches:
                await _update(served, manifest, roles, ends, number=number)
    _all_are_whole(clients, undisturbed)


async def test_a_gateway_is_replaced_and_no_request_is_refused_or_cut(
    served: Served, undisturbed: list[str]
):
    manifest = _manifest()
    manifest["spec"]["gateway"]["resources"]["requests"]["cpu"] = "450m"
    [old] = names_of(await served.pods(Role.GATEWAY))
    clients = Clients(served, long=LONG, short=SHORT)
    async with clients.asking(num_long=NUM_LONG), watched(served) as ends:
        await _fresh(clients)
        began = time.monotonic()
        await served.apply(manifest)
        await _replaced(served, Role.GATEWAY, {old})
        print(f"the gateway was replaced {elapsed(began)} after kubectl apply")
    _all_are_whole(clients, undisturbed)
    told = ends[old].deleted
    assert told is not None
    held = [one for one in clients.answers if one.asked == LONG and one.spans(told, told + 2)]
    assert held, "a stream was to be in the midst when the gateway was told to end"


async def test_an_upgraded_operator_restarts_no_pod(served: Served):
    before = {pod["metadata"]["uid"]: num_restarts(pod) for pod in await served.pods()}
    original = (await served.api.get(OPERATOR))["spec"]["template"]["spec"]["containers"][0]
    upgraded = copy.deepcopy(original)
    [old] = [item for item in upgraded["args"] if item.startswith("--worker-image=")]
    upgraded["args"][upgraded["args"].index(old)] = f"--worker-image={NEW_IMAGE}"
    began = time.monotonic()
    try:
        await _operate(served, upgraded)
        manifest = _manifest()
        manifest["spec"]["gateway"]["replicas"] = 2
        await served.apply(manifest)  # the new operator's work, which shows that it has seen all
        await served.num_ready(Role.GATEWAY, 2)
        print(f"the upgraded operator has made a gateway {elapsed(began)} after its upgrade")
        pods = await served.pods(leaving=True)
        after = {pod["metadata"]["uid"]: num_restarts(pod) for pod in pods}
        assert {uid: after.get(uid) for uid in before} == before
        assert NEW_IMAGE not in {pod["spec"]["containers"][0]["image"] for pod in pods}
    finally:
        await _operate(served, original)


async def _operate(served: Served, container: Object) -> None:
    """Replace the operator's only container; return when the old operator is gone."""
    patch = {"spec": {"template": {"spec": {"containers": [container]}}}}
    await served.api.patch(OPERATOR, patch)

    async def alone() -> bool:
        listed = await served.api.get(f"/api/v1/namespaces/{names.OPERATOR_NAMESPACE}/pods")
        found = [(is_ready(pod), pod["spec"]["containers"][0]["args"]) for pod in listed["items"]]
        return found == [(True, container["args"])]

    await until(alone, seconds=START_SECONDS, awaited="the new operator alone to run", every=0.2)


async def _fresh(clients: Clients) -> None:
    async def fresh() -> bool:
        return clients.fresh

    await until(fresh, seconds=120, awaited="long answers to have begun")


async def _grow(served: Served, manifest: Object) -> None:
    """Two pods of each role."""
    for role in POOL_ROLES:
        manifest["spec"]["pools"][role]["scaling"]["replicas"] = 2
    began = time.monotonic()
    await served.apply(manifest)
    for role in POOL_ROLES:
        await served.num_ready(role, 2)
    print(f"all pools have two pods {elapsed(began)} after kubectl apply")


async def _shrink(
    served: Served,
    manifest: Object,
    roles: Collection[Role],
    ends: dict[str, End],
    clients: Clients,
) -> None:
    """One pod fewer of each role, while each decode pod has just begun a long answer."""

    async def both() -> bool:
        stats = [await stats_of(pod) for pod in await served.pods(Role.DECODE)]
        return clients.fresh and all(one["kv"]["running_tokens"] for one in stats)

    before = {role: names_of(await served.pods(role)) for role in roles}
    for role in roles:
        manifest["spec"]["pools"][role]["scaling"]["replicas"] = 1
    async with clients.long_alone:
        if Role.DECODE in roles:
            await until(both, seconds=120, awaited="each decode pod to have a long answer")
        began = time.monotonic()
        await served.apply(manifest)
    for role in roles:
        [left] = await served.num_ready(role, 1)
        [gone] = before[role] - names_of([left])
        seconds = ends[gone].drained_seconds
        print(f"{role} shrunk {elapsed(began)} after kubectl apply, drained for {seconds:.1f} s")
        # Kubernetes keeps the time of the gate in whole seconds
        assert role is not Role.DECODE or seconds > DRAIN_SECONDS - 1, "the answer was to outlast"


async def _update(
    served: Served,
    manifest: Object,
    roles: Collection[Role],
    ends: dict[str, End],
    *,
    number: int,
) -> None:
    """Another revision of each role: a pod beside the old one, which then drains."""
    before = {role: names_of(await served.pods(role)) for role in roles}
    for role in roles:
        env = [{"name": "ROUND", "value": f"{number}"}]
        manifest["spec"]["pools"][role]["engine"]["env"] = env
    began = time.monotonic()
    await served.apply(manifest)
    for role in roles:
        await _replaced(served, role, before[role])
        [gone] = before[role]
        seconds = ends[gone].drained_seconds
        print(f"{role} replaced {elapsed(began)} after kubectl apply, drained for {seconds:.1f} s")


async def _replaced(served: Served, role: Role, old: Collection[str]) -> None:
    """Wait until the old pods are gone and one other is ready."""

    async def other() -> bool:
        pods = await served.pods(role, leaving=True)
        return len(pods) == 1 and is_ready(pods[0]) and names_of(pods).isdisjoint(old)

    await until(other, seconds=START_SECONDS, awaited=f"the {role} to be another", every=0.1)


def _all_are_whole(clients: Clients, undisturbed: list[str]) -> None:
    """No answer failed, was cut, or has another token anywhere."""
    faults = [fault for one in clients.answers if (fault := one.fault(undisturbed))]
    faults += [
        f"{len(one.tokens)} of {len(undisturbed)} tokens with text"
        for one in clients.answers
        if one.asked == LONG and len(one.tokens) != len(undisturbed)
    ]
    seconds = [one.ended - one.began for one in clients.answers if one.asked == LONG and one.ended]
    print(
        f"{len(clients.answers)} answers, {len(seconds)} of them long: "
        f"{min(seconds):.1f} to {max(seconds):.1f} s each; {len(faults)} at fault"
    )
    assert faults == []
    assert max(seconds) > 2 * DRAIN_SECONDS, "answers were to be longer than drains"


@pytest.mark.full
async def test_a_service_gets_certificates_and_no_request_is_refused_or_cut(
    served: Served, undisturbed: list[str]
):
    """Pods with plaintext and pods with mutual TLS never talk to each other: all are replaced."""
    manifest = _manifest()
    manifest["spec"]["identity"] = {"mode": "OperatorCA"}
    old = {role: set(names_of(await served.pods(role))) for role in (*POOL_ROLES, Role.GATEWAY)}
    clients = Clients(served, long=LONG, short=SHORT)
    async with clients.asking(num_long=NUM_LONG):
        await _fresh(clients)
        began = time.monotonic()
        await served.apply(manifest)
        for role, pods in old.items():
            await _replaced(served, role, pods)
        print(f"every pod had a certificate {elapsed(began)} after kubectl apply")
        await _fresh(clients)
    _all_are_whole(clients, undisturbed)
    conditions = {item["type"]: item for item in (await served.service())["status"]["conditions"]}
    assert conditions["CertificatesReady"]["status"] == "True"
    for role in POOL_ROLES:
        for pod in await served.pods(role):
            [container] = pod["spec"]["containers"]
            assert "--identity-dir=/var/run/triptych/identity" in container["args"]
