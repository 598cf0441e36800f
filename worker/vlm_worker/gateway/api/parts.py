"""Validates the parts of a message: texts, images, and embeddings of images.

Pure: it decodes and fetches no image.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final, cast

from vlm_worker.core.client_embeddings import ClientEmbeddingError, parse_grid
from vlm_worker.core.families import Detail
from vlm_worker.core.image_geometry import Grid
from vlm_worker.gateway.api.errors import ApiError, invalid, unsupported
from vlm_worker.gateway.api.schema import MAX_TEXT, Fields, check_text

MAX_URL = 64 * 2**20  # the body's own limit is smaller
_DATA_FIELDS: Final = ("data", "image_embeds")
_GRID_FIELDS: Final = ("grid_thw", "image_grid_thw")
"""Names of the fields of an embedding: ours, and vLLM's."""


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


@dataclasses.dataclass(frozen=True, slots=True)
class EmbedsPart(ImagePart):
    """The embedding of an image in a message, in place of the image.

    `url` is the base64 of a safetensors file, or its placeholder in `JsonBody.images` if it is
    long. `grid_thw` is None if the file has it. `data_path` and `grid_path` are names in errors.
    """

    grid_thw: Grid | None
    data_path: str
    grid_path: str


def parse_part(path: str, value: Any, role: str) -> TextPart | ImagePart:
    """Check one part of a message of `role`. Raises ApiError that names the invalid field."""
    fields = Fields(path, value)
    kind = fields.required_text("type", max_length=64)
    if kind == "text":
        part = TextPart(fields.required_text("text", max_length=MAX_TEXT, min_length=0))
        fields.done()
        return part
    if kind not in ("image_url", "image_embeds"):
        raise _unknown_part(path, kind)
    if role != "user":
        raise invalid(
            f"'{path}' is an image in a {role} message; images go into user messages.", param=path
        )
    # Ignored: cache keys depend on the content only, never on a client's name for an image.
    fields.text("uuid", max_length=128)
    if kind == "image_embeds":
        return _embeds(f"{path}.image_embeds", fields)
    image = fields.child("image_url")
    if image is None:
        raise fields.missing("image_url")
    url = image.required_text("url", max_length=MAX_URL)
    detail = image.choice("detail", ("auto", "low", "high", "original")) or "auto"
    image.done()
    fields.done()
    return ImagePart(url, cast(Detail, detail), f"{path}.image_url")


def _embeds(path: str, fields: Fields) -> EmbedsPart:
    """Take an embedding: base64, or an object of base64 and the grid."""
    value = fields.take("image_embeds")
    fields.done()
    if value is None:
        raise fields.missing("image_embeds")
    if isinstance(value, str):
        data_path, grid_path, grid = path, path, None
        text = check_text(value, path, max_length=MAX_URL, min_length=1)
    elif not isinstance(value, dict):
        raise invalid(
            f"'{path}' must be base64, or an object with 'data' and 'grid_thw'.",
            param=path,
            code="invalid_type",
        )
    else:
        inner = Fields(path, value)
        text, data_path = _one_of(inner, _DATA_FIELDS)
        grid, grid_path = _one_of(inner, _GRID_FIELDS)
        inner.done()
        if text is None:
            raise inner.missing(_DATA_FIELDS[0])
        text = check_text(text, data_path, max_length=MAX_URL, min_length=1)
    if ":" in text[:64]:  # no letter of base64: it is a URL, which is not fetched
        raise invalid(
            f"'{data_path}' is a URL; send the base64 of a safetensors file alone.",
            param=data_path,
            code="invalid_image_embeds",
        )
    return EmbedsPart(text, "auto", path, _grid(grid, grid_path), data_path, grid_path)


def _one_of(fields: Fields, names: tuple[str, ...]) -> tuple[Any, str]:
    """Take the one field that is given of some that mean the same; also return its path."""
    given = [(value, name) for name in names if (value := fields.take(name)) is not None]
    if len(given) > 1:
        where = fields.at(given[1][1])
        raise invalid(
            f"'{where}' and '{fields.at(given[0][1])}' are names of the same; send one of them.",
            param=where,
        )
    value, name = given[0] if given else (None, names[0])
    return value, fields.at(name)


def _grid(value: Any, path: str) -> Grid | None:
    if value is None:
        return None
    try:
        return parse_grid(value)
    except ClientEmbeddingError as error:
        raise invalid(
            f"'{path}' cannot be used: {error}.", param=path, code="invalid_image_embeds"
        ) from error


def _unknown_part(path: str, kind: str) -> ApiError:
    if kind in ("input_audio", "file", "refusal", "video_url"):
        return unsupported(f"{path}.type", f"'{path}.type' is '{kind}', which is not built.")
    return invalid(f"'{path}.type' must be 'text' or 'image_url'.", param=f"{path}.type")
