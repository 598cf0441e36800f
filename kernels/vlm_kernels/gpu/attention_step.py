"""The input of one step of paged attention on the device: tiles, tables and intervals.

plan_tiles(...)      of any step: computed on the host, then copied
decode_tiles(...)    of a captured decode step: arrays that are filled before each replay

    a tile      some queries of one sequence, all G query heads of one KV head: rows (query, head)
    a launch    tiles of one height; decoding sequences have few rows, chunks of prefill many
    a split     a part of the positions that a tile sees; if there are too few tiles for the GPU,
                several programs share one, and a second kernel combines their results

A query sees the interval `[first, limit)` of positions (`segments.seen_by`), so masks, windows and
spans are two integers per query.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from vlm_kernels import gpu
from vlm_kernels.segments import seen_by

DECODE_ROWS = 16
"""The smallest number of rows that a tensor core multiplies."""

MIN_SPLIT = 256
"""The smallest number of positions for which a separate program is faster."""

MAX_SPLITS = 64


@dataclasses.dataclass(frozen=True, slots=True)
class LaunchPlan:
    """Tiles of one height, on the host.

    Attributes:
        tiles: int32 `[N, 3]`: sequence, first packed token, number of queries.
        num_rows: of a tile, a power of two, at least queries times G.
        longest: the largest number of positions that a tile sees.
    """

    tiles: np.ndarray
    num_rows: int
    longest: int


@dataclasses.dataclass(frozen=True, slots=True)
class Launch:
    """Tiles on the device; `num_splits` programs share each."""

    tiles: torch.Tensor
    num_rows: int
    num_splits: int


@dataclasses.dataclass(frozen=True, slots=True)
class CacheShape:
    """The shape of the cache that a plan was checked for; it must not be used with another."""

    num_blocks: int
    num_kv_heads: int
    block_size: int


@dataclasses.dataclass(frozen=True, slots=True)
class TiledStep:
    """The input of one step on the device, for all layers with the same window.

    Attributes:
        launches: decoding sequences, chunks of prefill, or both.
        block_table: int32 `[S, B]`, block numbers of `cache`.
        first: int32 `[T]`, the first position that each query sees.
        limit: int32 `[T]`, the last position plus one.
        num_groups: G; each tile has whole groups.
    """

    launches: tuple[Launch, ...]
    block_table: torch.Tensor
    first: torch.Tensor
    limit: torch.Tensor
    num_groups: int
    cache: CacheShape


def plan_tiles(
    query_start: np.ndarray,
    context_lens: np.ndarray,
    block_table: np.ndarray,
    *,
    num_groups: int,
    cache: CacheShape,
    prefill_rows: int,
    device: torch.device,
    spans: Sequence[Sequence[tuple[int, int]]] = (),
    window: int | None = None,
    spans_exceed_window: bool = False,
) -> TiledStep:
    """Divide one step into tiles and copy them to the device in one copy.

    The arguments are those of `plan_attention`, which has checked them; `num_groups` is G, and
    `prefill_rows` the rows of a prefill tile (`attention_shapes`).

    Raises:
        ValueError: a span ends after its sequence.
    """
    first, limit = intervals(
        query_start,
        context_lens,
        spans=spans,
        window=window,
        spans_exceed_window=spans_exceed_window,
    )
    planned = launches(query_start, first, limit, num_groups=num_groups, prefill_rows=prefill_rows)
    arrays = [first, limit, block_table, *(launch.tiles for launch in planned)]
    first_T, limit_T, table, *tiles = _to_device(arrays, device)
    processors = gpu.num_processors(device)
    return TiledStep(
        launches=tuple(
            Launch(
                tiles=on_device,
                num_rows=launch.num_rows,
                num_splits=num_splits(
                    len(launch.tiles) * cache.num_kv_heads,
                    launch.longest,
                    num_processors=processors,
                ),
            )
            for launch, on_device in zip(planned, tiles, strict=True)
        ),
        block_table=table,
        first=first_T,
        limit=limit_T,
        num_groups=num_groups,
        cache=cache,
    )


def decode_tiles(
    first_S: torch.Tensor,
    limit_S: torch.Tensor,
    table_SB: torch.Tensor,
    *,
    num_groups: int,
    cache: CacheShape,
) -> TiledStep:
    """Plan one query per sequence over arrays on the device that are filled later; copy nothing.

    Sequences are split as if each filled its row of the table. The last splits of a shorter one are
    empty. `first_S`, `limit_S` and `table_SB` are int32, as in `TiledStep`; `num_groups` is G.
    """
    num_seqs, device = len(first_S), first_S.device
    seqs = torch.arange(num_seqs, dtype=torch.int32, device=device)
    splits = num_splits(
        num_seqs * cache.num_kv_heads,
        table_SB.shape[1] * cache.block_size,
        num_processors=gpu.num_processors(device),
    )
    launch = Launch(
        tiles=torch.stack([seqs, seqs, torch.ones_like(seqs)], dim=1),
        num_rows=decode_rows(num_groups),
        num_splits=splits,
    )
    return TiledStep((launch,), table_SB, first_S, limit_S, num_groups, cache)


def intervals(
    query_start: np.ndarray,
    context_lens: np.ndarray,
    *,
    spans: Sequence[Sequence[tuple[int, int]]] = (),
    window: int | None = None,
    spans_exceed_window: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the interval that each packed query sees: `first` and `limit`, int32 `[T]` each.

    Raises:
        ValueError: a span with a query ends after the end of its sequence.
    """
    num_queries = np.diff(query_start)
    start = np.repeat(context_lens - query_start[:-1], num_queries)
    position = start + np.arange(query_start[-1])
    first, limit = seen_by(position, window=window)
    for s, of_sequence in enumerate(spans):
        if not len(of_sequence):
            continue
        queries = slice(int(query_start[s]), int(query_start[s + 1]))
        num_kv = int(context_lens[s] + num_queries[s])
        first[queries], limit[queries] = seen_by(
            position[queries],
            spans=of_sequence,
            window=window,
            spans_exceed_window=spans_exceed_window,
        )
        if limit[queries].max() > num_kv:
            raise ValueError(f"sequence {s}: a span ends after its {num_kv} positions")
    return first.astype(np.int32), limit.astype(np.int32)


