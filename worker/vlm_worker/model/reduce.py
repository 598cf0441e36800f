"""Chooses and averages rows of an embedding: the arithmetic of `vlm_worker.reduction`.

    rows ─ rank ─▶ Groups: the source rows of each kept token, and its place ─ merge_tokens ─▶ rows

Methods and sources:

    DIVERSE  DivPrune, arXiv 2503.02175: the greedy solution of max-min cosine distance
    ZIP      VisionZip, arXiv 2412.04467: dominant tokens by received attention, contextual tokens
             by similarity. Towers without a class token rank by the mean attention from all patches
    MERGE    Ward's criterion over adjacent cells: |A||B| / (|A|+|B|) * |mean(A) - mean(B)|^2
    POOL     the mean of blocks
    ARRCOC   regions, by the relevance of the pixels (`core.relevance`)

Kept tokens are in raster order of their places. DIVERSE's order is nested: its first k rows are the
choice of k, so that one ranking serves every lower share.
"""

from __future__ import annotations

import dataclasses
import heapq
from typing import Final

import numpy as np
import torch
from torch.nn import functional

from vlm_kernels import merge_tokens
from vlm_worker.core.relevance import allocate, relevance_array
from vlm_worker.errors import EngineError
from vlm_worker.reduction import POOL_BLOCKS, Cells, Method, Reduction
from vlm_worker.types import PreparedImage

DOMINANT_SHARE: Final = 54 / 64
"""ZIP: the share of dominant tokens, as in VisionZip's settings (54 and 10 of 64)."""
BLOCK_ROWS: Final = 1024
"""Rows of the cosine matrix at a time: an image of 16,384 tokens would need 1 GiB at once."""
MAX_MATRIX_ROWS: Final = 4096
"""Rows up to which DIVERSE keeps the whole matrix, 64 MiB: a choice then reads one row of it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Groups:
    """N kept tokens: token n is the mean of the rows `sources[edges[n] : edges[n + 1]]`.

    `sources` and `edges` are int64 on the CPU. `places` is int16 [N, 2], row and column in cells.
    """

    sources: torch.Tensor
    edges: torch.Tensor
    places: np.ndarray


@dataclasses.dataclass(slots=True)
class Rankings:
    """What is known about the rows of one embedding; all its reductions share it.

    Attributes:
        scores: float32 [T], the attention that each row received; None if it was not computed.
        relevance: uint16 [R, C], of the pixels; None if it was not computed.
        order: DIVERSE's choice, as far as it was computed.
        groups: of the reductions that were asked for.
    """

    scores: torch.Tensor | None = None
    relevance: np.ndarray | None = None
    order: list[int] = dataclasses.field(default_factory=list)
    groups: dict[Reduction, Groups] = dataclasses.field(default_factory=dict)

    def learn(self, image: PreparedImage) -> None:
        """Keep the relevance of the pixels of the embedding's image, if it has some."""
        if self.relevance is None and image.relevance:
            self.relevance = relevance_array(image.relevance, image.cells)

    def can(self, reduction: Reduction) -> bool:
        """Whether `rank` has what the method needs besides the rows."""
        match reduction.method:
            case Method.ZIP:
                return self.scores is not None
            case Method.ARRCOC:
                return self.relevance is not None
            case method:
                return not method.is_approximate


def rank(rows_TD: torch.Tensor, cells: Cells, reduction: Reduction, known: Rankings) -> Groups:
    """The groups of a reduction, computed once per embedding.

    Raises:
        EngineError: the rows are not the image's cells, ZIP has no scores, or ARRCOC no relevance
            of these cells.
    """
    if len(rows_TD) != cells[0] * cells[1]:
        raise EngineError(f"an embedding of {len(rows_TD)} rows is no image of {cells} cells")
    groups = known.groups.get(reduction)
    if groups is None:
        groups = known.groups[reduction] = _rank(rows_TD, cells, reduction, known)
    return groups


