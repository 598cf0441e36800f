"""How far a rollout may go beyond and below a pool's size, and who must be left behind.

`maxSurge` is rounded up, `maxUnavailable` down, as Kubernetes rounds them; if both come to 0, one
pod may be unavailable, since nothing could move otherwise. A surge pod counts for the budget: one
that it has no room for is none.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping

from vlm_operator.api.pool import PoolRollout
from vlm_operator.names import Role

_SURGE, _UNAVAILABLE = "1", "0"


@dataclasses.dataclass(frozen=True)
class Pace:
    """What a rollout may do to one pool at any moment.

    Attributes:
        surge: pods above the target, old and new together.
        unavailable: pods below the target.
        drain_first: no node has room for a surge pod: one old pod may go before its successor.
        last_too: it may even be the last one that is ready.
    """

    surge: int
    unavailable: int
    drain_first: bool = False
    last_too: bool = False

    @property
    def batch(self) -> int:
        """Pods that one step may replace."""
        return max(1, self.surge + self.unavailable)

    @property
    def gives_last(self) -> bool:
        """Whether a pool's last ready pod may go before its successor comes."""
        return self.drain_first and self.last_too

    def floor(self, target: int) -> int:
        """Pods that must be available: the last one too, where a successor fits beside it."""
        least = max(0, target - self.unavailable)
        if self.drain_first:
            least = max(0 if self.last_too else min(1, least), least - 1)
        fits = target > 0 and target + self.surge >= 2 and not self.gives_last
        return max(int(fits), least)

    @classmethod
    def of(cls, rollout: PoolRollout, target: int) -> Pace:
        """Read a pool's settings; `target` is what percentages are of."""
        surge = share(rollout.max_surge or _SURGE, target, up=True)
        unavailable = share(rollout.max_unavailable or _UNAVAILABLE, target, up=False)
        if surge == unavailable == 0:
            unavailable = 1
        return cls(surge, unavailable)


def share(text: str, of: int, *, up: bool) -> int:
    """Turn a count or a percentage into pods: `25%` of 5 is 2 rounded up, 1 rounded down."""
    if not text.endswith("%"):
        return int(text)
    exact = int(text[:-1]) * of / 100
    return math.ceil(exact) if up else math.floor(exact)


@dataclasses.dataclass(frozen=True)
class Bill:
    """What pools take of a budget.

    Attributes:
        each: of one replica of each role's dearest variant.
        steady: of all pools at their targets.
        limit: None where there is no bound.
    """

    each: Mapping[Role, float]
    steady: float
    limit: float | None


def within_budget(paces: Mapping[Role, Pace], bills: Iterable[Bill]) -> dict[Role, Pace]:
    """Take surge pods away, the last role's first, until all of them fit into every budget.

    A role may be left with neither surge nor unavailability: it has no spare capacity.
    """
    found = dict(paces)
    for bill in bills:
        if bill.limit is None:
            continue
        for role in reversed(list(found)):
            pace, cost = found[role], bill.each.get(role, 0.0)
            extra = sum(bill.each.get(name, 0.0) * item.surge for name, item in found.items())
            excess = bill.steady + extra - bill.limit
            if excess <= 1e-9 or cost <= 0:
                continue
            surge = max(0, pace.surge - math.ceil(excess / cost - 1e-9))
            found[role] = dataclasses.replace(pace, surge=surge)
    return found
