"""Triton's interpreter, made to round as GPUs do.

It computes on numpy arrays and keeps bfloat16 and float8 as integers of their bits. Two things it
gets wrong: a product of bfloat16 multiplies the bits, and rounding to bfloat16 cuts bits off. Both
are replaced here by torch's, which rounds to the nearest, ties to even.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
from typing import Any

import numpy as np
import pytest
import torch


def load_kernels() -> None:
    """Import every kernel as a function of the interpreter; the environment stays as it was."""
    assert not torch.cuda.is_available()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "TRITON_INTERPRET", "1")  # noqa: TID251  read by @triton.jit
        from vlm_kernels import gpu

        importlib.import_module("triton.experimental.gluon")  # asked for by the first launch
        for module in pkgutil.iter_modules(gpu.__path__):
            importlib.import_module(f"vlm_kernels.gpu.{module.name}")
    _repair()


def _repair() -> None:
    import triton.language as tl
    from triton.runtime import interpreter

    types = {
        tl.float16: torch.float16,
        tl.bfloat16: torch.bfloat16,
        tl.float32: torch.float32,
        tl.float8e4nv: torch.float8_e4m3fn,
        tl.float8e5: torch.float8_e5m2,
    }
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    builder = interpreter.InterpreterBuilder
    dot, cast = builder.create_dot, builder.cast_impl

    def convert(data: Any, source: Any, target: Any, _rounding: Any) -> Any:
        size = source.primitive_bitwidth // 8
        bits = torch.from_numpy(np.ascontiguousarray(data).view(f"i{size}")).view(integers[size])
        found = bits.view(types[source]).to(types[target])
        size = target.primitive_bitwidth // 8
        return found.view(integers[size]).numpy().view(f"u{size}")

    def wide(x: Any) -> Any:
        if x.dtype.scalar in {tl.float32, tl.float16} or not x.dtype.scalar.is_floating():
            return x
        data = convert(x.data, x.dtype.scalar, tl.float32, None).view(np.float32)
        return interpreter.TensorHandle(data, tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *args: Any) -> Any:
        return dot(self, wide(a), wide(b), *args)

    def cast_impl(self: Any, x: Any, target: Any) -> Any:
        assert target.scalar not in {tl.bfloat16, tl.float8e4nv} or x.dtype.scalar.is_floating(), (
            "the interpreter has no conversion of an integer to bfloat16: go by way of float32"
        )
        return cast(self, x, target)

    interpreter._convert_float = convert
    builder.create_dot, builder.cast_impl = create_dot, cast_impl
