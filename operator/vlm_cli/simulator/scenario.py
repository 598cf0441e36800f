"""The services of the comparison: three pools, one budget, TTFT targets by modality."""

from __future__ import annotations

import dataclasses

from vlm_cli.simulator.hardware import Hardware, NodeType
from vlm_cli.simulator.run import Setup
from vlm_operator.api.enums import ScalingMode, WhileAtZero
from vlm_operator.autoscale.policy import (
    Budget,
    PoolPolicy,
    ServicePolicy,
    VariantPolicy,
    ZeroPolicy,
)
from vlm_operator.names import Role

MAX_ACCELERATORS = 16
BIG, SMALL = "big", "small"
# start-up time in the node class; hardware.NodeType has the real distribution
_BIG = VariantPolicy(BIG, cost_per_hour=4.0, accelerators=1, startup_seconds=60.0, node_class=BIG)
_START = {Role.ENCODER: 2, Role.PREFILL: 2, Role.DECODE: 2}


def standard(trace: str = "") -> Setup:
    """Return a service with one node type for all pools.

    Args:
        trace: for `bad-node-type` there is a second, cheaper node type without nodes. For
            `text-only-lull` the encoder pool can scale to zero.
    """
    variants: tuple[VariantPolicy, ...] = (_BIG,)
    hardware = Hardware()
    if trace == "bad-node-type":
        bad = dataclasses.replace(_BIG, name=SMALL, cost_per_hour=3.0, node_class=SMALL)
        variants = (_BIG, bad)
        hardware = dataclasses.replace(
            hardware, node_types={role: {SMALL: NodeType(nodes=0)} for role in _START}
        )
    return _setup(hardware, dict.fromkeys(_START, variants), zero=trace == "text-only-lull")


def mixed(price: float = 0.5) -> Setup:
    """Return a service with a second, cheap node type for the encoder and the decode pool.

    On it encoders have 0.6 of the speed. Decode has 0.8 of the speed and of the KV memory. Each
    pool starts on its first variant, which is the cheaper one.

    Args:
        price: price of the cheap type, as a share of the other type's.
    """
    cost = price * (_BIG.cost_per_hour or 0)
    cheap = dataclasses.replace(_BIG, name=SMALL, cost_per_hour=cost, node_class=SMALL)
    encoder = dataclasses.replace(cheap, speed=0.6)
    decode = dataclasses.replace(cheap, speed=0.8)
    hardware = Hardware(node_types={Role.DECODE: {SMALL: NodeType(kv_share=0.8)}})
    return _setup(
        hardware,
        {Role.ENCODER: (encoder, _BIG), Role.PREFILL: (_BIG,), Role.DECODE: (decode, _BIG)},
        zero=False,
    )


def _setup(
    hardware: Hardware, variants: dict[Role, tuple[VariantPolicy, ...]], *, zero: bool
) -> Setup:
    pools = {
        role: PoolPolicy(
            role=role,
            mode=ScalingMode.AUTO,
            replicas=0,
            minimum=0 if zero and role is Role.ENCODER else 1,
            maximum=10,
            variants=pool_variants,
            zero=ZeroPolicy(300.0, WhileAtZero.INLINE_AT_PREFILL)
            if zero and role is Role.ENCODER
            else None,
            inline=role is Role.PREFILL,
        )
        for role, pool_variants in variants.items()
    }
    policy = ServicePolicy(
        pools=pools,
        ttft_seconds={"text": 2.0, "image": 3.0},
        budget=Budget(accelerators=MAX_ACCELERATORS),
    )
    return Setup(policy, hardware, start=_START)