def merge(rows_TD: torch.Tensor, groups: Groups) -> torch.Tensor:
    """The kept rows, `[N, D]`; not a view of `rows_TD`."""
    return merge_tokens(rows_TD, groups.sources, groups.edges)


def _rank(rows_TD: torch.Tensor, cells: Cells, reduction: Reduction, known: Rankings) -> Groups:
    num_kept = reduction.num_tokens(cells)
    match reduction.method:
        case Method.POOL:
            return _grouped(pooled(cells, POOL_BLOCKS[reduction.keep_permille]), cells)
        case Method.MERGE:
            return _grouped(merged(rows_TD.float().cpu().numpy(), cells, num_kept), cells)
        case Method.ZIP:
            if known.scores is None:
                raise EngineError("zip needs the attention scores of the vision tower")
            return _grouped(zipped(rows_TD, known.scores, num_kept), cells)
        case Method.ARRCOC:
            if known.relevance is None or known.relevance.shape != cells:
                raise EngineError("arrcoc needs the relevance of the image's cells")
            return _grouped(allocate(known.relevance, num_kept), cells)
        case Method.ARRCOC_PYRAMID:
            raise EngineError("arrcocpyramid has no rows of the whole image")
        case Method.DIVERSE:
            if len(known.order) < num_kept:
                likely = len(rows_TD) // 2 if len(rows_TD) <= MAX_MATRIX_ROWS else 0
                known.order = diverse_order(rows_TD, max(num_kept, likely))
            return _grouped([[i] for i in known.order[:num_kept]], cells)


def _grouped(groups: list[list[int]], cells: Cells) -> Groups:
    """Groups in raster order of their places; the first source of a group is its place."""
    ordered = sorted(groups)
    sources = [source for group in ordered for source in group]
    edges = np.cumsum([0, *map(len, ordered)])
    first = np.array([group[0] for group in ordered], np.int64)
    places = np.stack(np.divmod(first, cells[1]), axis=1).astype(np.int16)
    return Groups(torch.tensor(sources), torch.from_numpy(edges), places)


def diverse_order(rows_TD: torch.Tensor, num_kept: int) -> list[int]:
    """Indices of rows, the most diverse first: each is farthest from all before it.

    The first one is farthest from its nearest neighbour. Ties go to the lower index on CPUs.
    """
    x = functional.normalize(rows_TD.float(), dim=1)
    if len(x) == 1:
        return [0]
    cosines = _cosines(x, 0, len(x)) if len(x) <= MAX_MATRIX_ROWS else None
    order = [_most_apart(x, cosines)]
    closest = torch.full((len(x),), -2.0, device=x.device)
    while len(order) < num_kept:
        last = order[-1]
        to_last = x @ x.index_select(0, last)[0] if cosines is None else cosines[last][0]
        closest = torch.maximum(closest, to_last)
        closest.index_fill_(0, last, 4.0)  # beyond every cosine: it is not chosen again
        order.append(closest.argmin(dim=0, keepdim=True))
    indices: list[int] = torch.cat(order).tolist()
    return indices


def _most_apart(x_TD: torch.Tensor, cosines_TT: torch.Tensor | None) -> torch.Tensor:
    """The row that is farthest from its nearest neighbour, int64 [1]; the least cosine is that."""
    if cosines_TT is not None:
        nearest = cosines_TT.amax(dim=1)
    else:
        blocks = range(0, len(x_TD), BLOCK_ROWS)
        nearest = torch.cat([_cosines(x_TD, at, BLOCK_ROWS).amax(dim=1) for at in blocks])
    return nearest.argmin(dim=0, keepdim=True)


def _cosines(x_TD: torch.Tensor, at: int, count: int) -> torch.Tensor:
    """Cosines of `count` rows from `at` on with all rows; -2 of a row with itself."""
    cosines = x_TD[at : at + count] @ x_TD.T
    cosines[:, at : at + count].fill_diagonal_(-2.0)
    return cosines


