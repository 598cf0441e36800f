"""Orders waiting requests of tenants by deficit round robin over seconds of work. Pure.

    tenants in turn:  a [2 s, 3 s, …]  b [9 s]  c [1 s, …]
    turn of a:        deficit += QUANTUM_SECONDS · weight; first requests go while it covers them

A turn adds to the deficit of a tenant once. What a request needs is taken from the deficit; the
rest stays for the next turn, until the tenant has no request. So a tenant whose requests wait
together with those of another gets, before each of them, its share of the work and at most one
quantum less. Within a tenant, and so with one tenant, the order is that of arrival.

    work = prompt tokens · seconds per prompt token
         + min(max_tokens, mean answer) · seconds per output token

`WorkEstimate` has the means of the requests that ended. Only ratios of estimates matter.

Shreedhar and Varghese, Efficient Fair Queuing Using Deficit Round Robin, 1995.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Final, Generic, TypeVar

T = TypeVar("T", bound=Hashable)

QUANTUM_SECONDS: Final = 1.0
"""Work that a turn of a tenant of weight 1 adds: the most by which another tenant may be ahead."""
MIN_SECONDS: Final = 0.001
"""The least work of an item: an endless line of items without work would keep the turn."""

SMOOTHING: Final = 0.05
"""Weight of the last request in each mean: about the last twenty count."""


def equal(_: str) -> float:
    """The weight of each tenant if none has another."""
    return 1.0


class FairQueue(Generic[T]):
    """Waiting items, each of a tenant. `weight_of` returns the weight of a tenant, above 0."""

    def __init__(self, weight_of: Callable[[str], float] = equal) -> None:
        self._weight_of = weight_of
        self._lines: dict[str, dict[T, float]] = {}
        """Items and their seconds, by tenant; the first tenant has the turn."""
        self._deficits: dict[str, float] = {}
        self._has_begun = False  # the first tenant has got the quantum of its turn
        self._tenants: dict[T, str] = {}

    def __len__(self) -> int:
        return len(self._tenants)

    def add(self, item: T, *, tenant: str = "", seconds: float = 0.0) -> None:
        """Add an item that needs `seconds` of work, after all others of its tenant."""
        self._tenants[item] = tenant
        self._lines.setdefault(tenant, {})[item] = max(seconds, MIN_SECONDS)
        self._deficits.setdefault(tenant, 0.0)

    def first(self) -> T | None:
        """Return the item whose turn it is, and give the turn to its tenant; None without items.

        It stays the first until it leaves.
        """
        if not self._lines:
            return None
        self._skip_rounds()
        while True:
            tenant, line = next(iter(self._lines.items()))
            if not self._has_begun:
                self._deficits[tenant] += self._quantum(tenant)
                self._has_begun = True
            item, seconds = next(iter(line.items()))
            if self._deficits[tenant] >= seconds:
                return item
            self._lines[tenant] = self._lines.pop(tenant)
            self._has_begun = False

    def take(self, item: T) -> None:
        """Remove the first item, which gets its work."""
        tenant = self._tenants[item]
        self._deficits[tenant] -= self._lines[tenant][item]
        self.discard(item)

    def discard(self, item: T) -> None:
        """Remove an item that gets no work; nothing happens if it has left."""
        tenant = self._tenants.pop(item, None)
        if tenant is None:
            return
        del self._lines[tenant][item]
        if not self._lines[tenant]:
            if tenant == next(iter(self._lines)):
                self._has_begun = False
            del self._lines[tenant], self._deficits[tenant]

    def _skip_rounds(self) -> None:
        """Add the quanta of the rounds in which nobody's deficit covers its first item."""
        num_rounds = min(
            math.ceil((next(iter(line.values())) - self._deficits[tenant]) / self._quantum(tenant))
            for tenant, line in self._lines.items()
        )
        if num_rounds > 1:
            for tenant in self._lines:
                self._deficits[tenant] += (num_rounds - 1) * self._quantum(tenant)

    def _quantum(self, tenant: str) -> float:
        return QUANTUM_SECONDS * self._weight_of(tenant)


class WorkEstimate:
    """Running means over ended requests. Until the first one, constants of a small pod."""

    def __init__(self) -> None:
        self.prompt_token_seconds = 0.001
        self.output_token_seconds = 0.02
        self.num_output_tokens = 256.0

    def seconds(self, num_prompt_tokens: int, max_tokens: int) -> float:
        """Return the seconds of work of a request; `max_tokens` bounds its answer."""
        num_output_tokens = min(max_tokens, self.num_output_tokens)
        return (
            num_prompt_tokens * self.prompt_token_seconds
            + num_output_tokens * self.output_token_seconds
        )

    def ended(
        self,
        num_prompt_tokens: int,
        num_output_tokens: int,
        *,
        prompt_seconds: float,
        output_seconds: float,
    ) -> None:
        """Record a request with one choice: the seconds of its images and prompt, and its answer.

        `output_seconds` are those after the first token.
        """
        self.num_output_tokens += SMOOTHING * (num_output_tokens - self.num_output_tokens)
        if num_prompt_tokens:
            per_token = prompt_seconds / num_prompt_tokens
            self.prompt_token_seconds += SMOOTHING * (per_token - self.prompt_token_seconds)
        if num_output_tokens > 1:
            per_token = output_seconds / (num_output_tokens - 1)
            self.output_token_seconds += SMOOTHING * (per_token - self.output_token_seconds)
