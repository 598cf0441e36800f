"""Images that are encoded together fail each for itself, and what the device said stays known."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worker.answers import make_image

from vlm_worker.core.encoding import encode_each
from vlm_worker.errors import EngineError
from vlm_worker.types import PreparedImage

IMAGES = [make_image(number, num_tokens=2) for number in range(6)]


@given(st.lists(st.sampled_from(IMAGES), max_size=6), st.sets(st.sampled_from(range(6))))
def test_each_image_has_its_own_verdict(images: list[PreparedImage], bad: set[int]) -> None:
    refused = {IMAGES[number].image_key for number in bad}

    def together(batch: Sequence[PreparedImage]) -> list[bytes]:
        if any(image.image_key in refused for image in batch):
            raise RuntimeError("one of them is bad")
        return [image.image_key for image in batch]

    for image, result in zip(images, encode_each(together, images), strict=True):
        if image.image_key in refused:
            assert isinstance(result, EngineError)
            assert isinstance(result.__cause__, RuntimeError)
        else:
            assert result == image.image_key


@pytest.mark.parametrize("error", [MemoryError("no memory"), OSError("gone"), ValueError("bad")])
def test_whatever_is_raised_is_the_cause(error: Exception) -> None:
    def together(_: Sequence[PreparedImage]) -> list[bytes]:
        raise error

    (result,) = encode_each(together, IMAGES[:1])
    assert isinstance(result, EngineError)
    assert result.__cause__ is error


def test_an_engine_error_of_the_runner_is_kept() -> None:
    error = EngineError("4 tokens, not 5")

    def together(_: Sequence[PreparedImage]) -> list[bytes]:
        raise error

    assert encode_each(together, IMAGES[:1]) == [error]
