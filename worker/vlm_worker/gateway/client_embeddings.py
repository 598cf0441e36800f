"""Checks the embeddings that clients send in place of images, before a worker gets a byte.

base64 ─▶ safetensors ─▶ header ─▶ grid: visual tokens ─▶ dtype and shape ─▶ finite? ─▶ rows
                                                                ▲
                            Hello of the encoders: EmbedLayout ─┘
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Final

import xxhash

from vlm_worker.abilities import have_same_rows
from vlm_worker.annotations import MAX_IMAGE_BYTES
from vlm_worker.core.client_embeddings import (
    ClientEmbeddingError,
    can_check,
    check_tensor,
    first_not_finite,
    num_tokens_of,
    read_header,
)
from vlm_worker.core.image_geometry import Grid, Processor
from vlm_worker.gateway.api.errors import ApiError, invalid, unavailable, unsupported
from vlm_worker.gateway.api.parts import EmbedsPart, ImagePart
from vlm_worker.gateway.base64_text import NotBase64Error, TooManyBytesError, decode_base64
from vlm_worker.gateway.turns import Steps
from vlm_worker.types import ITEMSIZE, EmbedLayout, Stage
from vlm_worker.wire.messages import Hello

_CODE: Final = "invalid_image_embeds"
_PIECE_BYTES: Final = 2**20
"""Whole elements of any dtype. Checking so many bytes takes less than a millisecond."""


@dataclasses.dataclass(frozen=True, slots=True)
class ClientEmbedding:
    """The checked rows of one image, `[num_tokens, row_bytes]`, and an XXH3-128 for routing."""

    rows: bytearray
    dtype: str
    grid_thw: Grid
    num_tokens: int
    digest: bytes


def common_layout(hellos: Iterable[Hello]) -> EmbedLayout | None:
    """The layout of all encoders; without an encoder, of all workers.

    None if there is none, one does not name it, as of an older release, or they differ in more than
    the model's revision: no gateway knows which of them gets a request.
    """
    known = tuple(hellos)
    encoders = [hello for hello in known if Stage.ENCODER in hello.stages]
    layouts = [hello.embed_layout for hello in encoders or known]
    first = layouts[0] if layouts else None
    if first is None or not can_check(first):
        return None
    alike = all(layout is not None and have_same_rows(layout, first) for layout in layouts)
    return first if alike else None


def check_allowed(parts: Sequence[ImagePart], *, is_on: bool) -> None:
    """Raise ApiError (400) if a part is an embedding, and the gateway takes none."""
    given = next((part for part in parts if isinstance(part, EmbedsPart)), None)
    if given is not None and not is_on:
        raise unsupported(
            given.path,
            f"'{given.path}' is an embedding; this service takes images only. Send an 'image_url'. "
            "Its operator allows embeddings: gateway.clientEmbeddings of a VLMService, "
            "--client-embeddings of a gateway.",
        )


def layout_for(parts: Sequence[ImagePart], layout: EmbedLayout | None) -> EmbedLayout | None:
    """Return `layout`. Raise ApiError (503) if it is not known and a part is an embedding."""
    if layout is None and any(isinstance(part, EmbedsPart) for part in parts):
        raise unavailable(
            "The layout of embeddings is not known now: no worker is ready, or one is of an older "
            "release. Send the request again later, or with the image."
        )
    return layout


def read_embedding(
    part: EmbedsPart,
    taken_out: memoryview | None,
    *,
    layout: EmbedLayout,
    processor: Processor,
    bytes_per_image: int,
) -> Steps[ClientEmbedding]:
    """Check an embedding; `taken_out` is its base64 if it is not in the part.

    Raises:
        ApiError: 400 with the path of the invalid field and the fix.
    """
    data, digest = yield from _decoded(part, taken_out, bytes_per_image)
    try:
        tensor = read_header(data)
    except ClientEmbeddingError as error:
        raise _cannot(part.data_path, error) from error
    grid = part.grid_thw or tensor.grid_thw
    if grid is None:
        raise invalid(
            f"'{part.grid_path}' is required: send an object with 'data' and 'grid_thw', or put "
            "'grid_thw' into the metadata of the file.",
            param=part.grid_path,
            code="missing_required_parameter",
        )
    if part.grid_thw and tensor.grid_thw not in (None, grid):
        raise _cannot(part.grid_path, f"the metadata of the file has {list(tensor.grid_thw or ())}")
    try:
        num_tokens = num_tokens_of(grid, processor)
    except ClientEmbeddingError as error:
        raise _cannot(part.grid_path, error) from error
    try:
        check_tensor(tensor, layout, grid=grid, num_tokens=num_tokens)
    except ClientEmbeddingError as error:
        raise _cannot(part.data_path, error) from error
    del data[: tensor.start]
    yield from _check_finite(part, memoryview(data).toreadonly(), layout)
    digest = xxhash.xxh3_128_digest(digest + repr(grid).encode())
    return ClientEmbedding(data, layout.dtype, grid, num_tokens, digest)


def _decoded(
    part: EmbedsPart, taken_out: memoryview | None, bytes_per_image: int
) -> Steps[tuple[bytearray, bytes]]:
    text = memoryview(part.url.encode("ascii", "replace")) if taken_out is None else taken_out
    limit = min(bytes_per_image, MAX_IMAGE_BYTES)
    try:
        return (yield from decode_base64(text, max_bytes=limit, escaped=taken_out is not None))
    except TooManyBytesError as error:
        raise invalid(
            f"The embedding has more than {limit} bytes: send one of a smaller image.",
            param=part.data_path,
            code="image_too_large",
        ) from error
    except NotBase64Error as error:
        raise _cannot(part.data_path, f"it does not hold base64: {error}") from error


def _check_finite(part: EmbedsPart, rows: memoryview, layout: EmbedLayout) -> Steps[None]:
    itemsize = ITEMSIZE[layout.dtype]
    for start in range(0, len(rows), _PIECE_BYTES):
        index = first_not_finite(rows[start : start + _PIECE_BYTES], layout.dtype)
        if index is not None:
            row, column = divmod(start // itemsize + index, layout.row_elements)
            raise _cannot(
                part.data_path,
                f"element [{row}, {column}] is not finite; send what the vision tower computed",
            )
        yield


def _cannot(path: str, why: ClientEmbeddingError | str) -> ApiError:
    return invalid(f"'{path}' cannot be used: {why}.", param=path, code=_CODE)
