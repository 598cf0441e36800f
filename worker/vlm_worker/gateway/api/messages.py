"""Messages and their parts as values, checked to the last field."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, cast

from vlm_worker.core.families import Detail
from vlm_worker.gateway.api import parameters
from vlm_worker.gateway.api.errors import ApiError, invalid, unsupported
from vlm_worker.gateway.api.fields import Fields, check_text
from vlm_worker.gateway.api.parameters import refuse
from vlm_worker.gateway.turns import Steps

# Of one message, and of all together; a string is one part.
MAX_PARTS = 1024
MAX_TEXT = 4 * 2**20
MAX_URL = 64 * 2**20  # the body's own limit is smaller

ChatRole = Literal["system", "user", "assistant"]


@dataclasses.dataclass(frozen=True, slots=True)
class TextPart:
    """Text in a message."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class ImagePart:
    """A picture in a message; `path` is what errors call it.

    `url` stands in for a long data URL, which `JsonBody.images` has.
    """

    url: str
    detail: Detail
    path: str


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """One turn. A string stays a string: chat templates treat it unlike a list of one text."""

    role: ChatRole
    content: str | tuple[TextPart | ImagePart, ...]

    @property
    def parts(self) -> tuple[TextPart | ImagePart, ...]:
        """The content as parts."""
        return (TextPart(self.content),) if isinstance(self.content, str) else self.content


def parse_message(path: str, value: Any) -> Steps[Message]:
    """Check one message; raises ApiError naming the part under `path`."""
    fields = Fields(path, value)
    role = fields.required_text("role", max_length=32)
    if role in ("tool", "function"):
        raise unsupported(f"{path}.role", f"'{path}.role' is '{role}': tools are not built.")
    if role not in ("system", "developer", "user", "assistant"):
        raise invalid(
            f"'{path}.role' must be one of 'system', 'developer', 'user', 'assistant'.",
            param=f"{path}.role",
            code="invalid_value",
        )
    refuse(fields, parameters.MESSAGE)
    content = fields.take("content")
    fields.done()
    known = cast(ChatRole, "system" if role == "developer" else role)
    return Message(known, (yield from _content(f"{path}.content", content, known)))


def _content(
    path: str, value: Any, role: ChatRole
) -> Steps[str | tuple[TextPart | ImagePart, ...]]:
    if value is None:
        raise invalid(f"'{path}' is required.", param=path, code="missing_required_parameter")
    if isinstance(value, str):
        return check_text(value, path, max_length=MAX_TEXT)
    if not isinstance(value, list):
        raise invalid(
            f"'{path}' must be a string or an array of parts.", param=path, code="invalid_type"
        )
    if not 1 <= len(value) <= MAX_PARTS:
        raise invalid(
            f"'{path}' must have 1 to {MAX_PARTS} parts, it has {len(value)}.",
            param=path,
            code="invalid_value",
        )
    parts = []
    for index, item in enumerate(value):
        parts.append(_part(f"{path}[{index}]", item, role))
        yield
    return tuple(parts)


def _part(path: str, value: Any, role: ChatRole) -> TextPart | ImagePart:
    fields = Fields(path, value)
    kind = fields.required_text("type", max_length=64)
    if kind == "text":
        text = fields.text("text", max_length=MAX_TEXT)
        if text is None:
            raise fields.missing("text")
        fields.done()
        return TextPart(text)
    if kind != "image_url":
        raise _unknown_part(path, kind)
    if role != "user":
        raise invalid(
            f"'{path}' is a picture in a {role} message; pictures go into user messages.",
            param=path,
            code="invalid_value",
        )
    # A client's name for a picture is never a cache key: content alone is.
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
    return invalid(
        f"'{path}.type' must be 'text' or 'image_url'.", param=f"{path}.type", code="invalid_value"
    )
