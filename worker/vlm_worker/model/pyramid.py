"""Encodes windows of images at several scales, in one call of a Qwen vision tower. Approximate.

    patches of the image ─ mean of 2x2, 4x4 pixels ─ cut ─▶ patches of each window at its scale
    ─▶ embed ─▶ window layers: one window each, its own coordinates     exact for each scale
            ─▶ full layers: all windows of an image, coordinates of scale 1   a mixture of scales
    ─▶ merger ─▶ a row per token ─▶ groups (`core.pyramid`) ─▶ kept rows

A tower without window layers (Qwen2-VL) sees the mixture in each layer. Windows at the right and
lower edge are extended by their last pixels to whole tokens. m is the processor's `merge_size`.

The states before the first full layer depend on a window's pixels alone, so a cache may keep them.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import nn

from vlm_kernels import merge_tokens
from vlm_worker.core.image_geometry import DynamicProcessor
from vlm_worker.core.pyramid import Pyramid, Window, places_of, plan, whole_windows
from vlm_worker.core.relevance import ONE, relevance_array
from vlm_worker.core.window_cache import UNKNOWN, WindowCache, window_key
from vlm_worker.errors import EngineError
from vlm_worker.reduction import WINDOW, Cells
from vlm_worker.types import PreparedImage

TOGETHER: Final = 32
"""Windows whose pixels are averaged at a time: 10 MB each of bytes in and out."""


class PyramidEncoder:
    """A Qwen tower, called with the windows of images. It shares its weights and layers.

    With a cache, a window whose state is known skips the layers before the first full one.
    """

    def __init__(
        self,
        tower: Any,
        processor: DynamicProcessor,
        *,
        cache: WindowCache | None = None,
        model: bytes = b"",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`model` is part of the cache's keys.

        Raises:
            EngineError: the tower has windows of another size.
        """
        wanted = WINDOW * processor.factor
        if getattr(tower, "window_size", wanted) != wanted:
            raise EngineError(
                f"arrcocpyramid needs windows of {wanted} pixels in the vision tower, not "
                f"{tower.window_size}"
            )
        self._tower, self._processor = tower, processor
        self._device = next(tower.parameters()).device
        self._unit = processor.merge_size**2
        self._cache, self._model, self._clock = cache, model, clock
        self._full = frozenset(getattr(tower, "fullatt_block_indexes", range(len(tower.blocks))))
        self._num_first = min(self._full, default=len(tower.blocks))

    def encode(
        self, images: Sequence[PreparedImage], values: Sequence[np.ndarray]
    ) -> list[tuple[torch.Tensor, np.ndarray]]:
        """Encode images whose reduction is ARRCOC_PYRAMID, in one call.

        `values` are their patches, float32 `[h*w * patch_dim]` each.

        Returns:
            For each image its kept rows `[N, D]`, not views of others, and their places, int16
            `[N, 2]`.

        Raises:
            EngineError: an image has no relevance of its pixels.
        """
        pyramids = [_pyramid_of(image) for image in images]
        rows = self._rows(images, values, [pyramid.windows for pyramid in pyramids])
        kept = []
        for rows_TD, pyramid in zip(rows, pyramids, strict=True):
            sources = torch.tensor([source for group in pyramid.groups for source in group])
            edges = _edges(list(map(len, pyramid.groups))).long()
            kept.append((merge_tokens(rows_TD, sources, edges), pyramid.places))
        return kept

    def encode_whole(
        self, images: Sequence[PreparedImage], values: Sequence[np.ndarray]
    ) -> list[torch.Tensor]:
        """All rows `[R * C, D]` of images, in raster order: those of the tower, up to rounding."""
        windows = [whole_windows(image.cells) for image in images]
        found = []
        for image, rows_TD, parts in zip(
            images, self._rows(images, values, windows), windows, strict=True
        ):
            places = np.concatenate([places_of(part) for part in parts]).astype(np.int64)
            order = np.argsort(places[:, 0] * image.cells[1] + places[:, 1])
            found.append(rows_TD[torch.from_numpy(order).to(rows_TD.device)])
        return found

    def run(
        self,
        patches: np.ndarray,
        images: Sequence[Sequence[Window]],
        tags: Sequence[Tag] | None = None,
    ) -> torch.Tensor:
        """The rows of all tokens `[T, D]`, of the patches of each image's windows, in order.

        `patches` is float32 `[m^2 T, patch_dim]`. Windows with `tags` may use the cache; then the
        call moves those of the others to the front of `patches`.
        """
        windows = list(itertools.chain(*images))
        if self._cache is None or tags is None:
            x = self._first_layers(patches, windows)
        else:
            x = self._cached_layers(self._cache, patches, windows, tags)
        own, whole = (self._rope(windows, at_scale_1=scale) for scale in (False, True))
        of_windows = self._segments(window.num_tokens for window in windows)
        of_images = self._segments(sum(one.num_tokens for one in image) for image in images)
        for number, block in enumerate(self._tower.blocks):
            if number < self._num_first:
                continue
            is_full = number in self._full
            x = block(
                x,
                cu_seqlens=of_images if is_full else of_windows,
                position_embeddings=whole if is_full else own,
            )
        rows: torch.Tensor = self._tower.merger(x)
        return rows

    def _rows(
        self,
        images: Sequence[PreparedImage],
        values: Sequence[np.ndarray],
        windows: Sequence[Sequence[Window]],
    ) -> list[torch.Tensor]:
        """The rows of each image's windows, views of one tensor."""
        counts = [sum(part.num_tokens for part in some) for some in windows]
        patches = np.empty((self._unit * sum(counts), self._processor.patch_dim), np.float32)
        edges = [self._unit * edge for edge in itertools.accumulate(counts[:-1])]
        for part, one, image, some in zip(
            np.split(patches, edges), values, images, windows, strict=True
        ):
            packed_windows(one, image.cells, some, self._processor, out=part)
        tags = [
            _tag(image, part) for image, some in zip(images, windows, strict=True) for part in some
        ]
        rows = self.run(patches, windows, tags)
        return list(torch.split(rows, counts))

    def _first_layers(self, patches: np.ndarray, windows: Sequence[Window]) -> torch.Tensor:
        """The states `[m^2 T, D]` before the first full layer, of the windows' patches."""
        weight = next(self._tower.patch_embed.parameters())
        x: torch.Tensor = self._tower.patch_embed(
            torch.from_numpy(patches).to(self._device, weight.dtype)
        )
        rope = self._rope(windows, at_scale_1=False)
        segments = self._segments(window.num_tokens for window in windows)
        for block in self._tower.blocks[: self._num_first]:
            x = block(x, cu_seqlens=segments, position_embeddings=rope)
        return x

    def _cached_layers(
        self,
        cache: WindowCache,
        patches: np.ndarray,
        windows: Sequence[Window],
        tags: Sequence[Tag],
    ) -> torch.Tensor:
        """`_first_layers` of the windows that are not cached, between the states of the others.

        Moves the patches of the former to the front of `patches`: it copies none.
        """
        now = self._clock()
        lengths = [self._unit * window.num_tokens for window in windows]
        parts = np.split(patches, np.cumsum(lengths)[:-1])
        keys = [
            window_key(self._model, tag.salt, window.level, window.shape, part)
            for window, tag, part in zip(windows, tags, parts, strict=True)
        ]
        states = [cache.get(key, now=now) for key in keys]
        missing = [number for number, state in enumerate(states) if state is None]
        if missing:
            computed = self._first_layers(
                _moved_to_front(patches, [parts[number] for number in missing]),
                [windows[number] for number in missing],
            )
            new = torch.split(computed, [lengths[number] for number in missing])
            for number, part in zip(missing, new, strict=True):
                states[number] = part
                state = part.clone()  # a view would keep the whole call's states
                relevance = tags[number].relevance
                cache.put(keys[number], state, num_bytes=state.nbytes, relevance=relevance, now=now)
            if len(missing) == len(states):
                return computed
        return torch.cat(states)

    def _segments(self, num_tokens: Iterable[int]) -> torch.Tensor:
        return _edges([self._unit * count for count in num_tokens]).to(self._device)

    def _rope(
        self, windows: Sequence[Window], *, at_scale_1: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines `[m^2 T, head_dim]` of patches (`patch_places`)."""
        merge = self._processor.merge_size
        places = np.concatenate(
            [patch_places(one, merge, at_scale_1=at_scale_1) for one in windows]
        )
        ids = torch.from_numpy(places).to(self._device)
        cos, sin = self._tower.rotary_pos_emb(ids, ids)
        return cos, sin


class Tag(NamedTuple):
    """What the cache knows of a window besides its pixels; `relevance` is 0 to 1."""

    salt: bytes
    relevance: float


def _tag(image: PreparedImage, window: Window) -> Tag:
    if not image.relevance:
        return Tag(image.salt, UNKNOWN)
    cells = relevance_array(image.relevance, image.cells)
    part = cells[window.top :, window.left :][: window.rows, : window.columns]
    return Tag(image.salt, (1 + float(part.mean())) / (1 + ONE))


def _pyramid_of(image: PreparedImage) -> Pyramid:
    if not image.relevance:
        raise EngineError("arrcocpyramid needs the relevance of the image's pixels")
    return plan(relevance_array(image.relevance, image.cells), image.kept_tokens)


def _moved_to_front(patches: np.ndarray, parts: Sequence[np.ndarray]) -> np.ndarray:
    """The first rows of `patches`, after `parts`, ordered views of its rows, are moved there."""
    end = 0
    for part in parts:
        start, end = end, end + len(part)
        patches[start:end] = part  # never behind where it is: numpy copies rows that overlap first
    return patches[:end]


def packed_windows(
    values: np.ndarray,
    cells: Cells,
    windows: Sequence[Window],
    processor: DynamicProcessor,
    *,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """The patches of each window at its scale, float32 `[m^2 T, patch_dim]`, window by window.

    Args:
        values: the image's patches, float32, grouped by cell (`media.patches`).
        cells: of the image.
        windows: with their levels.
        processor: of the patches.
        out: C-contiguous memory of the result; None for new memory.
    """
    image = values.reshape(*cells, -1)
    starts = _edges([window.num_tokens for window in windows])
    shape = int(starts[-1]), image.shape[-1]
    packed = np.empty(shape, np.float32) if out is None else out.reshape(shape)
    alike: dict[tuple[int, int, int], list[tuple[int, np.ndarray]]] = {}
    for window, start in zip(windows, starts.tolist()[:-1], strict=True):
        bottom, right = window.top + window.rows, window.left + window.columns
        seen = image[window.top : bottom, window.left : right]
        if window.level:
            alike.setdefault((*seen.shape[:2], window.level), []).append((start, seen))
        else:
            packed[start : start + window.num_tokens] = seen.reshape(window.num_tokens, -1)
    for (_, _, level), group in alike.items():
        for at in range(0, len(group), TOGETHER):
            some = group[at : at + TOGETHER]
            coarse = _coarse(np.stack([seen for _, seen in some]), level, processor)
            for (start, _), patches in zip(some, coarse, strict=True):
                packed[start : start + len(patches)] = patches
    return packed.reshape(-1, processor.patch_dim)


def _coarse(values: np.ndarray, level: int, processor: DynamicProcessor) -> np.ndarray:
    """The tokens of windows at a level, `[W, T, m^2 * patch_dim]`, of their cells `[W, R, C, ...]`.

    A pixel is the mean of 2x2 or 4x4 ones.
    """
    merge, patch, times = processor.merge_size, processor.patch_size, processor.temporal_patch_size
    num, rows, columns, _ = values.shape
    # [W, R, C, m, m, c, t, y, x] -> [W, c, R, m, y, C, m, x]
    tiles = values.reshape(num, rows, columns, merge, merge, 3, times, patch, patch)
    planes = tiles[:, :, :, :, :, :, 0].transpose(0, 5, 1, 3, 6, 2, 4, 7)
    side, step = merge * patch, 1 << level
    planes = planes.reshape(num, 3, rows * side, columns * side)
    missing = [(0, -count % step * side) for count in (rows, columns)]
    planes = np.pad(planes, [(0, 0), (0, 0), *missing], mode="edge")
    for _ in range(level):
        lines = planes[:, :, 0::2] + planes[:, :, 1::2]
        planes = (lines[..., 0::2] + lines[..., 1::2]) * np.float32(0.25)
    rows, columns = (math.ceil(count / step) for count in (rows, columns))
    tiles = planes.reshape(num, 3, rows, merge, patch, columns, merge, patch)
    tiles = tiles.transpose(0, 2, 5, 3, 6, 1, 4, 7)[:, :, :, :, :, :, None]
    return np.repeat(tiles, times, axis=6).reshape(num, rows * columns, -1)


def patch_places(window: Window, merge: int, *, at_scale_1: bool) -> np.ndarray:
    """The row and column of the middle of each patch, float32 `[m^2 N, 2]`, grouped by token.

    In patches of scale 1 from the image's corner; or in the window's own ones, from its corner.
    """
    rows, columns = window.shape
    y, x = (np.arange(merge * count, dtype=np.float32) for count in (rows, columns))
    if at_scale_1:
        step = 1 << window.level
        y, x = (one * step + (step - 1) / 2 for one in (y, x))
        y, x = y + merge * window.top, x + merge * window.left
    grid = np.stack(np.meshgrid(y, x, indexing="ij"), axis=-1)
    grid = grid.reshape(rows, merge, columns, merge, 2).transpose(0, 2, 1, 3, 4)
    return np.ascontiguousarray(grid.reshape(-1, 2), np.float32)


def _edges(lengths: Sequence[int]) -> torch.Tensor:
    return torch.tensor(list(itertools.accumulate(lengths, initial=0)), dtype=torch.int32)


def tower_of(model: nn.Module) -> Any:
    """The vision tower of a Qwen model; None if no module of it has blocks and a merger."""
    for tower in model.modules():
        if isinstance(getattr(tower, "blocks", None), nn.ModuleList) and hasattr(tower, "merger"):
            return tower
    return None
