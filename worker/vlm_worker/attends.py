"""The masks of language models: which later tokens a token sees."""

from __future__ import annotations

import enum


class Attends(enum.StrEnum):
    """Which later tokens a token sees, besides itself and those before it.

    IMAGES: those of its own image. IMAGES_SLIDING: the same, in layers with a sliding window alone.
    PREFIX: those of the whole prompt, all of it in layers with a sliding window, too.
    """

    CAUSAL = "causal"
    IMAGES = "images"
    IMAGES_SLIDING = "images-sliding"
    PREFIX = "prefix"

    @property
    def keeps_images_whole(self) -> bool:
        """Whether one step must compute all tokens of an image."""
        return self is not Attends.CAUSAL
