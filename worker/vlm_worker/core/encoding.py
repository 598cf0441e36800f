"""One call of the vision tower for several images, and a verdict for each of them. Pure.

    together(images) --ok--> one result per image
                     --error--> each image alone --ok--> its result
                                                 --error--> EngineError, caused by what was raised

Every runner encodes through this, so that the engine always finds the device's own error as cause.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from vlm_worker.errors import EngineError
from vlm_worker.types import PreparedImage

R = TypeVar("R")

Together = Callable[[Sequence[PreparedImage]], Sequence[R | Exception]]


def encode_each(together: Together[R], images: Sequence[PreparedImage]) -> list[R | Exception]:
    """Encode images together; if that fails, one by one, so that each fails for itself.

    An error that `together` raises is the `__cause__` of the image's EngineError. An EngineError of
    `together` itself is kept as it is.
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
