"""Tests of one kernel in every library that this machine can run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vlm_kernels.cpu import native


def each_variant(module: Any) -> Any:
    """An automatic fixture: each test of a file, once with each variant, and once with torch.

    `module` has `SYMBOL`, `ARGUMENTS`, and `_kernel()`, which is replaced.
    """

    @pytest.fixture(
        params=[*(v.name for v in native.supported()), "torch"], scope="module", autouse=True
    )
    def variant(request: pytest.FixtureRequest) -> Iterator[str]:
        kernel = None if request.param == "torch" else _kernel_of(module, request.param)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "_kernel", lambda: kernel)
            yield request.param

    return variant


def _kernel_of(module: Any, name: str) -> Any:
    chosen = next(variant for variant in native.VARIANTS if variant.name == name)
    try:
        path = native.build(chosen, native.Places.of({"HOME": str(Path.home())}))
    except native.NativeError as error:
        pytest.skip(str(error))
    return native.typed(native.load(path), module.SYMBOL, *module.ARGUMENTS)
