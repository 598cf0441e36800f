"""What others do, as they do it upstream: the measure that our autoscaler is held to.

horizontal.py   the HorizontalPodAutoscaler's own arithmetic, shared by three of them
queue.py        HPA on queue length                       kv.py        KEDA on KV occupancy
linked.py       one number for three pools, 1:1:1         threshold.py one up, one down (Dynamo)
latency.py      each pod's own p95, with panic (kthena)
work.py         work seconds and KV tokens, our own signals, in the simplest rule

None knows node types: each takes the first variant of a pool. A budget bounds them as a quota does:
pods beyond it stay pending.
"""

from collections.abc import Callable, Mapping
from typing import Any

from vlm_operator.autoscale.policy import ServicePolicy
from vlm_operator.simulate.baselines.kv import KvOccupancy
from vlm_operator.simulate.baselines.latency import PodLatency
from vlm_operator.simulate.baselines.linked import Linked
from vlm_operator.simulate.baselines.queue import QueueLength
from vlm_operator.simulate.baselines.threshold import Threshold
from vlm_operator.simulate.baselines.work import Work
from vlm_operator.simulate.run import Autoscaler

# name → (how to build it from a policy and its settings, the grid that it is tuned over)
BASELINES: Mapping[str, tuple[Callable[..., Autoscaler], Mapping[str, tuple[Any, ...]]]] = {
    "hpa-queue": (QueueLength, QueueLength.GRID),
    "keda-kv": (KvOccupancy, KvOccupancy.GRID),
    "linked-1-1-1": (Linked, Linked.GRID),
    "threshold": (Threshold, Threshold.GRID),
    "pod-p95": (PodLatency, PodLatency.GRID),
    "work": (Work, Work.GRID),
}


def baseline(name: str, policy: ServicePolicy, settings: Mapping[str, Any]) -> Autoscaler:
    """Build one by name.

    Raises:
        KeyError: there is none of that name.
    """
    return BASELINES[name][0](policy, **settings)


__all__ = ["BASELINES", "baseline"]
