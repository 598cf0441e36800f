"""What a decision is made from is what the manifest, the classes and the cluster say."""

import asyncio
import dataclasses
from typing import Any

import pytest

from support.fakes import run_controllers
from support.world import World, body, external, pool, service
from vlm_operator.__main__ import _options
from vlm_operator.api import parse, resolve
from vlm_operator.autoscale.constants import CONSTANTS, Constants, parse_constants
from vlm_operator.autoscale.inputs import service_policy, service_view
from vlm_operator.cluster import epoch_seconds
from vlm_operator.names import Role
from vlm_operator.observe import node_class, observe, pod_states
from vlm_operator.pods.worker import place
from vlm_operator.rollout.revisions import current_revisions, keep_defaults
from vlm_operator.settings import Settings

AUTO: dict[str, Any] = {"mode": "Auto", "minReplicas": 1, "maxReplicas": 6}
ZERO: dict[str, Any] = {"mode": "Auto", "minReplicas": 0, "maxReplicas": 3}
SPOT = node_class(
    {
        "metadata": {"name": "spot"},
        "spec": {
            "accelerator": {"resourceName": "nvidia.com/gpu"},
            "cost": {"perHour": "2.0", "spotPerHour": "700m"},
            "spot": True,
            "speed": [{"role": "decode", "relativePercent": 150}],
            "expectedStartupSeconds": 90,
        },
    }
)


def policy(manifest, *classes):
    known = {item.name: item for item in classes}
    return service_policy(resolve(place(service(manifest), known), worker_image="w"), known)


def test_a_file_replaces_the_constants_that_it_names():
    found = parse_constants('{"stale_ticks": 5, "write_off": 3}')
    assert found == dataclasses.replace(CONSTANTS, stale_ticks=5, write_off=3.0)
    assert parse_constants("{}") == CONSTANTS == Constants()


@pytest.mark.parametrize("text", ["", "[]", '{"stale": 5}', '{"write_off": "high"}'])
def test_a_file_of_unknown_constants_is_refused(text):
    with pytest.raises(ValueError, match="Constants"):
        parse_constants(text)


def test_the_operator_takes_its_constants_from_a_file(tmp_path):
    file = tmp_path / "constants.json"
    file.write_text('{"stale_ticks": 5}')
    found = _options(Settings.read([f"--autoscaler-constants={file}"], {}))
    assert found.constants == dataclasses.replace(CONSTANTS, stale_ticks=5)
    assert _options(Settings.read([], {})).constants == CONSTANTS


def test_a_service_has_the_constants_of_its_operator():
    other = dataclasses.replace(CONSTANTS, stale_ticks=9)
    assert policy(body()).constants == CONSTANTS
    assert service_policy(service(body()), {}, constants=other).constants == other


def test_a_pool_says_its_bounds_pace_and_targets():
    scaling = AUTO | {
        "behavior": {
            "scaleUp": {
                "stabilizationWindowSeconds": 7,
                "maxPodsPerMinute": 9,
            },
            "scaleDown": {"stabilizationWindowSeconds": 11, "maxPodsPerMinute": 2},
        },
        "targets": {"utilizationPercent": 60},
    }
    found = policy(body({"slo": {"ttftP95Milliseconds": 900}}, decode={"scaling": scaling}))
    decode = found.pools[Role.DECODE]
    assert (decode.minimum, decode.maximum, decode.utilization) == (1, 6, 0.6)
    assert (decode.up_seconds, decode.up_pods) == (7, 9)
    assert (decode.down_seconds, decode.down_pods) == (11, 2)
    assert found.ttft_seconds == {"text": 0.9, "image": 0.9}


def test_an_override_is_that_modalitys_target():
    slo = {
        "ttftP95Milliseconds": 900,
        "overrides": [{"modality": "Image", "ttftP95Milliseconds": 2500}],
    }
    assert policy(body({"slo": slo})).ttft_seconds == {"text": 0.9, "image": 2.5}


def test_a_spot_class_gives_its_spot_price_speed_and_start():
    found = policy(
        body(decode=pool(variants=[{"name": "s", "nodeClassRef": {"name": "spot"}}])), SPOT
    )
    (variant,) = found.pools[Role.DECODE].variants
    assert (variant.cost_per_hour, variant.speed, variant.spot) == (0.7, 1.5, True)
    assert (variant.accelerators, variant.startup_seconds) == (1, 90)


def test_a_measured_start_wins_over_the_expected_one():
    manifest = {"metadata": {"name": "a"}, "spec": {}, "status": {"measuredStartupP90Seconds": 35}}
    assert node_class(manifest).startup_seconds == 35


