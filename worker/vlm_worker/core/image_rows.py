"""The embedding rows that a chunk of a prompt reads, and the positions of reduced images. Pure."""

from __future__ import annotations

import numpy as np

from vlm_worker.core.sequence import Sequence
from vlm_worker.core.step_values import ImageRows


def image_rows_of(sequence: Sequence, start: int, count: int, at: int) -> list[ImageRows]:
    """The embedding rows that the chunk `[start, start + count)` of a sequence reads.

    `at` is the packed position of its first token. The embeddings of all its images are here.
    """
    rows = []
    for number, item in enumerate(sequence.items):
        first, last = max(start, item.offset), min(start + count, item.end)
        if first < last:
            embedding = sequence.embeddings[number]
            assert embedding is not None, "a chunk was planned over an image without an embedding"
            places = None if item.reduction is None else embedding.places
            rows.append(
                ImageRows(embedding, first - item.offset, at + first - start, last - first, places)
            )
    return rows


def add_places(positions: np.ndarray, image_rows: list[ImageRows]) -> None:
    """Move the tokens of reduced images to the row and column of their cells (M-RoPE alone)."""
    for rows in image_rows:
        if rows.places is not None and len(positions) == 3:
            places = rows.places[rows.src_start : rows.src_start + rows.num_rows]
            positions[1:3, rows.dst_start : rows.dst_start + rows.num_rows] += places.T
