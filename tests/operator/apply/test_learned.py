"""What is learned from one service's manifest holds for those of others, names included."""

from __future__ import annotations

import copy

from hypothesis import given
from hypothesis import strategies as st

from support.fakes import FakeCluster
from vlm_operator import names
from vlm_operator.apply.compare import drift
from vlm_operator.apply.learned import Learned
from vlm_operator.cluster import Manifest

NAMES = st.from_regex(r"[a-z]([a-z0-9-]{0,8}[a-z0-9])?", fullmatch=True)


def deployment(service: str) -> Manifest:
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {
            "name": f"{service}-decode",
            "namespace": "ns",
            "labels": {names.LABEL_SERVICE: service},
        },
        "spec": {
            "template": {
                "spec": {
                    "serviceAccountName": f"{service}-worker",
                    "containers": [{"name": "worker", "args": [f"--service={service}"]}],
                }
            }
        },
    }


def admit(body: Manifest, new: bool) -> None:
    """Set defaults as an API server does."""
    spec = body["spec"]["template"]["spec"]
    spec["serviceAccount"] = spec["serviceAccountName"]
    spec["dnsPolicy"] = "ClusterFirst"


def live(wanted: Manifest) -> Manifest:
    found = copy.deepcopy(wanted)
    admit(found, True)
    return found


@given(services=st.lists(NAMES, min_size=1, max_size=8, unique=True))
async def test_one_dry_run_is_enough_for_all_services(services: list[str]):
    cluster, learned = FakeCluster(), Learned()
    cluster.admission.append(admit)
    for service in services:
        wanted = deployment(service)
        if not learned.known(wanted):
            await learned.ask(cluster, wanted, "digest", now=0.0)
        assert drift(live(wanted), wanted, learned.known(wanted)) == ()
    assert len(cluster.dry_runs) == 1


@given(services=st.lists(NAMES, min_size=2, max_size=2, unique=True))
async def test_the_name_of_another_service_stays_a_drift(services: list[str]):
    cluster, learned = FakeCluster(), Learned()
    cluster.admission.append(admit)
    one, other = map(deployment, services)
    await learned.ask(cluster, one, "digest", now=0.0)
    found = live(other)
    spec = found["spec"]["template"]["spec"]
    spec["serviceAccount"] = f"{services[0]}-worker"
    [difference] = drift(found, other, learned.known(other))
    assert difference.path == "spec.template.spec.serviceAccount"
