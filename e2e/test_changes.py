"""What a user changes while a service runs, what somebody breaks, and what is refused."""

import asyncio
import base64
import copy
import json
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest
from served import ANSWER, Served, body, condition, elapsed, example, names_of, place

from vlm_local.client import ApiError, Object
from vlm_local.controlplane import ControlPlane
from vlm_local.demo.line import MODEL
from vlm_local.waiting import until
from vlm_operator.names import Role

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
NAMESPACE = "changes"
REPAIR_SECONDS = 15.0  # promised: 5 s


@pytest.fixture(scope="module")
def cluster_with_model(operator: ControlPlane) -> Iterator[ControlPlane]:
    with place(operator, NAMESPACE, MODEL):
        yield operator


@pytest.fixture
async def served(cluster_with_model: ControlPlane) -> AsyncIterator[Served]:
    """The example `colocated`, Ready, as it is committed."""
    async with cluster_with_model.client() as api:
        one = Served(cluster_with_model, api, NAMESPACE, "colocated")
        await one.apply(example("colocated"))
        await one.ready()
        await one.num_ready(Role.GATEWAY, 1)
        yield one


async def test_a_second_gateway_joins_and_both_answer(served: Served):
    first = await served.pod(Role.GATEWAY)
    began = time.monotonic()
    await served.apply(_changed(gateway={"replicas": 2}))
    both = await served.num_ready(Role.GATEWAY, 2)
    print(f"two gateways ready after {elapsed(began)}")
    assert first["metadata"]["uid"] in {pod["metadata"]["uid"] for pod in both}
    answers = await asyncio.gather(*(served.ask(pod=pod) for pod in both))
    assert answers == [ANSWER, ANSWER]
    began = time.monotonic()
    await served.apply(example("colocated"))
    await served.num_ready(Role.GATEWAY, 1)
    print(f"one gateway again after {elapsed(began)}")


async def test_keys_of_a_secret_open_the_gateway_and_are_live(served: Served):
    await served.api.create(served.path("secrets"), _secret("first"))
    try:
        await served.apply(_changed(gateway={"auth": {"secretRef": {"name": "keys"}}}))
        await until(lambda: _is(served, "first", 200), seconds=60, awaited="the gateway with keys")
        await served.num_ready(Role.GATEWAY, 1)
        assert await _status(served, "wrong") == 401
        assert await _status(served, "second") == 401
        assert await served.ask(key="first") == ANSWER
        began = time.monotonic()
        await served.api.patch(served.path("secrets", "keys"), _secret("second"))
        await until(lambda: _is(served, "second", 200), seconds=60, awaited="the new key to open")
        print(f"a changed key opens after {elapsed(began)}")
        assert await _status(served, "first") == 401
        assert await served.ask(key="second") == ANSWER
    finally:
        await served.apply(example("colocated"))
        await served.ready()
        await served.num_ready(Role.GATEWAY, 1)
        await served.api.delete(served.path("secrets", "keys"))
    assert await served.ask() == ANSWER


async def test_visual_limits_apply_within_seconds_and_restart_nothing(served: Served):
    pods = {pod["metadata"]["uid"] for pod in await served.pods()}
    whole, answer = await _image_tokens(served)
    assert answer == ANSWER
    visual = {"policy": "Auto", "low": {"method": "Zip", "keepPercent": 25}}
    began = time.monotonic()
    await served.apply(_changed(model={"limits": {"visual": visual}}))

    async def is_reduced() -> bool:
        num_tokens, answer = await _image_tokens(served)
        assert answer == ANSWER
        return 4 * num_tokens == whole

    await until(is_reduced, seconds=30, awaited="a quarter of the visual tokens")
    print(f"{whole} visual tokens are {whole // 4} after {elapsed(began)}")
    assert (await _image_tokens(served, visual="high"))[0] == whole
    assert {pod["metadata"]["uid"] for pod in await served.pods()} == pods
    await served.apply(example("colocated"))
    await served.ready()


async def test_a_wrong_manifest_is_refused_with_its_path_and_the_fix(served: Served):
    before = await served.service()
    wrong = _changed()
    wrong["spec"]["pools"]["decode"]["scaling"] = {"mode": "Manual", "minReplicas": 1}
    said = await served.apply(wrong, check=False)
    print(said)
    assert "spec.pools.decode.scaling" in said
    assert "replicas" in said
    assert "configured" not in said
    assert (await served.service())["metadata"]["generation"] == before["metadata"]["generation"]