def test_a_cost_that_nobody_said_makes_the_budget_unreadable():
    spec = {"budget": {"maxCostPerHour": "10"}}
    unknown = policy(body(spec, decode=pool()))
    assert "cost of decode variant default is unknown" in unknown.budget.unreadable
    named = [{"name": "s", "nodeClassRef": {"name": "spot"}}]
    assert policy(body(spec, decode=pool(variants=named)), SPOT).budget.unreadable == ""
    assert policy(body({"budget": {"maxAccelerators": 3}})).budget.unreadable == ""


@pytest.mark.parametrize(
    ("while_at_zero", "inline"), [("InlineAtPrefill", True), ("Queue", False), ("Reject", False)]
)
def test_images_are_encoded_inline_only_where_the_manifest_says_so(while_at_zero, inline):
    zero = ZERO | {"scaleToZero": {"idleSeconds": 5, "whileAtZero": while_at_zero}}
    found = policy(
        body(
            {"slo": {"ttftP95Milliseconds": 900}},
            encoder={"scaling": zero},
            prefill=pool(encodeInline=True),
            decode=pool(),
        )
    )
    assert found.pools[Role.PREFILL].inline is inline
    assert found.pools[Role.ENCODER].zero.idle_seconds == 5


def test_a_view_names_the_phase_of_every_pod_and_who_owns_the_number():
    world = World(body(decode=external(1, 4)))
    world.turn()
    run_controllers(world.cluster, start=False)
    decode = view_of(world).pools[Role.DECODE]
    assert [pod.phase for pod in decode.pods] == ["pending"]
    assert decode.owner == "vlm-autoscaler"
    world.converge()
    world.scale("decode", 2)
    decode = view_of(world).pools[Role.DECODE]
    assert [pod.phase for pod in decode.pods] == ["ready"]
    assert decode.pods[0].ready_since >= decode.pods[0].created
    assert (decode.owner, decode.replicas, decode.live) == ("kubectl", 2, {"default": 1})


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"engine": {"extraArgs": ["--max-requests=8"]}}, True),
        ({"podTemplate": {"spec": {"schedulerName": "other"}}}, False),
        ({"variants": [{"name": "default", "resources": {"limits": {"cpu": "9"}}}]}, False),
    ],
)
def test_revisions_share_a_placement_if_their_pods_fit_on_the_same_nodes(change, same):
    world = World(body(decode=pool()))
    world.converge()
    (before,) = view_of(world).pools[Role.DECODE].pods
    world.apply(body(decode=pool(**change)))
    world.turn()
    decode = view_of(world).pools[Role.DECODE]
    assert before.revision != decode.revisions["default"]
    assert (before.placement == decode.placements["default"]) is same


def view_of(world: World):
    """What the next decision would see."""
    now = world.cluster.clock.now
    observed = asyncio.run(observe(world.cluster, "ns", "demo", now=now))
    deployments = observed.deployments()
    written, shared = keep_defaults(
        parse(observed.service), deployments, worker_image="triptych/worker:dev"
    )
    current = current_revisions(written, shared, deployments)
    return service_view(
        written,
        observed,
        deployments,
        revisions={key: item.id for key, item in current.items()},
        rolling=(),
    )


def test_a_pod_that_is_not_ready_has_not_begun():
    manifest = {
        "metadata": {
            "name": "p",
            "uid": "u",
            "labels": {"triptych.dev/role": "decode"},
            "creationTimestamp": "2026-01-01T00:00:00Z",
        },
        "spec": {"nodeName": "n"},
        "status": {
            "conditions": [
                {"type": "Ready", "status": "False", "lastTransitionTime": "2026-01-01T00:00:09Z"}
            ]
        },
    }
    (found,) = pod_states([manifest])
    assert found.ready_since is None


def test_a_pod_that_crashed_is_known_to_have_served_by_the_gate_that_outlives_it():
    """The API server keeps the gate, and its time, when a container starts again."""

    def manifest(*conditions):
        return {
            "metadata": {
                "name": "p",
                "uid": "u",
                "labels": {"triptych.dev/role": "decode"},
                "creationTimestamp": "2026-01-01T00:00:00Z",
            },
            "spec": {"nodeName": "n"},
            "status": {
                "conditions": [
                    {
                        "type": name,
                        "status": status,
                        "lastTransitionTime": f"2026-01-01T00:{minute:02}:00Z",
                    }
                    for name, status, minute in conditions
                ]
            },
        }

    gate = ("triptych.dev/accepting", "True", 2)
    created = epoch_seconds("2026-01-01T00:00:00Z")
    (loads,) = pod_states([manifest(("Ready", "False", 1))])
    (down,) = pod_states([manifest(("Ready", "False", 30), gate)])
    (back,) = pod_states([manifest(("Ready", "True", 31), gate)])
    assert [pod.served for pod in (loads, down, back)] == [False, True, True]
    assert down.unready_since == created + 30 * 60
    assert (back.accepting_since, back.ready_since) == (created + 2 * 60, created + 31 * 60)
