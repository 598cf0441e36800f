"""How much KV an answer had taken when it ended, by what its request brought."""

from __future__ import annotations

from typing import Final

from vlm_worker.core.histogram import Buckets, Histogram
from vlm_worker.core.sequence import Sequence
from vlm_worker.types import KVLayout, Modality

EDGES: Final = tuple(digit * 10.0**power for power in range(4, 12) for digit in (1, 2, 5))
"""Bytes: 10 kB to 500 GB."""


class KVUsage:
    """Counts the answers that ended here, in bytes of whole blocks. Lives on the engine thread."""

    def __init__(self, layout: KVLayout | None) -> None:
        self._layout = layout
        self._bytes = {modality: Histogram(EDGES) for modality in (Modality.TEXT, Modality.IMAGE)}

    def add(self, sequence: Sequence) -> None:
        """An answer ended."""
        if self._layout is None:
            return
        modality = Modality.IMAGE if sequence.items else Modality.TEXT
        num_blocks = -(-sequence.num_tokens // self._layout.block_size)
        self._bytes[modality].add(num_blocks * self._layout.block_bytes)

    @property
    def buckets(self) -> tuple[tuple[Modality, Buckets], ...]:
        """As of now; nothing where no KV is."""
        if self._layout is None:
            return ()
        return tuple((modality, sizes.buckets) for modality, sizes in self._bytes.items())
