"""The call of `cpu/layers.cpp`: layers of a decoder, or of a vision tower, over packed tokens.

`decoder_layers` and `vision_layers` define the layers and check their arguments.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from vlm_kernels.cpu import native
from vlm_kernels.layer_weights import Output, Weights, check

SYMBOL = "triptych_layers"
_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64
ARGUMENTS = (_POINTER, _POINTER, _SIZE, _POINTER, _SIZE, _POINTER)
"""input, weights of layers, their number, kinds, their number, output"""


class Kind(ctypes.Structure):
    """`Kind` in cpu/layers.cpp."""

    _fields_ = tuple((name, _POINTER) for name in ("cos", "sin", "rows", "chunks"))


class Input(ctypes.Structure):
    """`Input` in cpu/layers.cpp."""

    _fields_ = (
        *((name, _POINTER) for name in ("x", "cache", "slots")),
        *(
            (name, _SIZE)
            for name in (
                "num_tokens", "width", "num_heads", "num_kv_heads", "head_dim",
                "num_layers", "block_size", "cache_type", "has_bf16_tables", "num_threads",
            )
        ),
    )  # fmt: skip


def run_layers(
    given: Input,
    layers: ctypes.Array[Weights],
    kinds: ctypes.Array[Kind],
    output: Output | None = None,
) -> None:
    """Compute in place; the caller has checked everything that the structures point to."""
    kernel = _kernel()
    assert kernel is not None
    kernel(at(given), layers, len(layers), kinds, len(kinds), at(output))


def at(structure: ctypes.Structure | None) -> int | None:
    """The address of a structure, which must outlive the call; None for None."""
    return None if structure is None else ctypes.addressof(structure)


def check_rows(x_TD: torch.Tensor, width: int) -> None:
    """Raise ValueError if x is not a valid in-place input of layers of this width."""
    is_plain = x_TD.is_contiguous() and x_TD.device.type == "cpu"
    fits = x_TD.shape == (len(x_TD), width) and x_TD.dtype == torch.bfloat16
    check(fits and is_plain, f"x is {x_TD.dtype} {tuple(x_TD.shape)} on {x_TD.device}")


def check_tables(tables: Sequence[torch.Tensor], shape: tuple[int, int]) -> None:
    """Raise ValueError if cos and sin tables are invalid, or differ in type."""
    for table in tables:
        fits = table.shape == shape and table.is_contiguous() and table.device.type == "cpu"
        known = table.dtype in {torch.bfloat16, torch.float32} and table.dtype == tables[0].dtype
        check(fits and known, f"cos or sin is {table.dtype} {tuple(table.shape)}")


def has_layers() -> bool:
    """Whether this machine supports the kernel."""
    return _kernel() is not None


@functools.cache
def _kernel() -> Callable[..., Any] | None:
    return native.function(SYMBOL, *ARGUMENTS)
