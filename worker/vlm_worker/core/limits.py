"""Limits of what waits and of what is held: one comparison for all. Pure.

    used + additional <= maximum      accepted
    nothing is used                   one demand of any size is accepted: it would never fit later

The limits of the queues, the KV that peers have not read, and the share of one peer use it. The
second line does not apply to REQUESTS, IMAGES and EMBEDDINGS: their maximum is known to callers.

Laws (tests/worker/core/test_limits.py):

    L1  a demand alone is accepted, whatever its size
    L2  two demands or more never exceed the maximum
"""

from __future__ import annotations

import collections
import enum
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from vlm_worker.errors import OverloadedError


class QueueLimit(enum.StrEnum):
    """The limit because of which a request got an OverloadedError."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    IMAGES = "images"
    PIXELS = "pixels"
    UNREAD = "unread"
    EMBEDDINGS = "embeddings"
    UPLOADS = "uploads"
    IMAGE_MEMORY = "image_memory"


_TEXTS: Final = {
    QueueLimit.REQUESTS: "{used} requests wait, {maximum} may",
    QueueLimit.TOKENS: "{used} tokens wait, {maximum} may",
    QueueLimit.IMAGES: "{used} images wait for the encoder, {maximum} may",
    QueueLimit.PIXELS: "{used} pixels wait for the encoder, {maximum} may",
    QueueLimit.UNREAD: "{used} KV blocks wait to be read, {maximum} may",
    QueueLimit.EMBEDDINGS: "{used} bytes of embeddings are queued or held, {maximum} may be",
}

_STRICT: Final = frozenset({QueueLimit.REQUESTS, QueueLimit.IMAGES, QueueLimit.EMBEDDINGS})


class Demand(NamedTuple):
    """What a request would add to a total."""

    limit: QueueLimit
    used: int
    additional: int
    maximum: int

    @property
    def is_exceeded(self) -> bool:
        used = self.used or self.limit in _STRICT
        return bool(used) and self.used + self.additional > self.maximum


def fits(used: int, additional: int, *, maximum: int) -> bool:
    """Whether a demand is accepted."""
    return not used or used + additional <= maximum


class Limits:
    """Refuses demands and counts the refusals. Its owner is its only writer.

    Attributes:
        num_refused: refused requests, by limit.
    """

    def __init__(self) -> None:
        self.num_refused: collections.Counter[QueueLimit] = collections.Counter()

    def check(self, demands: Iterable[Demand], *, retry_after_seconds: Callable[[], float]) -> None:
        """Raise OverloadedError for the first limit that is exceeded."""
        for demand in demands:
            if demand.is_exceeded:
                self.num_refused[demand.limit] += 1
                text = _TEXTS[demand.limit].format(used=demand.used, maximum=demand.maximum)
                raise OverloadedError(text, retry_after_seconds=retry_after_seconds())
