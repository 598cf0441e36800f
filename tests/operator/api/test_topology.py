"""Each stage runs somewhere, exactly where the request passes next."""

import itertools
from typing import Any

import pytest

from vlm_operator.api import stages, topology
from vlm_operator.api.enums import Topology
from vlm_operator.api.pool import Pools
from vlm_operator.names import POOL_ROLES, Role

POOL: dict[str, Any] = {"scaling": {"mode": "Manual", "replicas": 1}}
SUBSETS = [
    frozenset({Role.DECODE, *others})
    for size in range(3)
    for others in itertools.combinations((Role.ENCODER, Role.PREFILL), size)
]


def pools(roles: frozenset[Role], *, lender: Role | None = None) -> Pools:
    return Pools.model_validate(
        {role.value: {**POOL, "encodeInline": role is lender} for role in roles}
    )


@pytest.mark.parametrize("roles", SUBSETS, ids=lambda roles: "+".join(sorted(roles)))
def test_every_stage_runs_in_one_pool_and_none_runs_before_its_own(roles: frozenset[Role]) -> None:
    found = pools(roles)
    ran = [stage for role in found.present for stage in stages(found, role)]
    assert tuple(ran) == POOL_ROLES
    for role in found.present:
        assert stages(found, role)[-1] is role


def test_a_pool_with_encode_inline_encodes_beside_the_encoder_pool() -> None:
    every = frozenset(POOL_ROLES)
    encoding = pools(every, lender=Role.PREFILL)
    assert stages(encoding, Role.PREFILL) == (Role.ENCODER, Role.PREFILL)
    without_prefill = pools(frozenset({Role.ENCODER, Role.DECODE}), lender=Role.DECODE)
    assert stages(without_prefill, Role.DECODE) == POOL_ROLES


@pytest.mark.parametrize("roles", [subset for subset in SUBSETS if Role.ENCODER in subset])
def test_an_encoder_pool_that_lends_loads_every_stage(roles: frozenset[Role]) -> None:
    off = pools(roles)
    lending = {**POOL, "maxLentRequests": 4, "kv": {"memoryPercent": 30}}
    found = Pools.model_validate(
        {role.value: lending if role is Role.ENCODER else POOL for role in roles}
    )
    assert stages(found, Role.ENCODER) == POOL_ROLES
    assert {role: stages(found, role) for role in roles - {Role.ENCODER}} == {
        role: stages(off, role) for role in roles - {Role.ENCODER}
    }


def test_topologies_have_names() -> None:
    assert {topology(pools(roles)) for roles in SUBSETS} == set(Topology)


def test_a_role_without_a_pool_has_no_stages() -> None:
    with pytest.raises(KeyError):
        stages(pools(frozenset({Role.DECODE})), Role.ENCODER)
