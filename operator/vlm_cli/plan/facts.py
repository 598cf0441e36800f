"""Facts of a model that a plan needs: shapes, and parameters per part. Pure.

encoder    the vision tower; works on patches           ─┐ loaded by pods that encode
projector  from the tower's width to the text's; tokens ─┘
layers     the language model's layers and last norm    ─┐
table      the token embeddings                          │ loaded by pods that prefill or decode
head       the logits; shares the table's weights or not ─┘
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from pathlib import Path
from typing import Final

from vlm_cli.plan.fields import PlanError
from vlm_cli.plan.images import Sizing
from vlm_operator.names import Role

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


PARTS: Final = ("encoder", "merger", "layers", "head")
WEIGHT_TYPES: Final = ("auto", "int8", "int4")


def type_of(part: str, weights: str) -> str:
    """Return the type of a part with the worker's --weights; it may be one that is not rounded."""
    if "=" not in weights:
        return weights
    return dict(item.split("=", 1) for item in weights.split(",")).get(part, "auto")


def parts_of(stages: Collection[Role]) -> tuple[str, ...]:
    """Return the parts that a worker with these stages loads."""
    encodes, decodes = Role.ENCODER in stages, any(one is not Role.ENCODER for one in stages)
    return ("encoder", "merger") * encodes + ("layers", "head") * decodes


def check_weights(weights: str) -> None:
    """Raise PlanError if the worker does not understand this value of --weights."""
    items = [item.partition("=") for item in weights.split(",")]
    parts = [part for part, _, _ in items]
    by_part = all(part in PARTS and kind in WEIGHT_TYPES for part, _, kind in items)
    if weights in WEIGHT_TYPES or (by_part and len(set(parts)) == len(parts)):
        return
    raise PlanError(
        f"--weights: is {weights!r}; there are {', '.join(WEIGHT_TYPES)}, or one of them for each "
        f"of {', '.join(PARTS)}, such as encoder=int8,layers=int8"
    )


@dataclasses.dataclass(frozen=True)
class ModelFacts:
    """Everything that a plan needs of a model.

    Attributes:
        num_sliding_layers: layers that attend to the last `sliding_window` tokens only.
        dtype: of weights and activations.
        rounded: parts whose linear layers `--weights` may round.
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

    def rounding(self, part: str, weights: str) -> str:
        """Return the type of a part with the worker's --weights; `auto` if it is not rounded.

        A GPU does not round a head that is the embedding table, and a CPU seldom.
        """
        is_table = part == "head" and self.is_head_tied
        return type_of(part, weights) if part in self.rounded and not is_table else "auto"

    def check_rounded(self, weights: str) -> None:
        """Raise PlanError if --weights names a part that the worker does not round."""
        for part in PARTS if "=" in weights else ():
            if type_of(part, weights) != "auto" and part not in self.rounded:
                raise PlanError(
                    f"--weights: {self.model_type} rounds {', '.join(sorted(self.rounded))} "
                    f"alone; remove {part}="
                )
