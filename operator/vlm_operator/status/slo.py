"""TTFT per modality over a window, as the status shows it: the autoscaler's own computation.

Nothing is recomputed while no request ends, so that an idle service writes nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from vlm_operator.autoscale.estimating.attribute import shares
from vlm_operator.autoscale.estimating.window import ITL, Window, percentile
from vlm_operator.autoscale.policy import Tuning
from vlm_operator.state import Sample


@dataclasses.dataclass(frozen=True)
class ModalitySlo:
    """One modality within the window; p95 in seconds, shares in percent."""

    modality: str
    count: int
    p95_seconds: float
    stages: Mapping[str, int]

    @property
    def dominant_stage(self) -> str | None:
        """The stage with the largest share, None where none is known."""
        return max(self.stages, key=lambda name: self.stages[name]) if self.stages else None


@dataclasses.dataclass(frozen=True)
class SloWindow:
    """What gateways counted within the last window, and what it said when a request last ended."""

    window: Window = dataclasses.field(default_factory=Window)
    found: tuple[ModalitySlo, ...] = ()

    def advance(self, samples: Iterable[Sample], *, now: float, window: float) -> SloWindow:
        """Take one more reading; computes anew only if a request ended since the last one."""
        advanced = self.window.advance(samples, now=now, window=window)
        if advanced is self.window:
            return self
        found = []
        for modality, tally in sorted(advanced.total(now=now, window=window).items()):
            p95 = percentile(tally.buckets, edges=advanced.edges(modality))
            if modality != ITL and p95 is not None:
                edges = advanced.stage_edges(modality)
                spent = shares(tally, min_misses=Tuning().min_misses, edges=edges)
                stages = {name: round(100 * share) for name, share in spent.items()}
                found.append(ModalitySlo(modality, tally.count, p95, stages))
        return SloWindow(advanced, tuple(found))
