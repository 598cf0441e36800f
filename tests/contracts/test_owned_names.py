"""The API refuses exactly the pod settings that the operator owns."""

import argparse
import pathlib

import pytest
import yaml

from vlm_operator import api
from vlm_operator.api.engine import OWNED_ARGS, OWNED_ENV, OWNED_ENV_PREFIX, Engine
from vlm_operator.api.pod_template import OWNED_MOUNTS
from vlm_operator.names import Role
from vlm_operator.pods.gateway import gateway_template
from vlm_operator.pods.worker import worker_template
from vlm_operator.rollout.revisions import current_revisions, keep_defaults
from vlm_worker.settings import command_line

ROOT = pathlib.Path(__file__).parents[2]
(COMMANDS,) = (
    action for action in command_line()._actions if isinstance(action, argparse._SubParsersAction)
)
WORKER_FLAGS = set(COMMANDS.choices["decode"]._option_string_actions)
MAY_BE_REPLACED = {
    "--weights", "--embedding-disk-dir", "--embedding-disk-bytes", "--embedding-disk-age-seconds",
    "--activation-scales", "--activation-scales-hash", "--session-pin-seconds",
    "--session-prefetch", "--client-embeddings",
}  # fmt: skip
"""Users may set these for one pool: other types of weights and scales, a volume of their own, other
times of pins. Gateways take no further arguments."""
MAXIMAL = yaml.safe_load((ROOT / "tests" / "operator" / "crd" / "maximal.yaml").read_text())


@pytest.fixture(scope="module", params=["hf", "cache", "pvc"])
def containers(request: pytest.FixtureRequest) -> list[dict[str, object]]:
    """Every container of the operator, without additions of the user."""
    spec = yaml.safe_load(yaml.safe_dump(MAXIMAL["spec"]))
    for pool in spec["pools"].values():
        pool.pop("engine", None)
        pool.pop("podTemplate", None)
    if request.param == "hf":
        spec["model"] |= {"cache": None}
    if request.param == "pvc":
        spec["model"] |= {"uri": "pvc://shapes/x", "credentialsSecretRef": None, "cache": None}
    meta = {"name": "demo", "namespace": "default", "uid": "u", "generation": 1}
    written = api.parse({"metadata": meta, "spec": spec})
    service, shared = keep_defaults(written, (), worker_image="triptych/worker:test")
    templates = []
    for (role, variant), revision in current_revisions(service, shared, ()).items():
        if role is Role.GATEWAY:
            templates.append(gateway_template(service, revision))
            continue
        pool = service.spec.pools.present[role]
        chosen = next(item for item in pool.variants if item.name == variant)
        templates.append(worker_template(service, pool, chosen, revision))
    return [container for item in templates for container in item["spec"]["containers"]]


def test_every_argument_is_owned(containers: list[dict[str, list[str]]]) -> None:
    flags = {arg.split("=")[0] for item in containers for arg in item["args"] if arg[0] == "-"}
    assert flags - MAY_BE_REPLACED <= set(OWNED_ARGS)
    assert "--model" in flags
    assert flags >= MAY_BE_REPLACED


def test_every_port_of_a_worker_is_owned() -> None:
    """NetworkPolicies allow fixed port numbers."""
    assert {"--data-port", "--grpc-port"} <= WORKER_FLAGS
    assert {flag for flag in WORKER_FLAGS if flag.endswith("-port")} <= set(OWNED_ARGS)


def test_arguments_on_the_page_are_worker_flags_that_users_may_set() -> None:
    shown = Engine.model_fields["extra_args"].json_schema_extra["example"]
    flags = {arg.split("=")[0] for arg in shown}
    assert flags
    assert flags <= WORKER_FLAGS - set(OWNED_ARGS)


def test_every_variable_is_owned(containers: list[dict[str, list[dict[str, str]]]]) -> None:
    found = {entry["name"] for item in containers for entry in item["env"]}
    free = {name for name in found if not name.startswith(OWNED_ENV_PREFIX)} - set(OWNED_ENV)
    # A user may set their own token if the model needs none.
    assert free <= {"HF_TOKEN"}


def test_every_mount_is_owned(containers: list[dict[str, list[dict[str, str]]]]) -> None:
    paths = {entry["mountPath"] for item in containers for entry in item["volumeMounts"]}
    assert all(path.startswith(OWNED_MOUNTS) for path in paths)
