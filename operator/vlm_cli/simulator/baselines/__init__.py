"""Baselines: other autoscalers as implemented upstream, for comparison with ours.

horizontal.py   the HorizontalPodAutoscaler's own arithmetic, shared by three of them
queue.py        HPA on queue length                       kv.py        KEDA on KV occupancy
linked.py       one number for three pools, 1:1:1         threshold.py one up, one down (Dynamo)
latency.py      each pod's own p95, with panic (kthena)
work.py         work seconds and KV tokens, our own signals, in the simplest rule

They ignore node types: each uses the first variant of a pool. A budget limits them like a quota:
pods beyond it stay pending.
"""

from collections.abc import Callable, Mapping
from typing import Any

from vlm_cli.simulator.baselines.kv import KvOccupancy
from vlm_cli.simulator.baselines.latency import PodLatency
from vlm_cli.simulator.baselines.linked import Linked
from vlm_cli.simulator.baselines.queue import QueueLength
from vlm_cli.simulator.baselines.threshold import Threshold
from vlm_cli.simulator.baselines.work import Work
from vlm_cli.simulator.run import Autoscaler
from vlm_operator.autoscale.policy import ServicePolicy

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
