"""One call of the vision tower for several images, with a result or an error per image. Pure.

    together(images) --ok--> one result per image
                     --error--> each image alone --ok--> its result
                                                 --error--> EngineError with the error as cause

All runners use this function, so the device's error is always the `__cause__`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from vlm_worker.errors import EngineError
from vlm_worker.types import PreparedImage

R = TypeVar("R")

Together = Callable[[Sequence[PreparedImage]], Sequence[R | Exception]]


def encode_each(together: Together[R], images: Sequence[PreparedImage]) -> list[R | Exception]:
    """Encode images in one call; if it fails, one by one, so that a bad image fails alone.

    An error that `together` raises is the `__cause__` of the image's EngineError. If `together`
    raises an EngineError, that is the result.
    """
    if not images:
        return []
    try:
        return list(together(images))
    except Exception as error:  # noqa: BLE001  a model may raise anything; each image is answered
        if len(images) == 1:
            return [_as_engine_error(error)]
        return [encode_each(together, [image])[0] for image in images]


def _as_engine_error(error: Exception) -> EngineError:
    if isinstance(error, EngineError):
        return error
    failure = EngineError(f"encoding failed: {error!r}")
    failure.__cause__ = error
    return failure
