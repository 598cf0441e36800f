"""Layers of a vision tower in one call, for CPUs that multiply bfloat16.

    x = x + o(attend(rope(q), rope(k), v)),   q, k, v = qkv(norm(x))
    x = x + down(act(up(norm(x)))),           or with gated weights down(act(gate) * up)

Patches see each other inside segments: an image, or a window of it. Each kernel is that of its own
file, so the result equals that of calling them one by one, bit for bit (`layers_reference.py`).
Threads are woken once, and intermediate results use memory that is kept (`native_layers`).

    layers = VisionLayers([weights, ...], heads)      once per model
    layers(x, segments, (cos, sin))                   in place

Shapes: T packed patches, D features, H heads, E head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vlm_kernels.flash_attention import segments_of_rows
from vlm_kernels.layer_weights import Heads, LayerWeights, check, check_layer, lay_out
from vlm_kernels.native_layers import Input, Kind, at, check_rows, check_tables, run_layers
from vlm_kernels.segments import Segments


class VisionLayers:
    """Consecutive layers of one model, all over the same segments."""

    def __init__(self, layers: Sequence[LayerWeights], heads: Heads) -> None:
        """Check and lay out the weights, and keep references to them.

        Raises:
            ValueError: a shape or type is wrong; the text says which.
        """
        check(len(layers) > 0, "there is no layer")
        self._layers, self._heads = tuple(layers), heads
        self._width = layers[0].qkv.weights.num_inputs
        for layer in layers:
            check(layer.kind == 0, f"a vision layer is of kind {layer.kind}, not 0")
            check_layer(layer, heads, width=self._width)
        self._weights = lay_out(layers)

    def split(self, number: int) -> tuple[VisionLayers, VisionLayers]:
        """The first `number` layers, and the others; both need at least one. Weights are shared."""
        first, others = self._layers[:number], self._layers[number:]
        return VisionLayers(first, self._heads), VisionLayers(others, self._heads)

    def __call__(
        self,
        x_TD: torch.Tensor,
        segments: Segments,
        positions: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """Compute, in place.

        Args:
            x_TD: bfloat16, contiguous; overwritten with the output of the last layer.
            segments: of all patches; without a block table.
            positions: cos and sin `[T, E]`, contiguous, bfloat16 or float32; None: no rotation.

        Raises:
            ValueError: a shape, type or stride is wrong; the text says which.
        """
        heads, num_patches = self._heads, len(x_TD)
        check_rows(x_TD, self._width)
        planned = int(segments.num_queries.sum())
        fits = planned == num_patches and len(segments.first) <= num_patches
        check(fits, f"{num_patches} patches, the segments have {planned}")
        tables = positions or ()
        check_tables(tables, (num_patches, heads.head_dim))
        chunks = segments_of_rows(segments, num_patches, heads.num_kv_heads, heads.head_dim)
        chunks.num_groups = heads.num_groups
        given = Input(
            x=x_TD.data_ptr(),
            num_tokens=num_patches,
            width=self._width,
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            has_bf16_tables=any(table.dtype == torch.bfloat16 for table in tables),
            num_threads=torch.get_num_threads(),
        )
        kind = Kind(*(table.data_ptr() for table in tables), chunks=at(chunks))
        run_layers(given, self._weights, (Kind * 1)(kind))
