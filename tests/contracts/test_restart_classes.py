"""Each field declares what its change restarts, and revisions behave accordingly."""

import copy
import json
import pathlib
import re
from typing import Any

import pytest
import yaml

from crd.reference import Row, rows
from vlm_operator import api
from vlm_operator.api.base import Restarts
from vlm_operator.errors import SpecError
from vlm_operator.names import Role
from vlm_operator.rollout.revisions import current_revisions, keep_defaults

ROOT = pathlib.Path(__file__).parents[2]
MAXIMAL = yaml.safe_load((ROOT / "tests" / "operator" / "crd" / "maximal.yaml").read_text())
ROWS = {row.path: row for row in rows(api.VLMServiceSpec, "spec")}
# A rule refuses these if there is a prefill pool, as here, or on these pools.
REFUSED = {
    "spec.pools.encoder.encodeInline",
    "spec.pools.decode.encodeInline",
    "spec.pools.prefill.maxLentRequests",
    "spec.pools.decode.maxLentRequests",
    "spec.pools.encoder.kv.memory",
    "spec.pools.encoder.kv.memoryPercent",
}
# Items of lists are omitted: changing one changes the list.
LEAVES = {
    path: row
    for path, row in ROWS.items()
    if row.example and "[]" not in path and path not in REFUSED
}

# The expected classes, by the longest matching prefix.
SETTLED = {
    "spec": Restarts.NONE,
    "spec.image": Restarts.PODS,
    "spec.imagePullSecrets": Restarts.PODS,
    "spec.model": Restarts.PODS,
    "spec.model.servedName": Restarts.NONE,
    "spec.model.limits": Restarts.NONE,
    "spec.model.cache.podTemplate": Restarts.NONE,
    "spec.pools": Restarts.PODS,
    "spec.pools.*.scaling": Restarts.NONE,
    "spec.pools.*.drain": Restarts.NONE,
    "spec.pools.*.disruption": Restarts.NONE,
    "spec.pools.*.rollout": Restarts.NONE,
    "spec.pools.*.variants[].preference": Restarts.NONE,
    "spec.pools.*.variants[].maxReplicas": Restarts.NONE,
    "spec.gateway.image": Restarts.GATEWAY,
    "spec.gateway.scaling": Restarts.NONE,
    "spec.gateway.resources": Restarts.GATEWAY,
    "spec.gateway.placement": Restarts.GATEWAY,
    "spec.gateway.auth.secretRef": Restarts.GATEWAY,
    "spec.gateway.tls.secretRef": Restarts.GATEWAY,
    "spec.gateway.limits": Restarts.GATEWAY,
    "spec.gateway.patienceSeconds": Restarts.GATEWAY,
    "spec.gateway.clientPriority": Restarts.GATEWAY,
    "spec.gateway.sessionPrefetch": Restarts.GATEWAY,
    "spec.gateway.clientEmbeddings": Restarts.GATEWAY,
    "spec.gateway.podTemplate": Restarts.GATEWAY,
    "spec.transfer": Restarts.PODS,
    "spec.tracing": Restarts.PODS,
    "spec.identity": Restarts.PODS,
}


def expected(path: str) -> Restarts:
    general = re.sub(r"spec\.pools\.(encoder|prefill|decode)", "spec.pools.*", path)
    fitting = [p for p in SETTLED if general == p or general.startswith((f"{p}.", f"{p}["))]
    return SETTLED[max(fitting, key=len)]


@pytest.mark.parametrize("path", sorted(path for path, row in ROWS.items() if row.example))
def test_every_field_declares_the_expected_class(path: str) -> None:
    assert ROWS[path].restarts == expected(path)


@pytest.mark.parametrize("path", sorted(LEAVES))
def test_the_operator_restarts_what_the_field_declares(path: str) -> None:
    before, after = revisions(MAXIMAL), revisions(changed(MAXIMAL, LEAVES[path]))
    moved = {role for role, variant in before if before[role, variant] != after[role, variant]}
    workers = moved - {Role.GATEWAY}
    match Restarts(LEAVES[path].restarts):
        case Restarts.PODS:
            assert workers
        case Restarts.GATEWAY:
            assert moved == {Role.GATEWAY}
        case Restarts.NONE:
            assert not moved


@pytest.mark.parametrize("role", ["encoder", "prefill", "decode"])
def test_a_change_in_one_pool_restarts_no_other_pool(role: str) -> None:
    path = f"spec.pools.{role}.engine.extraArgs"
    before, after = revisions(MAXIMAL), revisions(changed(MAXIMAL, LEAVES[path]))
    assert {key[0].value for key in before if before[key] != after[key]} == {role}


def revisions(manifest: dict[str, Any]) -> dict[tuple[Role, str], str]:
    """The wanted revision of each role and variant, without running pods."""
    service, shared = keep_defaults(parsed(manifest), (), worker_image="triptych/worker:test")
    return {key: item.id for key, item in current_revisions(service, shared, ()).items()}


def parsed(manifest: dict[str, Any]) -> api.VLMService:
    meta = {"name": "maximal", "namespace": "default", "uid": "u", "generation": 1}
    return api.parse({**manifest, "metadata": meta})


def changed(manifest: dict[str, Any], row: Row) -> dict[str, Any]:
    """The manifest with another valid value at one path."""
    for value in candidates(row):
        result = copy.deepcopy(manifest)
        *parents, last = row.path.split(".")
        target = result
        for part in parents:
            target = target.setdefault(part, {})
        target[last] = value
        if last == "mode":  # each mode has its own numbers, and parse reads only those
            target |= (
                {"replicas": 1, "minReplicas": 1, "maxReplicas": 4} if "scaling" in parents else {}
            )
        if last == "maxAgeSeconds":  # a disk has a size
            target.setdefault("size", "10Gi")
        try:
            if parsed(result).spec != parsed(manifest).spec:
                return result
        except SpecError:
            continue
    raise AssertionError(f"no other value for {row.path}: give it one in candidates()")


def candidates(row: Row) -> list[Any]:
    """The field's example, and another value if the manifest has the example."""
    example = json.loads(row.example)
    choices = [int(c) if c.isdigit() else c for c in re.findall(r"`([^`]+)`", row.type)]
    if choices:
        return [[choice] for choice in choices] if isinstance(example, list) else choices
    if isinstance(example, bool):
        return [example, not example]
    if isinstance(example, int):
        return [example, example + 1, example - 1]
    if isinstance(example, str):
        hub = ["hf://org/other", "0" * 40]  # a cache needs them
        return [example, example + "x", "2", example + "/x", *hub]
    return [example, [], {}]
