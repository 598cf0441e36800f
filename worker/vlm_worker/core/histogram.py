"""How often each size came, by upper edges: what a Prometheus histogram is made of. Pure.

counts   [≤ e0] [≤ e1] ... [≤ eN] [more]      `cumulative` adds them up, as Prometheus wants them
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Iterable, Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Buckets:
    """A histogram at one moment. `counts` has one entry more than `edges`: what lies above."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def cumulative(self) -> tuple[tuple[str, int], ...]:
        """(upper edge in words, how many at or below it), the last one `+Inf`."""
        names = [*(f"{edge:g}" for edge in self.edges), "+Inf"]
        return tuple(zip(names, itertools.accumulate(self.counts), strict=True))


class Histogram:
    """Counts sizes. Its owner is its only writer."""

    def __init__(self, edges: Iterable[float]) -> None:
        self._edges = sorted({rounded(edge) for edge in edges})
        self._counts = [0] * (len(self._edges) + 1)
        self._total = 0.0

    def add(self, size: float) -> None:
        """Count one."""
        self._counts[bisect.bisect_left(self._edges, size)] += 1
        self._total += size

    def regroup(self, edges: Iterable[float]) -> None:
        """Go on with other edges; what was counted moves to the next edge at or above its own."""
        old_edges, old_counts = self._edges, self._counts
        self._edges = sorted({rounded(edge) for edge in edges})
        self._counts = [0] * (len(self._edges) + 1)
        self._counts[-1] = old_counts[-1]
        for edge, count in zip(old_edges, old_counts[:-1], strict=True):
            self._counts[bisect.bisect_left(self._edges, edge)] += count

    @property
    def edges(self) -> Sequence[float]:
        """Upper edges, ascending; sizes beyond the last are counted too."""
        return self._edges

    @property
    def buckets(self) -> Buckets:
        """As of now."""
        return Buckets(tuple(self._edges), tuple(self._counts), self._total)


def rounded(edge: float) -> float:
    """An edge as it is written, so that two that read alike are one."""
    return float(f"{edge:g}")
