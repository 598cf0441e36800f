"""All decoder layers of a step, and the head, in one call, for CPUs that multiply bfloat16.

    x = x + o(attend(rope(q), rope(k), v)),   q, k, v = qkv(norm(x))
    x = x + down(act(gate) * up),             gate, up = up(norm(x))

Gemma 3 also has norms of q and k, and after o and down. Each kernel is that of its own file, so the
result equals that of calling them one by one, bit for bit (`layers_reference.py`). The threads are
woken once per step, not once per kernel, and Python makes one call (`native_layers`).

    layers = DecoderLayers(weights, heads)             once per model
    layers(x, kv_cache, slots, kinds)                  once per step, in place; or
    layers.logits(x, kv_cache, slots, kinds, rows)

Shapes: T packed tokens, D features, H KV heads, G query heads per KV head, E head size. Layers of a
step differ in kind if some use a sliding window, or other rotary positions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from vlm_kernels.attention_plan import AttentionPlan
from vlm_kernels.decode_attention import Step, check_cache
from vlm_kernels.flash_attention import SegmentsStep, segments_of_blocks
from vlm_kernels.kv_rows import NATIVE_TYPES, block_size_of
from vlm_kernels.layer_weights import (
    Heads,
    LayerWeights,
    Output,
    Tail,
    check,
    check_layer,
    check_tail,
    lay_out,
    output_of,
)
from vlm_kernels.native_layers import Input, Kind, at, check_rows, check_tables, run_layers
from vlm_kernels.store_kv import checked_slots


@dataclasses.dataclass(frozen=True, slots=True)
class LayerKind:
    """Values that layers of one kind share in a step: cos and sin `[T, E]`, and the plan."""

    cos: torch.Tensor
    sin: torch.Tensor
    plan: AttentionPlan


class DecoderLayers:
    """The layers of one model."""

    def __init__(
        self, layers: Sequence[LayerWeights], heads: Heads, tail: Tail | None = None
    ) -> None:
        """Check and lay out the weights, and keep references to them.

        Raises:
            ValueError: a shape or type is wrong; the text says which.
        """
        self.heads, self.tail, self._layers = heads, tail, tuple(layers)
        self._width = layers[0].qkv.weights.num_inputs
        for layer in layers:
            check_layer(layer, heads, width=self._width)
        if tail is not None:
            check_tail(tail, width=self._width)
        self._num_kinds = 1 + max(layer.kind for layer in layers)
        self._weights = lay_out(layers)

    def __call__(
        self,
        x_TD: torch.Tensor,
        kv_cache: torch.Tensor,
        slots_T: torch.Tensor,
        kinds: Sequence[LayerKind],
    ) -> None:
        """Compute one step, in place.

        Args:
            x_TD: bfloat16, contiguous; overwritten with the output of the last layer.
            kv_cache: `[N, L, 2, H, P * E]`, contiguous; new keys and values are stored.
            slots_T: int64, all different.
            kinds: of this step; their plans belong to this cache and have no groups for torch.

        Raises:
            ValueError: a shape, type, stride, slot or block number is wrong; the text says which.
        """
        self._run(x_TD, kv_cache, slots_T, kinds, None)

    def logits(
        self,
        x_TD: torch.Tensor,
        kv_cache: torch.Tensor,
        slots_T: torch.Tensor,
        kinds: Sequence[LayerKind],
        rows_R: torch.Tensor,
    ) -> torch.Tensor:
        """Compute one step and the logits of some tokens; needs a tail.

        Keys and values of all tokens are stored. After attention, the last layer computes only the
        tokens in `rows_R`: the others have no further use, and a prompt needs one.

        Args:
            x_TD: as above; its content is undefined afterwards.
            kv_cache: as above.
            slots_T: as above.
            kinds: as above.
            rows_R: int64, the tokens whose logits are needed, at most T.

        Returns:
            `[R, V]` bfloat16, every element written.

        Raises:
            ValueError: as above.
        """
        tail = self.tail
        assert tail is not None
        check(len(rows_R) <= len(x_TD), f"{len(rows_R)} rows of {len(x_TD)} tokens")
        is_row = (rows_R >= 0) & (rows_R < len(x_TD))
        check(rows_R.dtype == torch.int64 and rows_R.is_contiguous(), f"rows are {rows_R.dtype}")
        check(bool(is_row.all()), f"a row is not in 0 to {len(x_TD) - 1}")
        logits_RV = x_TD.new_empty(len(rows_R), tail.head.weights.num_outputs)
        self._run(x_TD, kv_cache, slots_T, kinds, output_of(tail, rows_R, logits_RV))
        return logits_RV

    def _run(
        self,
        x_TD: torch.Tensor,
        kv_cache: torch.Tensor,
        slots_T: torch.Tensor,
        kinds: Sequence[LayerKind],
        output: Output | None,
    ) -> None:
        self._check(x_TD, kv_cache, slots_T, kinds)
        rows = [self._rows(kind.plan, x_TD, kv_cache) for kind in kinds]
        chunks = [self._chunks(kind.plan, x_TD, kv_cache) for kind in kinds]
        table = (Kind * len(kinds))(
            *(
                Kind(kind.cos.data_ptr(), kind.sin.data_ptr(), at(row), at(chunk))
                for kind, row, chunk in zip(kinds, rows, chunks, strict=True)
            )
        )
        given = Input(
            x=x_TD.data_ptr(),
            cache=kv_cache.data_ptr(),
            slots=slots_T.data_ptr(),
            num_tokens=len(x_TD),
            width=self._width,
            num_heads=self.heads.num_heads,
            num_kv_heads=self.heads.num_kv_heads,
            head_dim=self.heads.head_dim,
            num_layers=kv_cache.shape[1],
            block_size=block_size_of(kv_cache, self.heads.head_dim),
            cache_type=NATIVE_TYPES[kv_cache.dtype],
            has_bf16_tables=kinds[0].cos.dtype == torch.bfloat16,
            num_threads=torch.get_num_threads(),
        )
        run_layers(given, self._weights, table, output)

    def _rows(self, plan: AttentionPlan, x_TD: torch.Tensor, kv_cache: torch.Tensor) -> Step | None:
        """The decoding rows in the layout of their kernel."""
        rows = plan.rows
        if rows is None:
            return None
        check(rows.num_tokens <= len(x_TD), f"{len(x_TD)} tokens, the plan has later ones")
        fits = rows.dtype == x_TD.dtype and rows.head_dim == self.heads.head_dim
        check(fits and rows.kv_cache is kv_cache, "the plan is of another cache or model")
        rows.step.num_groups = self.heads.num_groups
        return rows.step

    def _chunks(
        self, plan: AttentionPlan, x_TD: torch.Tensor, kv_cache: torch.Tensor
    ) -> SegmentsStep | None:
        """The chunks of prefill in the layout of their kernel."""
        if plan.chunks is None:
            return None
        check(len(plan.chunks.first) <= len(x_TD), f"{len(x_TD)} tokens, the plan has later ones")
        step = segments_of_blocks(plan.chunks, kv_cache, head_dim=self.heads.head_dim)
        step.num_groups = self.heads.num_groups
        return step

    def _check(
        self,
        x_TD: torch.Tensor,
        kv_cache: torch.Tensor,
        slots_T: torch.Tensor,
        kinds: Sequence[LayerKind],
    ) -> None:
        num_tokens, head_dim = len(x_TD), self.heads.head_dim
        check_rows(x_TD, self._width)
        check_cache(kv_cache)
        _, num_layers, _, num_kv_heads, _ = kv_cache.shape
        fits = len(self._layers) <= num_layers and num_kv_heads == self.heads.num_kv_heads
        check(fits, f"the cache has {num_layers} layers of {num_kv_heads} heads")
        check(slots_T.shape == (num_tokens,), f"{tuple(slots_T.shape)} slots, {num_tokens} tokens")
        checked_slots(slots_T, kv_cache, head_dim)
        check(len(kinds) >= self._num_kinds, f"{len(kinds)} kinds, layers have {self._num_kinds}")
        for kind in kinds:
            check(not kind.plan.groups and kind.plan.tiles is None, "the plan is for torch or GPUs")
            planned = _num_tokens(kind.plan)
            check(planned == num_tokens, f"{num_tokens} tokens, the plan has {planned}")
        tables = [table for kind in kinds for table in (kind.cos, kind.sin)]
        check_tables(tables, (num_tokens, head_dim))


def _num_tokens(plan: AttentionPlan) -> int:
    """Tokens that attend. It must be all: the output of others would be uninitialised."""
    decoding = 0 if plan.rows is None else int(plan.rows.step.num_rows)
    return decoding + (0 if plan.chunks is None else int(plan.chunks.num_queries.sum()))
