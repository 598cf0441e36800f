"""Checks the images of a request and counts their tokens, from the image headers alone.

"data:image/png;base64,…" ─▶ bytes ─▶ header: format, oriented size ─▶ limits ─▶ number of tokens
"""

from __future__ import annotations

import dataclasses
import urllib.parse
from collections.abc import Mapping, Sequence

from vlm_worker.core.families import Family
from vlm_worker.errors import InvalidImageError, InvalidRequestError
from vlm_worker.gateway.api.errors import ApiError, invalid
from vlm_worker.gateway.api.requests import ImagePart
from vlm_worker.gateway.base64_images import (
    NotBase64Error,
    TooManyBytesError,
    decode_base64,
    split_data_url,
)
from vlm_worker.gateway.config import Config, Limits
from vlm_worker.gateway.turns import Steps
from vlm_worker.media.image_header import MIME_TYPES, ImageHeader, ImageLimits, read_header

_NO_IMAGES: Mapping[str, memoryview] = {}


@dataclasses.dataclass(frozen=True, slots=True)
class RequestImage:
    """One image, as it is sent to the encoder.

    `max_pixels` limits the pixels that the model sees (0 = the model's maximum). `digest` is the
    XXH3-128 of `data` and serves routing only; the encoder computes the cache key.
    """

    data: bytes | bytearray
    format: str
    width: int
    height: int
    num_tokens: int
    max_pixels: int
    digest: bytes
    path: str


def read_images(
    parts: Sequence[ImagePart],
    config: Config,
    family: Family,
    images: Mapping[str, memoryview] = _NO_IMAGES,
) -> Steps[tuple[RequestImage | None, ...]]:
    """Check every image and count its tokens. Fetches nothing and decodes no pixels.

    Args:
        parts: image parts of the request's messages, in order.
        config: the current settings.
        family: the model's family.
        images: the data URLs that were taken out of the body, by placeholder.

    Returns:
        One entry per part; None for a corrupt image that is skipped (`on_corrupt: Skip`).

    Raises:
        ApiError: 400; `param` is the path of the part.
    """
    limit = config.limits.images_per_request
    if len(parts) > limit:
        raise invalid(
            f"This service takes up to {limit} images a request, this one has {len(parts)}. Its "
            "operator sets the limit: model.limits.imagesPerRequest of a VLMService, "
            "--images-per-request of vlm-worker.",
            param=parts[limit].path,
            code="too_many_images",
        )
    found = []
    for index, part in enumerate(parts):
        found.append((yield from _read(index, part, config, family, images.get(part.url))))
        yield
    return tuple(found)


def _read(
    index: int, part: ImagePart, config: Config, family: Family, taken_out: memoryview | None
) -> Steps[RequestImage | None]:
    mime_type, data, digest = yield from _bytes_of(part, config, taken_out)
    limits = config.limits
    hard = ImageLimits()
    try:
        header = read_header(
            data,
            item=index,
            limits=dataclasses.replace(hard, max_bytes=min(hard.max_bytes, limits.bytes_per_image)),
            mime_type=_checked_type(mime_type),
        )
    except InvalidImageError as error:
        if error.code == "invalid_image" and limits.on_corrupt == "Skip":
            return None
        raise invalid(_sentence(error), param=part.path, code=error.code) from error
    max_pixels = _cap(part, header, limits, family)
    try:
        geometry = family.geometry(header.height, header.width, max_pixels=max_pixels)
    except InvalidRequestError as error:
        raise invalid(_sentence(error), param=part.path, code="image_aspect_ratio") from error
    return RequestImage(
        data=data,
        format=header.format,
        width=header.width,
        height=header.height,
        num_tokens=geometry.num_tokens,
        max_pixels=max_pixels,
        digest=digest,
        path=part.path,
    )


def _cap(part: ImagePart, header: ImageHeader, limits: Limits, family: Family) -> int:
    """Return the limit on the pixels that the model sees; 0 = the model's maximum.

    Raises:
        ApiError: 400 if the image is too large and `on_oversize` is Reject.
    """
    cap = family.max_pixels_of(part.detail)
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


def _bytes_of(
    part: ImagePart, config: Config, taken_out: memoryview | None
) -> Steps[tuple[str, bytearray, bytes]]:
    """Decode a part's data URL; return its media type, its bytes and their digest."""
    escaped = taken_out is not None
    url = part.url.encode("ascii", "replace") if taken_out is None else taken_out
    found = split_data_url(url, escaped=escaped)
    if found is None:
        raise _not_a_image(part, config, is_data=escaped)
    mime_type, text = found
    limit = config.limits.bytes_per_image
    try:
        if not escaped and len(text) // 4 * 3 > limit + 3:
            raise TooManyBytesError
        data, digest = yield from decode_base64(text, max_bytes=limit, escaped=escaped)
    except TooManyBytesError as error:
        raise invalid(
            f"The image has more than {limit} bytes: send it smaller.",
            param=part.path,
            code="image_too_large",
        ) from error
    except NotBase64Error as error:
        raise invalid(
            f"The data URL does not hold canonical base64: {error}.",
            param=f"{part.path}.url",
            code="invalid_image_url",
        ) from error
    return mime_type, data, digest


def _checked_type(mime_type: str) -> str | None:
    """Return an unsupported media type; None for a supported one.

    Many clients send the same media type for every image, so the content determines the format.
    """
    return None if mime_type in MIME_TYPES else mime_type


def _not_a_image(part: ImagePart, config: Config, *, is_data: bool) -> ApiError:
    scheme = "data" if is_data else part.url[:32].partition(":")[0].lower()
    if scheme == "data":
        return invalid(
            "A data URL must read data:image/TYPE;base64,DATA.",
            param=f"{part.path}.url",
            code="invalid_image_url",
        )
    if scheme not in ("http", "https"):
        return invalid(
            "The url must be a data: URL with a base64 image.",
            param=f"{part.path}.url",
            code="invalid_image_url",
        )
    if _host(part.url) in config.media.allowed_domains:
        return invalid(
            "This domain is allowed, but fetching is not built yet: send a data: URL.",
            param=f"{part.path}.url",
            code="image_fetch_unsupported",
        )
    return invalid(
        "This service fetches no images from this address: send a data: URL.",
        param=f"{part.path}.url",
        code="image_url_not_allowed",
    )


def _host(url: str) -> str | None:
    try:
        return urllib.parse.urlsplit(url[:2048]).hostname
    except ValueError:
        return None


def _sentence(error: Exception) -> str:
    text = str(error)
    return f"{text[:1].upper()}{text[1:]}."
