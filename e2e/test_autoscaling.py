"""Pools on node classes, sized by the operator from what real pods report."""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from served import ANSWER, EXAMPLES, Served, condition, place

from vlm_local.client import Object
from vlm_local.controlplane import ControlPlane
from vlm_local.demo.line import MODEL
from vlm_local.waiting import until
from vlm_operator.names import Role

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
NAME = "node-types"
FAST = {"intervalSeconds": 1}


def manifests() -> tuple[list[Object], Object]:
    """The classes and the service of the example, in a hurry and with requests that wait."""
    found = [yaml.safe_load(file.read_text()) for file in sorted((EXAMPLES / NAME).glob("*.yaml"))]
    classes = [item for item in found if item["kind"] == "VLMNodeClass"]
    [service] = [item for item in found if item["kind"] == "VLMService"]
    spec = service["spec"]
    spec["autoscaling"] = FAST
    spec["slo"]["windowSeconds"] = 10
    scaling = spec["pools"]["encoder"]["scaling"]
    scaling["scaleToZero"] = {"idleSeconds": 5, "whileAtZero": "Queue"}
    scaling["behavior"] = {"scaleDown": {"stabilizationWindowSeconds": 5}}
    return classes, service


@contextlib.contextmanager
def applied(cluster: ControlPlane, classes: list[Object]) -> Iterator[None]:
    for item in classes:
        cluster.kubectl("apply", "-f", "-", stdin=json.dumps(item))
    try:
        yield
    finally:
        for item in classes:
            cluster.kubectl("delete", "vlmnc", item["metadata"]["name"])


async def encoders(served: Served) -> dict[str, Any]:
    service = await served.service()
    found: dict[str, Any] = service["status"]["pools"]["encoder"]
    return found


async def test_an_encoder_pool_sleeps_wakes_for_an_image_and_sleeps_again(
    operator: ControlPlane,
):
    classes, service = manifests()
    with applied(operator, classes), place(operator, NAME, MODEL):
        async with operator.client() as api:
            served = Served(operator, api, NAME, NAME)
            await served.apply(service)
            status = (await served.ready())["status"]
            assert status["summary"]["encoder"] == "0/0"
            assert status["cost"]["currency"] == "EUR"
            assert float(status["cost"]["perHour"]) > 0
            assert status["accelerators"]["limit"] == 6

            assert await served.ask() == ANSWER, "held until the encoder has come"
            found = await encoders(served)
            assert found["lastDecision"]["reason"] == "Wake"
            [pod] = await served.pods(Role.ENCODER)
            assert pod["spec"]["nodeSelector"] == classes[1]["spec"]["nodeSelector"]

            async def measured() -> bool:
                known = json.loads(operator.kubectl("get", "vlmnc", "cpu", "-o", "json").stdout)
                return "measuredStartupP90Seconds" in known.get("status", {})

            await until(measured, seconds=30, awaited="the start on the class to be measured")

            async def asleep() -> bool:
                return (await encoders(served))["replicas"] == 0

            await until(asleep, seconds=90, awaited="the encoder pool to sleep")
            assert (await encoders(served))["lastDecision"]["reason"] == "Idle"
            assert condition(await served.service(), "Ready")["status"] == "True"
