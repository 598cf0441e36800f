"""KV bytes of sequences when they end, by modality."""

from __future__ import annotations

from typing import Final

from vlm_worker.core.measurements import Buckets, Histogram
from vlm_worker.core.sequence import Sequence
from vlm_worker.types import KVLayout, Modality

EDGES: Final = tuple(digit * 10.0**power for power in range(4, 12) for digit in (1, 2, 5))
"""Bytes: 10 kB to 500 GB."""


class KVUsage:
    """Histograms of KV bytes of ended sequences, in whole blocks. Engine thread only."""

    def __init__(self, layout: KVLayout | None) -> None:
        self._layout = layout
        self._bytes = {modality: Histogram(EDGES) for modality in (Modality.TEXT, Modality.IMAGE)}

    def add(self, sequence: Sequence) -> None:
        """Count a sequence that ended."""
        if self._layout is None:
            return
        modality = Modality.IMAGE if sequence.items else Modality.TEXT
        num_blocks = -(-sequence.num_tokens // self._layout.block_size)
        self._bytes[modality].add(num_blocks * self._layout.block_bytes)

    @property
    def buckets(self) -> tuple[tuple[Modality, Buckets], ...]:
        """The current histograms; empty if this worker has no KV."""
        if self._layout is None:
            return ()
        return tuple((modality, sizes.buckets) for modality, sizes in self._bytes.items())
