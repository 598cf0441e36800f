"""Things that go wrong in a service that is simulated: predictions, nodes, pods.

Each turns the comparison's service into one that has this trouble, for traces of 90 minutes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping

from vlm_cli.simulator.hardware import NodeType
from vlm_cli.simulator.run import Setup
from vlm_cli.simulator.scenario import BIG, SMALL, mixed, standard
from vlm_operator.names import POOL_ROLES, Role

PERTURBED_SECONDS = 5400.0
_BEGINS, _HOUR = 1200.0, 3600.0  # of an hour without nodes
_CRASH = 1500.0


def _biased(times: float) -> Setup:
    """Every pod predicts so many times what its work takes."""
    setup = standard()
    return dataclasses.replace(setup, noise=dataclasses.replace(setup.noise, bias=times))


def _cheap_type_gone() -> Setup:
    """Of two node types the cheaper one gives no node for an hour."""
    setup = mixed()
    return _without(setup, (Role.ENCODER, Role.DECODE), SMALL)


def _no_nodes(begins: float = _BEGINS) -> Setup:
    """No pool gets a node for an hour."""
    return _without(standard(), POOL_ROLES, BIG, begins=begins)


def _crash() -> Setup:
    """One healthy prefill pod crashes and starts again."""
    return dataclasses.replace(standard(), crashes=((_CRASH, Role.PREFILL),))


def _without(
    setup: Setup, roles: tuple[Role, ...], variant: str, *, begins: float = _BEGINS
) -> Setup:
    types = {role: dict(known) for role, known in setup.hardware.node_types.items()}
    for role in roles:
        of_role = types.setdefault(role, {})
        kind = of_role.get(variant, NodeType())
        of_role[variant] = dataclasses.replace(kind, gone_from=begins, gone_until=begins + _HOUR)
    return dataclasses.replace(
        setup, hardware=dataclasses.replace(setup.hardware, node_types=types)
    )


PERTURBED: Mapping[str, Callable[[], Setup]] = {
    "plain": standard,
    "predictions 1.5 times": functools.partial(_biased, 1.5),
    "predictions 1 / 1.5": functools.partial(_biased, 1 / 1.5),
    "mixed node types": mixed,
    "mixed, cheap type gone for an hour": _cheap_type_gone,
    "no nodes for an hour": _no_nodes,
    "a healthy prefill pod crashes": _crash,
}

# the same hour from other times on: what stands when it begins decides much of what is missed
OUTAGES: Mapping[str, Callable[[], Setup]] = {
    f"no nodes from {begins} s": functools.partial(_no_nodes, float(begins))
    for begins in range(600, 2700, 300)
}
TROUBLES: Mapping[str, Callable[[], Setup]] = {**PERTURBED, **OUTAGES}
