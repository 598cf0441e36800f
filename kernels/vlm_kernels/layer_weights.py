"""The weights of a layer, checked, and in the layout of C++ (`decoder_layers`, `vision_layers`).

Shapes: D features, H KV heads, G query heads per KV head, E head size.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from vlm_kernels.packed_linear import Activation, epilogue_of
from vlm_kernels.packed_weights import PackedWeights

_LINEARS = ("qkv", "o", "up", "down")
_NORMS = ("attention_norm", "q_norm", "k_norm", "o_norm", "mlp_norm", "down_norm")
_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64


@dataclasses.dataclass(frozen=True, slots=True)
class Linear:
    """y = x W^T + b; for gated weights, `mix_biases` makes the bias."""

    weights: PackedWeights
    bias: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm; with `adds_one`, Gemma's variant."""

    weight: torch.Tensor
    eps: float
    adds_one: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class LayerNorm:
    """LayerNorm."""

    weight: torch.Tensor
    bias: torch.Tensor
    eps: float


@dataclasses.dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of one layer.

    Attributes:
        qkv: `[(H * G + 2 * H) * E, D]`, queries first.
        o: `[D, H * G * E]`.
        up: from D inputs; gated or plain.
        down: to D outputs.
        kind: index of the layer's kind in a step.
        scale: factor of the scores.
        activation: of `up`, or of its gate.
    """

    attention_norm: Norm | LayerNorm
    qkv: Linear
    o: Linear
    mlp_norm: Norm | LayerNorm
    up: Linear
    down: Linear
    scale: float
    kind: int = 0
    activation: Activation = Activation.SILU
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    o_norm: Norm | None = None
    down_norm: Norm | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Heads:
    """Numbers of query heads (H * G) and KV heads (H), and their size E."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def num_groups(self) -> int:
        """Query heads that share a KV head, G."""
        return self.num_heads // self.num_kv_heads


@dataclasses.dataclass(frozen=True, slots=True)
class Tail:
    """The weights from hidden states to logits: the last norm, and the head `[V, D]`."""

    norm: Norm
    head: Linear


class _Linear(ctypes.Structure):
    """`Linear` in cpu/layers.cpp; the structures below are from there, too."""

    _fields_ = (
        *((name, _POINTER) for name in ("panels", "scales", "offsets", "bias")),
        *((name, _SIZE) for name in ("num_outputs", "num_inputs")),
        ("x_scale", ctypes.c_float),
        ("x_zero", ctypes.c_int32),
    )


class _Norm(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("weight", "bias")),
        ("eps", ctypes.c_float),
        ("adds_one", ctypes.c_int32),
    )


class Weights(ctypes.Structure):
    """The weights of one layer in the layout of C++."""

    _fields_ = (
        *((name, _Linear) for name in _LINEARS),
        *((name, _Norm) for name in _NORMS),
        ("kind", _SIZE),
        ("activated", _SIZE),
        ("scale", ctypes.c_float),
    )


class Output(ctypes.Structure):
    """`Output` in cpu/layers.cpp."""

    _fields_ = (
        ("norm", _Norm),
        ("head", _Linear),
        ("rows", _POINTER),
        ("num_rows", _SIZE),
        ("logits", _POINTER),
    )


def output_of(tail: Tail, rows_R: torch.Tensor, logits_RV: torch.Tensor) -> Output:
    """The structure of a checked tail; the arguments must outlive it."""
    return Output(
        _norm(tail.norm), _linear(tail.head), rows_R.data_ptr(), len(rows_R), logits_RV.data_ptr()
    )


def lay_out(layers: Sequence[LayerWeights]) -> ctypes.Array[Weights]:
    """The structures of checked layers, which must outlive them."""
    return (Weights * len(layers))(*map(_weights, layers))


def _weights(layer: LayerWeights) -> Weights:
    parts: dict[str, Any] = {name: _linear(getattr(layer, name)) for name in _LINEARS}
    for name in _NORMS:
        norm: Norm | LayerNorm | None = getattr(layer, name)
        if norm is not None:
            parts[name] = _norm(norm)
    activated = epilogue_of(layer.up.weights, layer.activation)
    return Weights(**parts, kind=layer.kind, activated=activated, scale=layer.scale)


def _norm(norm: Norm | LayerNorm) -> _Norm:
    if isinstance(norm, LayerNorm):
        return _Norm(norm.weight.data_ptr(), norm.bias.data_ptr(), norm.eps)
    return _Norm(norm.weight.data_ptr(), None, norm.eps, norm.adds_one)


def _linear(linear: Linear) -> _Linear:
    weights = linear.weights
    return _Linear(
        *(
            None if tensor is None else tensor.data_ptr()
            for tensor in (weights.panels, weights.scales, weights.offsets, linear.bias)
        ),
        weights.num_outputs * (2 if weights.is_gated else 1),
        weights.num_inputs,
        *weights.inputs,
    )


def check_layer(layer: LayerWeights, heads: Heads, *, width: int) -> None:
    """Raise ValueError if the input size of a part differs from the output size before it."""
    of_queries, inner = heads.num_heads * heads.head_dim, layer.up.weights.num_outputs
    check(heads.num_heads % heads.num_kv_heads == 0, f"{heads} are not whole groups")
    check(heads.head_dim % 2 == 0, f"{heads} have no halves")
    epilogue_of(layer.up.weights, layer.activation)
    check(layer.kind >= 0, f"kind {layer.kind} is none of a step's")
    check((layer.q_norm is None) == (layer.k_norm is None), "q_norm and k_norm come together")
    joint = of_queries + 2 * heads.num_kv_heads * heads.head_dim
    _check_linear("qkv", layer.qkv, joint, width)
    _check_linear("o", layer.o, width, of_queries)
    _check_linear("up", layer.up, inner, width)
    _check_linear("down", layer.down, width, inner)
    for name in _NORMS:
        norm: Norm | LayerNorm | None = getattr(layer, name)
        if norm is not None:
            size = heads.head_dim if name in {"q_norm", "k_norm"} else width
            _check_vector(name, norm.weight, size)
            if isinstance(norm, LayerNorm):
                _check_vector(f"the bias of {name}", norm.bias, size)


def check_tail(tail: Tail, *, width: int) -> None:
    """Raise ValueError if norm and head do not fit the width."""
    check(not tail.head.weights.is_gated, "the head is gated")
    _check_linear("the head", tail.head, tail.head.weights.num_outputs, width)
    _check_vector("the last norm", tail.norm.weight, width)


def _check_linear(name: str, linear: Linear, num_outputs: int, num_inputs: int) -> None:
    weights = linear.weights
    fits = (weights.num_outputs, weights.num_inputs) == (num_outputs, num_inputs)
    check(fits, f"{name} must be [{num_outputs}, {num_inputs}]")
    check(weights.is_int8 or num_inputs % 2 == 0, f"{name}: {num_inputs} inputs must be even")
    if linear.bias is not None:
        _check_vector(f"the bias of {name}", linear.bias, weights.num_biases)


def _check_vector(name: str, vector: torch.Tensor, size: int) -> None:
    is_plain = vector.is_contiguous() and vector.device.type == "cpu"
    fits = vector.shape == (size,) and vector.dtype == torch.bfloat16 and is_plain
    check(fits, f"{name} is {vector.dtype} {tuple(vector.shape)} on {vector.device}")


def check(holds: bool, message: str) -> None:
    """Raise ValueError if a condition does not hold."""
    if not holds:
        raise ValueError(f"layers: {message}")
