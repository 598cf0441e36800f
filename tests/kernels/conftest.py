"""What tests of kernels set and others must not find."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    """The number of torch's threads, whatever a test makes of it."""
    import torch  # not while tests are collected: those of gpu/ choose Triton's interpreter first

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
