"""How the queries of one step become tiles, and how long sequences are split. Pure: numpy.

    a tile      some queries of one sequence, all G query heads of one KV head: rows (query, head)
    a launch    tiles of one height; decoding sequences have few rows, chunks of prefill many
    a split     a part of the positions that a tile sees; where tiles are too few for the GPU,
                several programs share one, and a second kernel combines what they found

What a query sees is an interval `[first, limit)` (`segments.seen_by`), so masks, windows and spans
are two integers per query.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from vlm_kernels.segments import seen_by

DECODE_ROWS = 16
"""The least that a tensor core multiplies."""

MIN_SPLIT = 256
"""Positions that are worth a program of their own."""

MAX_SPLITS = 64


@dataclasses.dataclass(frozen=True, slots=True)
class Launch:
    """Tiles of one height.

    Attributes:
        tiles: int32 `[N, 3]`: sequence, first packed token, number of queries.
        num_rows: of a tile, a power of two, at least queries times G.
        longest: positions that the tile with most of them sees.
    """

    tiles: np.ndarray
    num_rows: int
    longest: int


def intervals(
    query_start: np.ndarray,
    context_lens: np.ndarray,
    *,
    spans: Sequence[Sequence[tuple[int, int]]] = (),
    window: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """What each packed query sees: `first` and `limit`, int32 `[T]` each.

    Raises:
        ValueError: a span that a query lies in ends behind what the sequence has.
    """
    num_queries = np.diff(query_start)
    start = np.repeat(context_lens - query_start[:-1], num_queries)
    position = start + np.arange(query_start[-1])
    first, limit = seen_by(position, window=window)
    for s, of_sequence in enumerate(spans):
        if not len(of_sequence):
            continue
        mine = slice(int(query_start[s]), int(query_start[s + 1]))
        num_kv = int(context_lens[s] + num_queries[s])
        _, limit[mine] = seen_by(position[mine], spans=of_sequence)
        if limit[mine].max() > num_kv:
            raise ValueError(f"sequence {s}: a span ends behind its {num_kv} positions")
    return first.astype(np.int32), limit.astype(np.int32)


def launches(
    query_start: np.ndarray,
    first: np.ndarray,
    limit: np.ndarray,
    *,
    num_groups: int,
    prefill_rows: int,
) -> tuple[Launch, ...]:
    """Cut the packed queries into tiles: at most one launch for decode and one for prefill.

    `prefill_rows` is of a tile of prefill, as far as one query's heads are no more.
    """
    num_queries = np.diff(query_start)
    small = decode_rows(num_groups)
    found = []
    for seqs, num_rows in (
        (np.flatnonzero(num_queries * num_groups <= small), small),
        (np.flatnonzero(num_queries * num_groups > small), max(prefill_rows, small)),
    ):
        if len(seqs):
            tiles = np.array(list(_cut(query_start, seqs, num_rows // num_groups)), np.int32)
            found.append(Launch(tiles, num_rows, _longest(tiles, first, limit)))
    return tuple(found)


def decode_rows(num_groups: int) -> int:
    """Rows of a tile that holds one query, or as many as are no more."""
    return max(DECODE_ROWS, _power_of_two(num_groups))


def num_splits(num_programs: int, longest: int, *, num_processors: int) -> int:
    """Programs per tile, a power of two: twice as many in all as the GPU runs side by side.

    All tiles of a launch have as many, so it depends on the whole batch: a sequence is the same to
    the last bit among others as alone where it is split as often, and else up to roundings.
    """
    wanted = min(2 * num_processors // max(1, num_programs), longest // MIN_SPLIT, MAX_SPLITS)
    return 1 << (max(1, wanted).bit_length() - 1)


def _cut(
    query_start: np.ndarray, seqs: np.ndarray, num_queries: int
) -> Iterator[tuple[int, int, int]]:
    for s in seqs.tolist():
        start, end = int(query_start[s]), int(query_start[s + 1])
        for token in range(start, end, num_queries):
            yield s, token, min(num_queries, end - token)


def _longest(tiles: np.ndarray, first: np.ndarray, limit: np.ndarray) -> int:
    """Of a tile's queries the first has the least `first`; any may have the greatest limit."""
    starts = tiles[:, 1]
    edges = np.stack([starts, starts + tiles[:, 2]], axis=1).ravel()
    # from edge to edge, so every second maximum is of a tile; the 0 is where the last one ends
    ends = np.maximum.reduceat(np.append(limit, 0), edges)[::2]
    return int((ends - first[starts]).max())


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
