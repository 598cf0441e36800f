"""Facts of a model that a plan needs: shapes, and parameters per part. Pure.

encoder    the vision tower; works on patches           ─┐ loaded by pods that encode
projector  from the tower's width to the text's; tokens ─┘
layers     the language model's layers and last norm    ─┐
table      the token embeddings                          │ loaded by pods that prefill or decode
head       the logits; shares the table's weights or not ─┘
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Final

from vlm_cli.plan.images import Sizing

ITEM_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclasses.dataclass(frozen=True)
class Linear:
    """`count` linear layers of one shape."""

    num_inputs: int
    num_outputs: int
    has_bias: bool = False
    count: int = 1

    @property
    def num_weights(self) -> int:
        """Elements of the matrices, without biases."""
        return self.count * self.num_inputs * self.num_outputs

    @property
    def num_biases(self) -> int:
        return self.count * self.num_outputs if self.has_bias else 0


@dataclasses.dataclass(frozen=True)
class Part:
    """Parameters of a part: linear layers, and all others (norms, tables, convolutions)."""

    linears: tuple[Linear, ...] = ()
    num_others: int = 0

    @property
    def num_weights(self) -> int:
        """Elements of all matrices: a token costs two operations for each."""
        return sum(linear.num_weights for linear in self.linears)

    @property
    def num_parameters(self) -> int:
        biases = sum(linear.num_biases for linear in self.linears)
        return self.num_weights + biases + self.num_others


@dataclasses.dataclass(frozen=True)
class Vision:
    """The vision tower.

    Attributes:
        width, inner: sizes of a patch's activation, and inside its MLP.
        num_layers: all layers; `num_full_layers` of them attend to the whole image, the others to
            windows of `window_patches`.
        patch_weights: elements of the patch convolution, for one patch.
        num_extra: rows that the tower adds to the patches, such as CLIP's class token.
    """

    width: int
    inner: int
    num_layers: int
    num_full_layers: int
    window_patches: int
    patch_weights: int
    num_extra: int = 0


@dataclasses.dataclass(frozen=True)
class ModelFacts:
    """Everything that a plan needs of a model.

    Attributes:
        num_sliding_layers: layers that attend to the last `sliding_window` tokens only.
        dtype: of weights and activations.
        rounded: parts whose linear layers `--weights=int8` and `int4` round.
        assumptions: what the files do not say, in sentences.
    """

    path: Path
    model_type: str
    dtype: str
    hidden_size: int
    inner: int
    vocab_size: int
    num_layers: int
    num_sliding_layers: int
    sliding_window: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    vision: Vision
    encoder: Part
    projector: Part
    layers: Part
    table: Part
    head: Part
    is_head_tied: bool
    sizing: Sizing
    rounded: frozenset[str]
    assumptions: tuple[str, ...] = ()

    @property
    def item_bytes(self) -> int:
        """Bytes of one weight or activation."""
        return ITEM_BYTES[self.dtype]

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model; a shared table counts once."""
        parts = (self.encoder, self.projector, self.layers, self.table)
        own_head = 0 if self.is_head_tied else self.head.num_parameters
        return sum(part.num_parameters for part in parts) + own_head
