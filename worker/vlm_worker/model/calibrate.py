"""Measures what a model's linear layers multiply, and chooses one int8 scale for each.

    prompts ─▶ model, not packed ─▶ forward pre-hooks ─▶ counts by value ─▶ percentile ─▶ scale

A hook counts a sample of the values of a call by their 65,536 bfloat16 bit patterns. So memory does
not grow with the number of calls, and percentiles of the sample are exact.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import nn

from vlm_worker.core.activation_scales import (
    LEAST_SCALE,
    MAX_ZERO,
    SYMMETRIC_ZERO,
    Layers,
    LayerScale,
)
from vlm_worker.core.model_files import ModelConfigError
from vlm_worker.core.step_values import ImageRows, SampleParams, StepInputs
from vlm_worker.model.cgroup import num_cpus
from vlm_worker.model.loader import LoadedModel, load_model
from vlm_worker.model.memory import make_kv_layout
from vlm_worker.model.rounding import linears_of, num_inputs
from vlm_worker.model.runner import ModelRunner
from vlm_worker.types import ImageItem, PreparedImage, Stage
from vlm_worker.weights import PARTS, Part

VALUES_PER_CALL: Final = 20_000
LEVELS: Final = 127
ONE_SIDED: Final = 0.1
"""Codes get a zero of their own if the least value is not below minus this share of the largest."""

BLOCK_SIZE: Final = 64
LOGIT_ROWS: Final = 16
"""Last tokens of a prompt that the head reads."""

_SIGN: Final = 1 << 15
_INFINITE: Final = 0x7F80
_SIZES: Final = torch.arange(_SIGN, dtype=torch.int16).view(torch.bfloat16).double()
"""The absolute value of each bit pattern without a sign, ascending."""


class Calibrator:
    """A model that counts the inputs of the linear layers of `parts` while it reads prompts.

    Raises:
        ModelConfigError: the model cannot be loaded, or its family does not round a part.
    """

    def __init__(self, loaded: LoadedModel, *, parts: Collection[Part], max_tokens: int) -> None:
        self._family = loaded.family
        layout = make_kv_layout(
            loaded.model.config.get_text_config(),
            "calibration",
            dtype=loaded.dtype,
            kv_dtype="auto",
            block_size=BLOCK_SIZE,
        )
        num_blocks = 2 + -(-max_tokens // BLOCK_SIZE)
        self._runner = ModelRunner(loaded, "calibration", kv_layout=layout, num_blocks=num_blocks)
        linears = linears_of(loaded.model, loaded.family.spec)
        self._linears = {part: linears[part] for part in PARTS if part in parts}
        self._inputs = {
            name: InputCounts(name) for layers in self._linears.values() for name in layers
        }

    def read(self, token_ids: tuple[int, ...], image: PreparedImage, offset: int) -> None:
        """Count what one prompt gives each layer; the image's placeholders begin at `offset`.

        Raises:
            ModelConfigError: the image cannot be encoded, or the model's values are not finite.
        """
        with self._counting():
            (embedding,) = self._runner.encode([image])
            if isinstance(embedding, Exception):
                raise ModelConfigError(f"the encoder fails: {embedding}")
            item = ImageItem(image.image_key, offset, image.num_tokens, image.grid_thw)
            self._runner.logits(self._step(token_ids, item, embedding))

    def scales(self, *, percentile: float, margin: float) -> Mapping[Part, Layers]:
        """The scale of each layer.

        Args:
            percentile: above 50, at most 100; larger values are clipped.
            margin: factor of the value there.

        Raises:
            ModelConfigError: a layer got no value but 0, or one that is not finite.
        """
        return {
            part: {
                name: self._scale(name, linear, percentile=percentile, margin=margin)
                for name, linear in linears.items()
            }
            for part, linears in self._linears.items()
        }

    def _scale(
        self, name: str, linear: nn.Module, *, percentile: float, margin: float
    ) -> LayerScale:
        counts = self._inputs[name]
        codes = counts.codes(percentile=percentile, margin=margin)
        return LayerScale(
            codes.scale, codes.zero, num_inputs(linear), counts.num_calls, counts.num_values
        )

    @contextlib.contextmanager
    def _counting(self) -> Iterator[None]:
        """Call the counts of each layer before it computes."""
        layers = [item for linears in self._linears.values() for item in linears.items()]
        hooks = [
            linear.register_forward_pre_hook(self._inputs[name].hook) for name, linear in layers
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _step(self, token_ids: tuple[int, ...], item: ImageItem, embedding: Any) -> StepInputs:
        """The whole prompt as one chunk."""
        size = len(token_ids)
        positions, _ = self._family.positions(token_ids, (item,))
        num_rows = min(size, LOGIT_ROWS)
        is_span = self._family.spec.attends.keeps_images_whole
        return StepInputs(
            token_ids=np.array(token_ids, np.int64),
            positions=positions,
            slot_mapping=BLOCK_SIZE + np.arange(size, dtype=np.int64),
            query_start=np.array([0, size], np.int32),
            context_lens=np.zeros(1, np.int32),
            block_table=np.arange(1, 1 + -(-size // BLOCK_SIZE), dtype=np.int32)[None],
            spans=(((item.offset, item.end),) if is_span else (),),
            image_rows=(ImageRows(embedding, 0, item.offset, item.num_tokens),),
            sample_rows=np.arange(size - num_rows, size),
            sampling=SampleParams.all_greedy(num_rows),
        )


def load_unpacked(model_dir: Path, *, num_threads: int = 0) -> LoadedModel:
    """A whole model on the CPU whose layers are modules of their own, as hooks need.

    `num_threads` of 0 is all that this process may use.

    Raises:
        ModelConfigError: as `load_model`.
    """
    torch.set_num_threads(num_threads or min(torch.get_num_threads(), num_cpus()))
    return load_model(
        model_dir,
        tuple(Stage),
        dtype="bfloat16",
        device="cpu",
        packed_weights=False,
    )


class Codes(NamedTuple):
    """Inputs as codes:  x ~ scale (c - zero)."""

    scale: float
    zero: int


class InputCounts:
    """How often a layer's inputs had each value.

    At most `VALUES_PER_CALL` values of a call are counted, drawn with a seed of the layer's name.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._counts = torch.zeros(2 * _SIGN, dtype=torch.int64)
        self._draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        self.num_calls = 0

    @property
    def num_values(self) -> int:
        """Values that were counted."""
        return int(self._counts.sum())

    def hook(self, _layer: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        """A forward pre-hook: count the first argument."""
        self.add(args[0])

    def add(self, x: torch.Tensor) -> None:
        """Count the values of one call, of any shape and float type."""
        values = x.detach().flatten()
        if values.numel() > VALUES_PER_CALL:
            drawn = torch.randint(values.numel(), (VALUES_PER_CALL,), generator=self._draw)
            values = values[drawn]
        bits = values.to(torch.bfloat16).view(torch.int16).long() & (2 * _SIGN - 1)
        self._counts += torch.bincount(bits, minlength=2 * _SIGN)
        self.num_calls += 1

    def codes(self, *, percentile: float, margin: float) -> Codes:
        """Codes whose largest value is a percentile of the absolute values, times `margin`.

        If the values have one sign but for little ones, all 255 levels are of that side of 0:
        scale = (high - low) / 255. Only positive inputs are treated so: activations such as GELU
        make them.

        Raises:
            ModelConfigError: no value but 0 was counted, or one that is not finite.
        """
        positive, negative = self._counts[:_SIGN], self._counts[_SIGN:]
        sizes = positive + negative
        if int(sizes[_INFINITE:].sum()):
            raise ModelConfigError(
                f"{self._name}: its inputs are not finite on these images; the weights are damaged "
                "or the model needs float32"
            )
        largest = _quantile(sizes, percentile)
        if largest * margin / LEVELS < LEAST_SCALE:
            raise ModelConfigError(
                f"{self._name}: its inputs are 0 on these images; give more images, or leave its "
                "part out of --parts"
            )
        # of all values: those of the other sign are as many as are left
        high = _signed_quantile(positive, negative, percentile)
        low = -_signed_quantile(negative, positive, percentile)
        if high <= 0 or low <= -ONE_SIDED * high:
            return Codes(largest * margin / LEVELS, SYMMETRIC_ZERO)
        low = min(low, 0.0)
        return Codes((high - low) * margin / MAX_ZERO, round(-low / (high - low) * MAX_ZERO))


def _quantile(counts: torch.Tensor, percentile: float) -> float:
    """The least size at or below which lie `percentile` % of the counted sizes; 0 without any."""
    total = int(counts.sum())
    if not total:
        return 0.0
    rank = max(1, math.ceil(total * percentile / 100))
    return float(_SIZES[int(torch.searchsorted(counts.cumsum(0), rank))])


def _signed_quantile(above: torch.Tensor, below: torch.Tensor, percentile: float) -> float:
    """The percentile of values with sizes `above`, if positive, and `below`, if negative."""
    total = int(above.sum() + below.sum())
    rank = max(1, math.ceil(total * percentile / 100))
    num_below = int(below.sum())
    if rank > num_below:
        return float(_SIZES[int(torch.searchsorted(above.cumsum(0), rank - num_below))])
    descending = below.flip(0).cumsum(0)
    return -float(_SIZES.flip(0)[int(torch.searchsorted(descending, rank))])
