"""Checks the images of a request and counts their tokens, from the image headers alone.

"data:image/png;base64,…" ─▶ bytes ─▶ header: format, oriented size ─▶ limits ─▶ number of tokens
"https://…" ── fetching ───▶
the embedding of an image ─▶ `client_embeddings`
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

import xxhash

from vlm_worker.core.families import Family, Geometry
from vlm_worker.core.image_geometry import Grid
from vlm_worker.errors import InvalidImageError, InvalidRequestError
from vlm_worker.gateway.api.errors import ApiError, invalid
from vlm_worker.gateway.api.parts import EmbedsPart, ImagePart
from vlm_worker.gateway.base64_text import (
    PIECE_BYTES,
    NotBase64Error,
    TooManyBytesError,
    decode_base64,
)
from vlm_worker.gateway.client_embeddings import read_embedding
from vlm_worker.gateway.config import Config, Limits
from vlm_worker.gateway.turns import Steps
from vlm_worker.gateway.visual import Choice, VisualPolicy, Why
from vlm_worker.media.image_header import MIME_TYPES, ImageHeader, ImageLimits, read_header
from vlm_worker.reduction import Reduction
from vlm_worker.types import EmbedLayout

_NO_IMAGES: Mapping[str, memoryview] = {}
_NOTHING_FETCHED: Mapping[int, bytearray] = {}
_PREFIX = re.compile(rb"data:(image/[a-z0-9.+-]{1,32});base64,")
_PREFIX_BYTES = 128


@dataclasses.dataclass(frozen=True, slots=True)
class RequestImage:
    """One image, as it is sent to the encoder.

    `max_pixels` limits the pixels that the model sees (0 = the model's maximum). `digest` is the
    XXH3-128 of `data` and serves routing only; the encoder computes the cache key.

    If a client gave the embedding, `data` has its rows, of `layout`, `format` is their dtype,
    `grid_thw` is that of the image, and its size is 0. It is never reduced.
    """

    data: bytes | bytearray
    format: str
    width: int
    height: int
    num_tokens: int
    max_pixels: int
    digest: bytes
    path: str
    choice: Choice
    grid_thw: Grid | None = None
    layout: EmbedLayout | None = None

    @property
    def reduction(self) -> Reduction | None:
        return self.choice.reduction


def read_images(
    parts: Sequence[ImagePart],
    config: Config,
    family: Family,
    images: Mapping[str, memoryview] = _NO_IMAGES,
    fetched: Mapping[int, bytearray] = _NOTHING_FETCHED,
    *,
    visual: VisualPolicy,
    layout: EmbedLayout | None = None,
) -> Steps[tuple[RequestImage | None, ...]]:
    """Check every image and count its tokens. Fetches nothing and decodes no pixels.

    `images` is what was taken out of the body, by placeholder, and `fetched` has the bytes of the
    images at other URLs, by position in `parts`. `layout` is that of embeddings, if a part is one.
    The result has one entry per part; None for a corrupt image that is skipped
    (`on_corrupt: Skip`). A wrong embedding is never skipped.

    Raises:
        ApiError: 400; `param` is the path of the part.
    """
    check_count(parts, config)
    images_read: list[RequestImage | None] = []
    for index, part in enumerate(parts):
        if isinstance(part, EmbedsPart):
            assert layout is not None, "`layout_for` finds it, or refuses the request"
            taken_out = images.get(part.url)
            images_read.append((yield from _given(part, taken_out, config, family, layout)))
            continue
        if index in fetched:
            mime_type, data = None, fetched[index]
            digest = yield from _digest(data)
        else:
            mime_type, data, digest = yield from _bytes_of(part, images.get(part.url), config)
        choice = visual.of(part)
        images_read.append(
            _read(index, part, config, family, _Bytes(mime_type, data, digest), choice)
        )
        yield
    return tuple(images_read)


def check_taken_out(images: Mapping[str, memoryview], parts: Sequence[ImagePart]) -> None:
    """Raise ApiError (400) if something was taken out of the body that is of no image part."""
    if sum(part.url in images for part in parts) != len(images):
        raise invalid(
            "A long data URL or embedding stands where no image is expected; it belongs into "
            "'image_url.url' or 'image_embeds.data'.",
            param=None,
        )


def check_count(parts: Sequence[ImagePart], config: Config) -> None:
    """Raise ApiError (400) if a request has more images than the service takes."""
    limit = config.limits.images_per_request
    if len(parts) > limit:
        raise invalid(
            f"This service takes up to {limit} images a request, this one has {len(parts)}. Its "
            "operator sets the limit: model.limits.imagesPerRequest of a VLMService, "
            "--images-per-request of vlm-worker.",
            param=parts[limit].path,
            code="too_many_images",
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Bytes:
    """A file, its XXH3-128, and the media type of its data URL."""

    mime_type: str | None
    data: bytearray
    digest: bytes


def _given(
    part: EmbedsPart,
    taken_out: memoryview | None,
    config: Config,
    family: Family,
    layout: EmbedLayout,
) -> Steps[RequestImage]:
    """Check an embedding. Policies of visual tokens do not apply: its client chose its tokens."""
    given = yield from read_embedding(
        part,
        taken_out,
        layout=layout,
        processor=family.processor,
        bytes_per_image=config.limits.bytes_per_image,
    )
    return RequestImage(
        data=given.rows,
        format=given.dtype,
        width=0,
        height=0,
        num_tokens=given.num_tokens,
        max_pixels=0,
        digest=given.digest,
        path=part.path,
        choice=Choice(why=Why.OFF),
        grid_thw=given.grid_thw,
        layout=layout,
    )


def _read(
    index: int,
    part: ImagePart,
    config: Config,
    family: Family,
    file: _Bytes,
    choice: Choice,
) -> RequestImage | None:
    limits = config.limits
    hard = ImageLimits()
    try:
        header = read_header(
            file.data,
            item=index,
            limits=dataclasses.replace(hard, max_bytes=min(hard.max_bytes, limits.bytes_per_image)),
            # Many clients send the same media type for every image: the content determines it.
            mime_type=None if file.mime_type in MIME_TYPES else file.mime_type,
        )
    except InvalidImageError as error:
        if error.code == "invalid_image" and limits.on_corrupt == "Skip":
            return None
        raise invalid(_sentence(error), param=part.path, code=error.code) from error
    max_pixels = _cap(part, header, limits, choice.max_pixels)
    size = header.height, header.width
    try:
        geometry = family.geometry(*size, max_pixels=max_pixels)
    except InvalidRequestError as error:
        raise invalid(_sentence(error), param=part.path, code="image_aspect_ratio") from error
    if max_pixels and geometry == family.geometry(*size):
        max_pixels = 0  # the encoder's key contains the cap: without effect, it must not be another
    return RequestImage(
        data=file.data,
        format=header.format,
        width=header.width,
        height=header.height,
        num_tokens=_num_tokens(family, geometry, choice),
        max_pixels=max_pixels,
        digest=file.digest,
        path=part.path,
        choice=choice,
    )


def _num_tokens(family: Family, geometry: Geometry, choice: Choice) -> int:
    """Return the visual tokens that the prompt gets."""
    if choice.reduction is None:
        return geometry.num_tokens
    num_tokens = family.num_tokens(geometry.grid_thw, choice.reduction)
    assert num_tokens is not None, "a geometry has a patch grid"
    return num_tokens


def _cap(part: ImagePart, header: ImageHeader, limits: Limits, cap: int) -> int:
    """Return the limit on the pixels that the model sees, at most `cap`; 0 = the model's maximum.

    Raises:
        ApiError: 400 if the image is too large and `on_oversize` is Reject.
    """
    if header.width * header.height <= limits.pixels_per_image:
        return cap
    if limits.on_oversize == "Reject":
        raise invalid(
            f"The image has {header.width}x{header.height} pixels; this service takes up to "
            f"{limits.pixels_per_image}: send it smaller.",
            param=part.path,
            code="image_too_large",
        )
    return min(cap or limits.pixels_per_image, limits.pixels_per_image)


def _digest(data: bytearray) -> Steps[bytes]:
    hasher = xxhash.xxh3_128()
    view = memoryview(data)
    for start in range(0, len(data), PIECE_BYTES):
        hasher.update(view[start : start + PIECE_BYTES])
        yield
    return hasher.digest()


def _bytes_of(
    part: ImagePart, taken_out: memoryview | None, config: Config
) -> Steps[tuple[str, bytearray, bytes]]:
    """Decode a part's data URL; return its media type, its bytes and their digest."""
    escaped = taken_out is not None
    url = part.url.encode("ascii", "replace") if taken_out is None else taken_out
    parts = split_data_url(url, escaped=escaped)
    if parts is None:
        raise _wrong_url(part, is_data=escaped)
    mime_type, text = parts
    limit = config.limits.bytes_per_image
    try:
        data, digest = yield from decode_base64(text, max_bytes=limit, escaped=escaped)
    except TooManyBytesError as error:
        raise invalid(
            f"The image has more than {limit} bytes: send it smaller.",
            param=part.path,
            code="image_too_large",
        ) from error
    except NotBase64Error as error:
        raise invalid(
            f"The data URL does not hold base64: {error}.",
            param=f"{part.path}.url",
            code="invalid_image_url",
        ) from error
    return mime_type, data, digest


def _wrong_url(part: ImagePart, *, is_data: bool) -> ApiError:
    scheme = "data" if is_data else part.url[:32].partition(":")[0].lower()
    message = "The url must be a data: URL with a base64 image, or an https: URL."
    if scheme == "data":
        message = "A data URL must read data:image/TYPE;base64,DATA."
    return invalid(message, param=f"{part.path}.url", code="invalid_image_url")


def _sentence(error: Exception) -> str:
    text = str(error)
    return f"{text[:1].upper()}{text[1:]}."


def split_data_url(url: bytes | memoryview, *, escaped: bool) -> tuple[str, memoryview] | None:
    """Return the media type and the base64 of an image's data URL; None for any other URL.

    If `escaped`, `url` still contains JSON escapes.
    """
    view = memoryview(url)
    head = bytes(view[:_PREFIX_BYTES])
    # JSON encoders escape only the slash of the prefix, as two bytes.
    plain = head.replace(b"\\/", b"/") if escaped else head
    match = _PREFIX.match(plain)
    if match is None:
        return None
    num_escaped = match.group().count(b"/") if head[: match.end()] != match.group() else 0
    return match.group(1).decode(), view[match.end() + num_escaped :]