def launches(
    query_start: np.ndarray,
    first: np.ndarray,
    limit: np.ndarray,
    *,
    num_groups: int,
    prefill_rows: int,
) -> tuple[LaunchPlan, ...]:
    """Divide the packed queries into tiles: at most one launch for decode and one for prefill.

    A prefill tile has `prefill_rows` rows, or more if one query has more heads.
    """
    num_queries = np.diff(query_start)
    small = decode_rows(num_groups)
    planned = []
    for seqs, num_rows in (
        (np.flatnonzero(num_queries * num_groups <= small), small),
        (np.flatnonzero(num_queries * num_groups > small), max(prefill_rows, small)),
    ):
        if len(seqs):
            tiles = np.array(list(_tiles(query_start, seqs, num_rows // num_groups)), np.int32)
            planned.append(LaunchPlan(tiles, num_rows, _longest(tiles, first, limit)))
    return tuple(planned)


def decode_rows(num_groups: int) -> int:
    """Return the rows of a tile that has at least the heads of one query."""
    return max(DECODE_ROWS, _power_of_two(num_groups))


def num_splits(num_programs: int, longest: int, *, num_processors: int) -> int:
    """Return the programs per tile, a power of two: in all, twice those that the GPU runs at once.

    All tiles of a launch have the same number of splits, so it depends on the whole batch. The
    result of a sequence in a batch equals its result alone bit for bit if the number of splits is
    the same, and else up to roundings.
    """
    wanted = min(2 * num_processors // max(1, num_programs), longest // MIN_SPLIT, MAX_SPLITS)
    return 1 << (max(1, wanted).bit_length() - 1)


def _to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Copy arrays as int32 in one buffer, so that a step needs one copy."""
    flat = np.concatenate([array.astype(np.int32, copy=False).ravel() for array in arrays])
    buffer = torch.from_numpy(flat)
    if device.type == "cuda":
        buffer = buffer.pin_memory().to(device, non_blocking=True)
    parts = torch.split(buffer, [array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


def _tiles(
    query_start: np.ndarray, seqs: np.ndarray, num_queries: int
) -> Iterator[tuple[int, int, int]]:
    for s in seqs.tolist():
        start, end = int(query_start[s]), int(query_start[s + 1])
        for token in range(start, end, num_queries):
            yield s, token, min(num_queries, end - token)


def _longest(tiles: np.ndarray, first: np.ndarray, limit: np.ndarray) -> int:
    """The most positions that a tile reads; any of its queries may have an edge of them."""
    starts = tiles[:, 1]
    edges = np.stack([starts, starts + tiles[:, 2]], axis=1).ravel()
    # every second maximum between edges is that of a tile; the appended 0 ends the last one
    ends = np.maximum.reduceat(np.append(limit, 0), edges)[::2]
    begins = np.minimum.reduceat(np.append(first, first.max()), edges)[::2]
    return int((ends - begins).max())


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
