"""Scores a run: missed minutes, device hours, cost, changes of direction; and the Pareto front.

A minute is missed if the 95th percentile of TTFT exceeds the target, over the requests of one
modality that arrive in it. The TTFT of a request without a first token is infinite.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from vlm_cli.simulator.job import Job
from vlm_cli.simulator.run import Moment, Run
from vlm_operator.autoscale.policy import ServicePolicy
from vlm_operator.names import Role

Key = TypeVar("Key")


@dataclasses.dataclass(frozen=True)
class Score:
    """Score of one run.

    Attributes:
        missed: number of missed minutes.
        minutes: length of the trace in minutes.
        accelerator_hours: device hours, including pods that start or drain.
        cost, cost_per_1000: cost of the trace, and per 1000 requests.
        turns: maximum number of changes of direction of one pool within its stabilization window.
        turns_total: changes of direction of all pools.
        changes: number of changes of the pools' sizes.
        refused, unserved: refused requests, and other requests without a first token.
        over_budget: number of ticks above the budget.
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
    """Return the score of one run.

    The time after the trace counts only for requests and `over_budget`.
    """
    during = [moment for moment in run.moments if moment.at <= run.seconds]
    hours = _integral(during, lambda moment: float(moment.accelerators)) / 3600
    cost = _integral(during, lambda moment: moment.cost_per_hour) / 3600
    changed_at = {role: direction_changes(during, role) for role in policy.pools}
    return Score(
        missed=len(missed_minutes(run.jobs, policy.ttft_seconds)),
        minutes=math.ceil(run.seconds / 60),
        accelerator_hours=hours,
        cost=cost,
        cost_per_1000=1000 * cost / max(1, len(run.jobs)),
        turns=max(
            (
                most_within(times, policy.pools[role].down_seconds)
                for role, times in changed_at.items()
            ),
            default=0,
        ),
        turns_total=sum(len(times) for times in changed_at.values()),
        changes=sum(
            before.wanted[role] != after.wanted[role]
            for before, after in itertools.pairwise(during)
            for role in policy.pools
        ),
        requests=len(run.jobs),
        refused=sum(job.refused for job in run.jobs),
        unserved=sum(job.first_token_at is None and not job.refused for job in run.jobs),
        over_budget=sum(_exceeds_budget(moment, policy) for moment in run.moments),
    )


def missed_minutes(jobs: Iterable[Job], targets: Mapping[str, float]) -> set[int]:
    """Return the missed minutes of the trace; `targets` are seconds by modality."""
    by_minute: dict[tuple[int, str], list[float]] = defaultdict(list)
    for job in jobs:
        ttft = math.inf if job.ttft is None else job.ttft
        by_minute[int(job.request.at // 60), job.request.modality].append(ttft)
    return {
        minute
        for (minute, modality), ttfts in by_minute.items()
        if percentile(ttfts, 0.95) > targets.get(modality, math.inf)
    }


def percentile(values: Iterable[float], share: float) -> float:
    """Return the nearest-rank percentile for `share` in 0..1; nan if there are no values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def direction_changes(moments: Sequence[Moment], role: Role) -> tuple[float, ...]:
    """Return the times at which a pool changed from growth to shrinking, or the reverse."""
    times, last_sign, before = [], 0, None
    for moment in moments:
        count = moment.wanted[role]
        if before is not None and count != before:
            sign = 1 if count > before else -1
            if last_sign and sign != last_sign:
                times.append(moment.at)
            last_sign = sign
        before = count
    return tuple(times)


def most_within(times: Sequence[float], window: float) -> int:
    """Return the largest number of `times` within one window of `window` seconds."""
    return max((sum(start <= at < start + window for at in times) for start in times), default=0)


def front(points: Mapping[Key, tuple[float, float]]) -> list[Key]:
    """Return the keys of the Pareto front (less is better), ordered by the first coordinate."""
    kept: list[Key] = []
    best = math.inf
    for key, (_, second) in sorted(points.items(), key=lambda item: item[1]):
        if second < best:
            kept.append(key)
            best = second
    return kept


def _integral(moments: Sequence[Moment], value: Callable[[Moment], float]) -> float:
    """Integrate `value` over time, in seconds; a moment's value lasts until the next one."""
    total = 0.0
    for this, then in itertools.pairwise(moments):
        total += value(this) * (then.at - this.at)
    return total


def _exceeds_budget(moment: Moment, policy: ServicePolicy) -> bool:
    budget = policy.budget
    devices, cost = budget.accelerators, budget.cost_per_hour
    return (devices is not None and moment.accelerators > devices) or (
        cost is not None and moment.cost_per_hour > cost + 1e-6
    )
