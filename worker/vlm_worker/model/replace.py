"""Replaces the modules of transformers that have kernels here; the others stay."""

from __future__ import annotations

from typing import Any

from torch import nn

from vlm_worker.model.layers import DecoderLayer, gated_mlp, mlp_of, norm_of
from vlm_worker.model.vision_block import VisionBlock

DECODER_LAYERS = frozenset(
    {"Gemma3DecoderLayer", "LlamaDecoderLayer", "Qwen2VLDecoderLayer", "Qwen2_5_VLDecoderLayer"}
)
"""Classes of transformers that compute what `DecoderLayer` does."""

VISION_BLOCKS = frozenset({"Qwen2VLVisionBlock", "Qwen2_5_VLVisionBlock"})
"""Classes of transformers that compute what `VisionBlock` does."""

MLPS = frozenset({"CLIPMLP", "SiglipMLP"})
"""Classes of transformers that compute what `Mlp` does, in layers that are not replaced."""


def use_kernels(model: nn.Module) -> None:
    """Replace the layers, MLPs and norms of a model in place."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            made = _in_place_of(child)
            if made is not None:
                setattr(parent, name, made)


def _in_place_of(module: Any) -> nn.Module | None:
    kind = type(module).__name__
    if kind in DECODER_LAYERS and gated_mlp(module.mlp) is not None:
        return DecoderLayer(module)
    if kind in VISION_BLOCKS and mlp_of(module.mlp) is not None:
        return VisionBlock(module)
    return mlp_of(module) if kind in MLPS else norm_of(module)
