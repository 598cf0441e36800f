"""Tests of one kernel in every library that this machine can run."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from typing import Any

import pytest

from vlm_kernels.cpu import libraries, native


def each_variant(
    module: Any,
    *,
    kernel: str = "_kernel",
    symbol: str = "",
    arguments: Any = (),
    needs: str = "",
    has_torch: bool = True,
) -> Any:
    """An automatic fixture: each test of a file, once with each variant, and once with torch.

    Args:
        module: where the kernel is replaced.
        kernel: the name of what gives it there.
        symbol: of the library, the module's `SYMBOL` if not said.
        arguments: its types, likewise `ARGUMENTS`.
        needs: a flag of the CPU that a variant must use to have it.
        has_torch: whether torch computes it where there is no kernel.
    """
    symbol, arguments = symbol or module.SYMBOL, arguments or module.ARGUMENTS
    names = [v.name for v in libraries.supported() if not needs or needs in v.needs]
    names += ["torch"] * has_torch

    @pytest.fixture(params=names, scope="module", autouse=True)
    def variant(request: pytest.FixtureRequest) -> Iterator[str]:
        is_torch = request.param == "torch"
        found = None if is_torch else _kernel_of(request.param, symbol, arguments)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, kernel, lambda: found)
            yield request.param

    return variant


def _kernel_of(name: str, symbol: str, arguments: Any) -> Any:
    try:
        return native.typed(library_of(name), symbol, *arguments)
    except libraries.NativeError as error:
        pytest.skip(str(error))


def library_of(name: str) -> ctypes.CDLL:
    """Build the library of a variant for the environment of the tests. Raises NativeError."""
    chosen = next(variant for variant in libraries.VARIANTS if variant.name == name)
    places = libraries.Places.of(os.environ)  # noqa: TID251  `make sanitize` sets CXXFLAGS
    return native.load(libraries.build(chosen, places))
