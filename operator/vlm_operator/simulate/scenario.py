"""The service that the comparison runs on: three pools, one budget, targets per modality."""

from __future__ import annotations

import dataclasses

from vlm_operator.api.enums import OnDemand, ScalingMode
from vlm_operator.autoscale.policy import (
    Budget,
    PoolPolicy,
    ServicePolicy,
    VariantPolicy,
    ZeroPolicy,
)
from vlm_operator.names import Role
from vlm_operator.simulate.plant import NodeType, Plant
from vlm_operator.simulate.run import Setup

MAX_ACCELERATORS = 16
BIG, SMALL = "big", "small"
# what node classes expect of a start; the truth is in plant.NodeType, and spreads
_BIG = VariantPolicy(BIG, cost_per_hour=4.0, accelerators=1, startup_seconds=60.0)
_START = {Role.ENCODER: 2, Role.PREFILL: 2, Role.DECODE: 2}


def standard(trace: str = "") -> Setup:
    """One node type for all pools.

    Args:
        trace: with `bad-node-type`, there is a second one, cheaper, that gets no nodes; with
            `text-only-lull`, the encoder pool may go to zero.
    """
    variants: tuple[VariantPolicy, ...] = (_BIG,)
    plant = Plant()
    if trace == "bad-node-type":
        # bad means: offered, the cheapest, and never there
        variants = (_BIG, dataclasses.replace(_BIG, name=SMALL, cost_per_hour=3.0))
        plant = dataclasses.replace(
            plant, node_types={role: {SMALL: NodeType(nodes=0)} for role in _START}
        )
    return _setup(plant, dict.fromkeys(_START, variants), zero=trace == "text-only-lull")


def mixed(price: float = 0.5) -> Setup:
    """Encoders may run on a node type of 0.6 of the speed, decode on one of 0.8.

    The latter has 0.8 of the bandwidth and of the memory; prefill has none. A pool begins on its
    first variant, the cheaper one.

    Args:
        price: of both, as a share of the other node type's.
    """
    cheap = dataclasses.replace(_BIG, name=SMALL, cost_per_hour=price * (_BIG.cost_per_hour or 0))
    encoder = dataclasses.replace(cheap, speed=0.6)
    decode = dataclasses.replace(cheap, speed=0.8)
    plant = Plant(node_types={Role.DECODE: {SMALL: NodeType(kv_share=0.8)}})
    return _setup(
        plant,
        {Role.ENCODER: (encoder, _BIG), Role.PREFILL: (_BIG,), Role.DECODE: (decode, _BIG)},
        zero=False,
    )


def _setup(plant: Plant, variants: dict[Role, tuple[VariantPolicy, ...]], *, zero: bool) -> Setup:
    pools = {
        role: PoolPolicy(
            role=role,
            mode=ScalingMode.AUTO,
            replicas=0,
            minimum=0 if zero and role is Role.ENCODER else 1,
            maximum=10,
            variants=kinds,
            zero=ZeroPolicy(300.0, OnDemand.INLINE_AT_PREFILL)
            if zero and role is Role.ENCODER
            else None,
            inline=role is Role.PREFILL,
        )
        for role, kinds in variants.items()
    }
    policy = ServicePolicy(
        pools=pools,
        ttft_seconds={"text": 2.0, "image": 3.0},
        budget=Budget(accelerators=MAX_ACCELERATORS),
    )
    return Setup(policy, plant, start=_START)
