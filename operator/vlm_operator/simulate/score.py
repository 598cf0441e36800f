"""What a run was worth: minutes out of target, devices, money, restlessness; and who is best.

A minute is missed when, of the requests of one modality that arrived in it, the 95th percentile of
TTFT is beyond the target. A request that got no first token counts as infinitely late.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from vlm_operator.autoscale.policy import ServicePolicy
from vlm_operator.names import Role
from vlm_operator.simulate.job import Job
from vlm_operator.simulate.run import Moment, Run

Key = TypeVar("Key")


@dataclasses.dataclass(frozen=True)
class Score:
    """One run in numbers.

    Attributes:
        missed: minutes out of target.
        minutes: of the trace.
        accelerator_hours: held, pods that start or drain included.
        cost, cost_per_1000: of the trace, and of a thousand of its requests.
        turns: most changes of direction of one pool within one of its windows for shrinking.
        turns_total: changes of direction of all pools.
        changes: how often the number of a pool changed.
        refused, unserved: requests that were turned away, and that never got a first token.
        over_budget: moments beyond the budget.
    """

    missed: int
    minutes: int
    accelerator_hours: float
    cost: float
    cost_per_1000: float
    turns: int
    turns_total: int
    changes: int
    requests: int
    refused: int
    unserved: int
    over_budget: int


def score(run: Run, policy: ServicePolicy) -> Score:
    """Judge one run."""
    during = [moment for moment in run.moments if moment.at <= run.seconds]
    hours = _integral(during, lambda moment: float(moment.accelerators)) / 3600
    cost = _integral(during, lambda moment: moment.cost_per_hour) / 3600
    turned = {role: direction_changes(during, role) for role in policy.pools}
    return Score(
        missed=len(missed_minutes(run.jobs, policy.ttft_seconds)),
        minutes=math.ceil(run.seconds / 60),
        accelerator_hours=hours,
        cost=cost,
        cost_per_1000=1000 * cost / max(1, len(run.jobs)),
        turns=max(
            (most_within(times, policy.pools[role].down_seconds) for role, times in turned.items()),
            default=0,
        ),
        turns_total=sum(len(times) for times in turned.values()),
        changes=sum(
            before.wanted[role] != after.wanted[role]
            for before, after in itertools.pairwise(during)
            for role in policy.pools
        ),
        requests=len(run.jobs),
        refused=sum(job.refused for job in run.jobs),
        unserved=sum(job.first_token_at is None and not job.refused for job in run.jobs),
        over_budget=sum(_over(moment, policy) for moment in run.moments),
    )


def missed_minutes(jobs: Iterable[Job], targets: Mapping[str, float]) -> set[int]:
    """The minutes whose arrivals were not served in time."""
    arrived: dict[tuple[int, str], list[float]] = defaultdict(list)
    for job in jobs:
        taken = math.inf if job.ttft is None else job.ttft
        arrived[int(job.request.at // 60), job.request.modality].append(taken)
    return {
        minute
        for (minute, modality), taken in arrived.items()
        if percentile(taken, 0.95) > targets.get(modality, math.inf)
    }


def percentile(values: Iterable[float], share: float) -> float:
    """The nearest rank; nan of nothing."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def direction_changes(moments: Sequence[Moment], role: Role) -> tuple[float, ...]:
    """When a pool's number turned from growing to shrinking, or back."""
    found, last, before = [], 0, None
    for moment in moments:
        count = moment.wanted[role]
        if before is not None and count != before:
            sign = 1 if count > before else -1
            if last and sign != last:
                found.append(moment.at)
            last = sign
        before = count
    return tuple(found)


def most_within(times: Sequence[float], window: float) -> int:
    """Most of these times that lie within one window."""
    return max((sum(start <= at < start + window for at in times) for start in times), default=0)


def front(points: Mapping[Key, tuple[float, float]]) -> list[Key]:
    """Who is not beaten in both coordinates (less is better), from the least of the first on."""
    kept: list[Key] = []
    best = math.inf
    for key, (_, second) in sorted(points.items(), key=lambda item: item[1]):
        if second < best:
            kept.append(key)
            best = second
    return kept


def _integral(moments: Sequence[Moment], value: Callable[[Moment], float]) -> float:
    """Over time; a moment's value holds until the next one."""
    total = 0.0
    for this, then in itertools.pairwise(moments):
        total += value(this) * (then.at - this.at)
    return total


def _over(moment: Moment, policy: ServicePolicy) -> bool:
    budget = policy.budget
    devices, cost = budget.accelerators, budget.cost_per_hour
    return (devices is not None and moment.accelerators > devices) or (
        cost is not None and moment.cost_per_hour > cost + 1e-6
    )
