"""The language model: embeddings to logits; on CPUs in one native call if possible.

    embeddings ─▶ positions ─▶ layers, norm, head ─▶ logits
                               if each layer is a `DecoderLayer` packed in bfloat16: one call
                               (`vlm_kernels.decoder_layers`)
                               else: transformers' model calls layer by layer

`layers.DecoderLayer` defines a layer. Both ways compute the same values, to the last bit.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from vlm_kernels.decoder_layers import DecoderLayers, LayerKind
from vlm_kernels.layer_weights import Heads, Tail
from vlm_kernels.native_layers import has_layers
from vlm_worker.model.attention import StepContext
from vlm_worker.model.layers import DecoderLayer, Norm
from vlm_worker.model.linear import linear_weights

KindKey = tuple[str | None, int | None]
"""A layer's type, or None if positions do not depend on it, and its window."""


class Decoder:
    """Decoder layers, final norm and head of one model."""

    def __init__(self, text_model: Any, head: nn.Module) -> None:
        self._text_model, self._head = text_model, head
        of_layers = _kinds(text_model)
        self._kinds = list(dict.fromkeys(of_layers))
        self._types = {layer_type for layer_type, _ in self._kinds}
        self._native = _native_layers(text_model, head, of_layers)

    def logits(
        self,
        embeds_TD: torch.Tensor,
        positions_PT: torch.Tensor,
        step: StepContext,
        rows_R: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute logits `[R, V]` in the dtype of the head.

        Args:
            embeds_TD: contiguous; overwritten.
            positions_PT: int64; P is 1, or 3 for M-RoPE.
            step: the context of this step.
            rows_R: int64, packed positions whose logits are wanted; None is all.
        """
        several = len(positions_PT) > 1
        positions = positions_PT[:, None] if several else positions_PT
        if self._native is None:
            output = self._text_model(
                inputs_embeds=embeds_TD[None], position_ids=positions, use_cache=False, step=step
            )
            hidden_TD = output.last_hidden_state[0]
        else:
            kinds = self._of_step(embeds_TD, positions, step)
            given = embeds_TD, step.kv_cache, step.slot_mapping, kinds
            if self._native.tail is not None and rows_R is not None:
                return self._native.logits(*given, rows_R)
            self._native(*given)
            hidden_TD = self._text_model.norm(embeds_TD)
        logits: torch.Tensor = self._head(hidden_TD if rows_R is None else hidden_TD[rows_R])
        return logits

    def _of_step(
        self, embeds_TD: torch.Tensor, positions: torch.Tensor, step: StepContext
    ) -> list[LayerKind]:
        rotary = self._text_model.rotary_emb
        tables = {
            layer_type: rotary(embeds_TD[None], positions, *([layer_type] if layer_type else []))
            for layer_type in self._types
        }
        kinds = []
        for layer_type, window in self._kinds:
            cos, sin = (table[0].contiguous() for table in tables[layer_type])
            kinds.append(LayerKind(cos, sin, step.plan(window)))
        return kinds


def _kinds(text_model: Any) -> list[KindKey]:
    """The kind of each layer; empty if a layer is not a `DecoderLayer`."""
    layers = list(text_model.layers)
    if not all(isinstance(layer, DecoderLayer) for layer in layers):
        return []
    by_type = "layer_type" in inspect.signature(text_model.rotary_emb.forward).parameters
    types = text_model.config.layer_types if by_type else [None] * len(layers)
    return [(kind, layer.window) for kind, layer in zip(types, layers, strict=True)]


def _native_layers(text_model: Any, head: nn.Module, kinds: list[KindKey]) -> DecoderLayers | None:
    """Build the native call; None if a layer cannot be part of it.

    A head that is not packed, because it shares a large embedding table, is not part of the call.
    """
    if not kinds or not has_layers():
        return None
    numbers = list(dict.fromkeys(kinds))
    weights = [
        layer.weights(numbers.index(kind))
        for kind, layer in zip(kinds, text_model.layers, strict=True)
    ]
    packed = [one for one in weights if one is not None]
    if len(packed) < len(weights):
        return None
    config, norm, linear = text_model.config, text_model.norm, linear_weights(head)
    heads = Heads(
        config.num_attention_heads, config.num_key_value_heads, text_model.layers[0].head_dim
    )
    tail = Tail(norm.weights(), linear) if isinstance(norm, Norm) and linear is not None else None
    return DecoderLayers(packed, heads, tail)