def zipped(rows_TD: torch.Tensor, scores_T: torch.Tensor, num_kept: int) -> list[list[int]]:
    """Dominant rows alone, and contextual groups of the others; a group's target is first.

    VisionZip compares keys of the tower's attention; this compares the rows themselves.
    """
    num_dominant = max(1, round(DOMINANT_SHARE * num_kept))
    order = torch.argsort(scores_T.cpu(), descending=True, stable=True)
    dominant, rest = order[:num_dominant], order[num_dominant:].sort().values
    groups = [[i] for i in dominant.tolist()]
    num_targets = num_kept - num_dominant
    if not num_targets:
        return groups
    step = max(1, len(rest) // num_targets)
    targets = rest[::step][:num_targets]
    x = functional.normalize(rows_TD.float(), dim=1)
    nearest = (x[rest.to(x.device)] @ x[targets.to(x.device)].T).argmax(dim=1).cpu()
    members: list[list[int]] = [[target] for target in targets.tolist()]
    is_target = set(targets.tolist())
    for row, target in zip(rest.tolist(), nearest.tolist(), strict=True):
        if row not in is_target:
            members[target].append(row)
    return groups + members


def pooled(cells: Cells, block: Cells) -> list[list[int]]:
    """Groups of the cells of each block; blocks at the right and lower edge may be smaller."""
    index = np.arange(cells[0] * cells[1]).reshape(cells)
    return [
        index[row : row + block[0], column : column + block[1]].flatten().tolist()
        for row in range(0, cells[0], block[0])
        for column in range(0, cells[1], block[1])
    ]


def merged(rows_TD: np.ndarray, cells: Cells, num_kept: int) -> list[list[int]]:
    """Join the two adjacent regions of least Ward cost until `num_kept` are left.

    The first member of a region is the one nearest to the region's centre.
    """
    means = dict(enumerate(rows_TD.astype(np.float64)))
    members = {i: [i] for i in means}
    adjacent = _adjacent(cells)
    version = dict.fromkeys(means, 0)

    def cost(i: int, j: int) -> tuple[float, int, int, int, int]:
        difference = means[i] - means[j]
        a, b = len(members[i]), len(members[j])
        return a * b / (a + b) * float(difference @ difference), i, j, version[i], version[j]

    heap = [cost(i, j) for i, others in adjacent.items() for j in others if i < j]
    heapq.heapify(heap)
    while len(means) > num_kept:
        _, i, j, *versions = heapq.heappop(heap)
        if i not in means or j not in means or versions != [version[i], version[j]]:
            continue
        a, b = len(members[i]), len(members[j])
        means[i] = (means[i] * a + means.pop(j) * b) / (a + b)
        members[i] += members.pop(j)
        version[i] += 1
        for other in adjacent.pop(j):
            adjacent[other].discard(j)
            if other != i:
                adjacent[other].add(i)
                adjacent[i].add(other)
        for other in adjacent[i]:
            heapq.heappush(heap, cost(min(i, other), max(i, other)))
    return [_centre_first(region, cells) for region in members.values()]


def _adjacent(cells: Cells) -> dict[int, set[int]]:
    """The neighbours of each cell, left, right, above and below."""
    rows, columns = cells
    adjacent: dict[int, set[int]] = {i: set() for i in range(rows * columns)}
    for i in adjacent:
        beside = i + 1 if (i + 1) % columns else None
        below = i + columns if i + columns < rows * columns else None
        for other in (beside, below):
            if other is not None:
                adjacent[i].add(other)
                adjacent[other].add(i)
    return adjacent


def _centre_first(region: list[int], cells: Cells) -> list[int]:
    places = np.stack(np.divmod(np.array(sorted(region)), cells[1]), axis=1)
    distances = ((places - places.mean(axis=0)) ** 2).sum(axis=1)
    ordered = sorted(region)
    return [ordered.pop(int(distances.argmin())), *ordered]