async def test_what_the_cluster_refuses_is_not_accepted_and_corrected_it_never_happened(
    served: Served,
):
    pods = {pod["metadata"]["uid"] for pod in await served.pods()}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"no": "such"}}
    wrong = _changed()
    placement = wrong["spec"]["pools"]["decode"]["variants"][0]["placement"]
    placement["affinity"] = {"nodeAffinity": required}
    await served.apply(wrong)

    async def refused() -> str:
        accepted = condition(await served.service(), "Accepted")
        return str(accepted["message"]) if accepted["status"] == "False" else ""

    message = await until(refused, seconds=10, awaited="Accepted to be False")
    print(message)
    assert message.startswith("spec.pools.decode.variants[memory]: ")
    assert await served.ask() == ANSWER
    await served.apply(example("colocated"))
    service = await served.ready(seconds=30)
    assert condition(service, "Accepted")["status"] == "True"
    assert {pod["metadata"]["uid"] for pod in await served.pods()} == pods
    assert await served.ask() == ANSWER


async def test_edited_and_deleted_children_are_repaired_while_it_serves(served: Served):
    [deployment] = [
        name for name in names_of(await _deployments(served)) if name.startswith("colocated-decode")
    ]
    apps = served.path("deployments", deployment, group="/apis/apps/v1")
    edits = {
        "ConfigMap": (served.path("configmaps", "colocated-gateway"), _edit_config),
        "Service": (served.path("services", "colocated-gateway"), _delete),
        "Deployment": (apps, _edit_arguments),
    }
    for kind, (path, edit) in edits.items():
        before = await served.api.get(path)
        began = time.monotonic()
        await edit(served, path)
        await until(
            lambda path=path, before=before: _is_as(served, path, before),
            seconds=REPAIR_SECONDS,
            awaited=f"the {kind} to be repaired",
        )
        print(f"{kind} repaired after {elapsed(began)}")
    await served.ready()
    await served.num_ready(Role.DECODE, 1)
    await until(
        lambda: _answers(served), seconds=REPAIR_SECONDS, awaited="the gateway to read its settings"
    )


async def _answers(served: Served) -> bool:
    """Whether the gateway answers; it may not have read again what was repaired."""
    try:
        return await served.ask() == ANSWER
    except openai.BadRequestError:
        return False


async def _image_tokens(served: Served, **more: str) -> tuple[int, str]:
    """Visual tokens of the quickstart's image, and the answer about it."""
    async with served.client() as client:
        found = await client.chat.completions.create(**body(served.name, 16), extra_body=more)
    num_tokens = found.model_dump()["usage"]["prompt_tokens_details"]["image_tokens"]
    return num_tokens, (found.choices[0].message.content or "").strip()


def _changed(**spec: dict[str, Any]) -> Object:
    """The example with parts of its spec added."""
    manifest = example("colocated")
    for field, parts in spec.items():
        manifest["spec"][field] = {**manifest["spec"].get(field, {}), **parts}
    return copy.deepcopy(manifest)


def _secret(key: str) -> Object:
    data = {"team": base64.b64encode(key.encode()).decode()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}, "data": data}


async def _status(served: Served, key: str) -> int:
    """The HTTP status of the list of models; 0 while nothing answers."""
    try:
        async with served.client(key=key) as client:
            await client.models.list()
    except openai.APIStatusError as error:
        return error.status_code
    except openai.APIConnectionError:
        return 0
    return 200


async def _is(served: Served, key: str, status: int) -> bool:
    """Whether every gateway that stays asks for keys and this one has the status."""
    return await _status(served, "wrong") == 401 and await _status(served, key) == status


async def _deployments(served: Served) -> list[Object]:
    listed = await served.api.get(served.path("deployments", group="/apis/apps/v1"))
    return list(listed["items"])


async def _edit_config(served: Served, path: str) -> None:
    text = (await served.api.get(path))["data"]["gateway.json"]
    edited = json.dumps({**json.loads(text), "max_model_len_tokens": 7})
    await served.api.patch(path, {"data": {"gateway.json": edited}})


async def _delete(served: Served, path: str) -> None:
    await served.api.delete(path)


async def _edit_arguments(served: Served, path: str) -> None:
    template = (await served.api.get(path))["spec"]["template"]
    template["spec"]["containers"][0]["args"].append("--max-requests=1")
    await served.api.patch(path, {"spec": {"template": template}})


async def _is_as(served: Served, path: str, before: Object) -> bool:
    """Whether the object has its earlier content again; a deleted one has another uid."""
    try:
        now = await served.api.get(path)
    except ApiError as error:
        assert error.status == 404  # noqa: PT017 - it is what absence looks like
        return False
    if now["kind"] == "Service":
        return bool(now["metadata"]["uid"] != before["metadata"]["uid"])
    changed = now["metadata"]["resourceVersion"] != before["metadata"]["resourceVersion"]
    parts = ("data", "spec")
    return changed and [now.get(part) for part in parts] == [before.get(part) for part in parts]
