"""Validates the parts of a message: texts and images.

Pure: it decodes and fetches no image.
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

from vlm_worker.core.families import Detail
from vlm_worker.gateway.api.errors import ApiError, invalid, unsupported
from vlm_worker.gateway.api.schema import MAX_TEXT, Fields

MAX_URL = 64 * 2**20  # the body's own limit is smaller


@dataclasses.dataclass(frozen=True, slots=True)
class TextPart:
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class ImagePart:
    """An image in a message; `path` is its name in errors.

    If the data URL is long, `url` is its placeholder in `JsonBody.images`.
    """

    url: str
    detail: Detail
    path: str


def parse_part(path: str, value: Any, role: str) -> TextPart | ImagePart:
    """Check one part of a message of `role`. Raises ApiError that names the invalid field."""
    fields = Fields(path, value)
    kind = fields.required_text("type", max_length=64)
    if kind == "text":
        part = TextPart(fields.required_text("text", max_length=MAX_TEXT, min_length=0))
        fields.done()
        return part
    if kind != "image_url":
        raise _unknown_part(path, kind)
    if role != "user":
        raise invalid(
            f"'{path}' is an image in a {role} message; images go into user messages.", param=path
        )
    # Ignored: cache keys depend on the content only, never on a client's name for an image.
    fields.text("uuid", max_length=128)
    image = fields.child("image_url")
    if image is None:
        raise fields.missing("image_url")
    url = image.required_text("url", max_length=MAX_URL)
    detail = image.choice("detail", ("auto", "low", "high", "original")) or "auto"
    image.done()
    fields.done()
    return ImagePart(url, cast(Detail, detail), f"{path}.image_url")


def _unknown_part(path: str, kind: str) -> ApiError:
    if kind in ("input_audio", "file", "refusal", "video_url", "image_embeds"):
        return unsupported(f"{path}.type", f"'{path}.type' is '{kind}', which is not built.")
    return invalid(f"'{path}.type' must be 'text' or 'image_url'.", param=f"{path}.type")
