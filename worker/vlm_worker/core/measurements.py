"""Measurements: busy time by kind of work, histograms, and rates per second. Pure.

The autoscaler fits pod capacity to the sums of busy time:

    encode    a call is one batch, an item one image, a unit one patch; squares Σ patches²
    prefill   a call is one chunk, an item one prompt, a unit one computed token;
              squares Σ n·(h + n/2) for n tokens after h tokens that have KV
    decode    a call is one step, an item one sequence of a step, a unit one KV token of a step;
              squares Σ units² of the steps

The time of a step with prefill and decode is split in proportion to the predicted time of each part
alone. Until both kinds were measured alone, it is split by tokens.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import enum
import itertools
from collections.abc import Iterable, Mapping
from typing import Final

import numpy as np

from vlm_worker.core.block_kinds import BlockKinds
from vlm_worker.core.sequence import Sequence
from vlm_worker.core.step_time import StepTimeModel
from vlm_worker.types import KVLayout, Modality


class WorkKind(enum.StrEnum):
    ENCODE = "encode"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclasses.dataclass(frozen=True, slots=True)
class BusyTime:
    """Sums since the start of the process; the module docstring defines each field."""

    seconds: float = 0.0
    calls: int = 0
    items: int = 0
    units: int = 0
    squares: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class StepWork:
    """The work of one step. `kv_tokens` are of the `num_decodes` sequences that decode.

    Attributes:
        chunks: int64 [C], tokens of each prompt chunk.
        before: int64 [C], tokens before each chunk that have KV.
        num_prompts: prompts whose first chunk is in this step.
    """

    num_decodes: int
    kv_tokens: int
    chunks: np.ndarray
    before: np.ndarray
    num_prompts: int


class BusyTimeCounter:
    """Sums busy time by kind of work. Its owner is its only writer."""

    def __init__(self) -> None:
        self._sums: dict[WorkKind, BusyTime] = {}
        self._alone = {WorkKind.PREFILL: StepTimeModel(), WorkKind.DECODE: StepTimeModel()}

    @property
    def sums(self) -> Mapping[WorkKind, BusyTime]:
        """A copy of the sums of each kind that occurred."""
        return dict(self._sums)

    def encoded(self, patches: list[int], seconds: float) -> None:
        """Count one call of the encoder; `patches` are the patches of each image."""
        squares = float(sum(count * count for count in patches))
        self._add(WorkKind.ENCODE, seconds, 1, len(patches), sum(patches), squares)

    def stepped(self, work: StepWork, seconds: float) -> None:
        """Count one step of the language model."""
        num_tokens = int(work.chunks.sum()) if len(work.chunks) else 0
        share = self._prefill_share(num_tokens, work.num_decodes)
        if num_tokens:
            squares = float((work.chunks * (work.before + work.chunks / 2)).sum())
            counts = len(work.chunks), work.num_prompts, num_tokens
            self._add(WorkKind.PREFILL, seconds * share, *counts, squares)
        if work.num_decodes:
            counts = 1, work.num_decodes, work.kv_tokens
            self._add(WorkKind.DECODE, seconds * (1 - share), *counts, float(work.kv_tokens) ** 2)
        if not work.num_decodes:
            self._alone[WorkKind.PREFILL].observe(num_tokens, seconds)
        elif not num_tokens:
            self._alone[WorkKind.DECODE].observe(work.num_decodes, seconds)

    def _prefill_share(self, num_tokens: int, num_decodes: int) -> float:
        """The share of a step's time that prefill took: 0 to 1."""
        if not num_tokens or not num_decodes:
            return 1.0 if num_tokens else 0.0
        prefill = self._alone[WorkKind.PREFILL].predict(num_tokens, units_per_step=num_tokens)
        decode = self._alone[WorkKind.DECODE].predict(num_decodes, units_per_step=num_decodes)
        if not prefill or not decode:
            return num_tokens / (num_tokens + num_decodes)
        return prefill / (prefill + decode)

    def _add(
        self, kind: WorkKind, seconds: float, calls: int, items: int, units: int, squares: float
    ) -> None:
        sums = self._sums.get(kind, BusyTime())
        self._sums[kind] = BusyTime(
            sums.seconds + seconds,
            sums.calls + calls,
            sums.items + items,
            sums.units + units,
            sums.squares + squares,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Buckets:
    """A snapshot of a histogram: ascending upper edges, and the sum of all values.

    `counts` has one entry more than `edges`, for values above the last edge.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def cumulative(self) -> tuple[tuple[str, int], ...]:
        """Pairs (upper edge as text, count at or below it), as Prometheus; the last is `+Inf`."""
        names = [*(f"{edge:g}" for edge in self.edges), "+Inf"]
        return tuple(zip(names, itertools.accumulate(self.counts), strict=True))


class Histogram:
    """Counts values in buckets. Its owner is its only writer."""

    def __init__(self, edges: Iterable[float]) -> None:
        self._edges = sorted({_rounded(edge) for edge in edges})
        self._counts = [0] * (len(self._edges) + 1)
        self._total = 0.0

    def add(self, size: float) -> None:
        self._counts[bisect.bisect_left(self._edges, size)] += 1
        self._total += size

    def regroup(self, edges: Iterable[float]) -> None:
        """Replace the edges; old counts move to the first new edge at or above their own."""
        old_edges, old_counts = self._edges, self._counts
        self._edges = sorted({_rounded(edge) for edge in edges})
        self._counts = [0] * (len(self._edges) + 1)
        self._counts[-1] = old_counts[-1]
        for edge, count in zip(old_edges, old_counts[:-1], strict=True):
            self._counts[bisect.bisect_left(self._edges, edge)] += count

    @property
    def buckets(self) -> Buckets:
        return Buckets(tuple(self._edges), tuple(self._counts), self._total)


def _rounded(edge: float) -> float:
    """An edge at the precision of its text form, so that two edges never have the same label."""
    return float(f"{edge:g}")


KV_BYTES_EDGES: Final = tuple(digit * 10.0**power for power in range(4, 12) for digit in (1, 2, 5))
"""Bytes: 10 kB to 500 GB."""


class KVUsage:
    """Histograms of KV bytes of ended sequences, in whole blocks. Its owner is its only writer."""

    def __init__(self, layout: KVLayout | None) -> None:
        self._layout = layout
        self._kinds = None if layout is None else BlockKinds.of_layout(layout)
        self._bytes = {
            modality: Histogram(KV_BYTES_EDGES) for modality in (Modality.TEXT, Modality.IMAGE)
        }

    def add(self, sequence: Sequence) -> None:
        if self._layout is None or self._kinds is None:
            return
        modality = Modality.IMAGE if sequence.items else Modality.TEXT
        num_tokens = sequence.num_tokens - sequence.num_dropped
        num_blocks = self._kinds.of(sequence).num_blocks(num_tokens)
        self._bytes[modality].add(num_blocks * self._layout.block_bytes)

    @property
    def buckets(self) -> tuple[tuple[Modality, Buckets], ...]:
        """The current histograms; empty if this worker has no KV."""
        if self._layout is None:
            return ()
        return tuple((modality, sizes.buckets) for modality, sizes in self._bytes.items())


WINDOW_SECONDS: Final = 60.0
SAMPLE_SECONDS: Final = 1.0


class Rates:
    """Rates of counters. The owner calls `note` at least once a second while they grow."""

    def __init__(self, started: float, *, window_seconds: float = WINDOW_SECONDS) -> None:
        self.window_seconds = window_seconds
        self._started = started
        self._samples: collections.deque[tuple[float, dict[str, float]]] = collections.deque()

    def note(self, now: float, totals: Mapping[str, float]) -> None:
        """Store a sample of the counters; samples within one second are merged."""
        at = now
        if self._samples and now - self._samples[-1][0] < SAMPLE_SECONDS:
            at, _ = self._samples.pop()
        self._samples.append((at, dict(totals)))
        while len(self._samples) > 1 and self._samples[1][0] <= now - self.window_seconds:
            self._samples.popleft()

    def per_second(self, now: float, totals: Mapping[str, float]) -> dict[str, float]:
        """The mean rate of each counter over the window, or since the start if that is shorter.

        Counters begin at 0. A rate is never negative.
        """
        begin = max(self._started, now - self.window_seconds)
        before: Mapping[str, float] = {}
        for at, sample in self._samples:
            if at > begin:
                break
            before = sample
        span = max(now - begin, SAMPLE_SECONDS)
        return {
            name: max(total - before.get(name, 0.0), 0.0) / span for name, total in totals.items()
        }
