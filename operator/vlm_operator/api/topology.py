"""Maps stages to pools: if a stage has no pool, the pool of the next role runs it.

pools                       encoder   prefill            decode
encoder, prefill, decode    encoder   prefill            decode
prefill, decode             -         encoder, prefill   decode
encoder, decode             encoder   -                  prefill, decode
decode                      -         -                  encoder, prefill, decode
"""

from __future__ import annotations

from vlm_operator.api.enums import Topology
from vlm_operator.api.pool import Pools
from vlm_operator.names import Role


def topology(pools: Pools) -> Topology:
    """Return the topology of a service's pools."""
    return {
        (True, True): Topology.ENCODER_PREFILL_DECODE,
        (True, False): Topology.ENCODER_DECODE,
        (False, True): Topology.PREFILL_DECODE,
        (False, False): Topology.DECODE,
    }[pools.encoder is not None, pools.prefill is not None]


def stages(pools: Pools, role: Role) -> tuple[Role, ...]:
    """Return the stages that workers of `role` load, in the order in which a request passes them.

    Raises:
        KeyError: the service has no pool of that role.
    """
    pool = pools.present[role]
    if role is Role.ENCODER:
        return (Role.ENCODER,)
    if role is Role.DECODE and pools.prefill is not None:
        return (Role.DECODE,)
    encodes = pools.encoder is None or pool.encode_inline
    own = (Role.PREFILL,) if role is Role.PREFILL else (Role.PREFILL, Role.DECODE)
    return (Role.ENCODER, *own) if encodes else own
