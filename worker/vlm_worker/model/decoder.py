"""The decoder of a language model as one native call, where every layer of it can be part of it.

    embeddings ─▶ positions ─▶ layers (`vlm_kernels.decoder_layers`) ─▶ norm ─▶ hidden states

It stands in for the forward of transformers' text model, which calls layer by layer: what a layer
is stays `layers.DecoderLayer`, whose values come out to the last bit. Models whose layers are not
those, or not packed in bfloat16, keep transformers' way.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from vlm_kernels.decoder_layers import DecoderLayers, LayerKind, has_decoder_layers
from vlm_kernels.decoder_weights import Heads
from vlm_worker.model.attention import StepContext
from vlm_worker.model.layers import DecoderLayer

KindKey = tuple[str | None, int | None]
"""A layer's type, where positions depend on it, and its window."""


class NativeDecoder:
    """What transformers' text model does between embeddings and hidden states."""

    def __init__(self, text_model: Any, layers: DecoderLayers, kinds: list[KindKey]) -> None:
        self._rotary, self._norm = text_model.rotary_emb, text_model.norm
        self._layers, self._kinds = layers, kinds

    def __call__(
        self, embeds_TD: torch.Tensor, positions: torch.Tensor, step: StepContext
    ) -> torch.Tensor:
        """Hidden states `[T, D]`, behind the last norm, in the memory of the embeddings.

        Args:
            embeds_TD: bfloat16, contiguous.
            positions: as the text model takes them: `[1, T]`, or `[axes, 1, T]`.
            step: of this step.
        """
        tables = {
            kind: self._rotary(embeds_TD[None], positions, *([] if kind is None else [kind]))
            for kind in {kind for kind, _ in self._kinds}
        }
        kinds = []
        for kind, window in self._kinds:
            cos, sin = (table[0].contiguous() for table in tables[kind])
            kinds.append(LayerKind(cos, sin, step.plan(window)))
        self._layers(embeds_TD, step.kv_cache, step.slot_mapping, kinds)
        hidden: torch.Tensor = self._norm(embeds_TD)
        return hidden


def native_decoder(text_model: Any) -> NativeDecoder | None:
    """None where a layer of transformers' text model is not part of the native call."""
    layers: list[nn.Module] = list(text_model.layers)
    ours = [layer for layer in layers if isinstance(layer, DecoderLayer)]
    if len(ours) < len(layers) or not has_decoder_layers():
        return None
    by_type = "layer_type" in inspect.signature(text_model.rotary_emb.forward).parameters
    types = text_model.config.layer_types if by_type else [None] * len(ours)
    keys = [(kind, layer.window) for kind, layer in zip(types, ours, strict=True)]
    kinds = list(dict.fromkeys(keys))
    weights = [layer.weights(kinds.index(key)) for key, layer in zip(keys, ours, strict=True)]
    packed = [one for one in weights if one is not None]
    if len(packed) < len(weights):
        return None
    config = text_model.config
    heads = Heads(config.num_attention_heads, config.num_key_value_heads, ours[0].head_dim)
    return NativeDecoder(text_model, DecoderLayers(packed, heads), kinds)
