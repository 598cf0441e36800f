"""Tests of one kernel in every library that this machine can run."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from typing import Any

import pytest

from vlm_kernels.cpu import libraries, native


def each_variant(module: Any) -> Any:
    """An automatic fixture: each test of a file, once with each variant, and once with torch.

    `module` has `SYMBOL`, `ARGUMENTS`, and `_kernel()`, which is replaced.
    """

    @pytest.fixture(
        params=[*(v.name for v in libraries.supported()), "torch"], scope="module", autouse=True
    )
    def variant(request: pytest.FixtureRequest) -> Iterator[str]:
        kernel = None if request.param == "torch" else _kernel_of(module, request.param)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "_kernel", lambda: kernel)
            yield request.param

    return variant


def _kernel_of(module: Any, name: str) -> Any:
    try:
        return native.typed(library_of(name), module.SYMBOL, *module.ARGUMENTS)
    except libraries.NativeError as error:
        pytest.skip(str(error))


def library_of(name: str) -> ctypes.CDLL:
    """The library of a variant, made as the environment of the tests says. Raises NativeError."""
    chosen = next(variant for variant in libraries.VARIANTS if variant.name == name)
    places = libraries.Places.of(os.environ)  # noqa: TID251  `make sanitize` sets CXXFLAGS
    return native.load(libraries.build(chosen, places))
