"""The pictures of a request, from data URL to tokens, without decoding one: headers tell enough.

"data:image/png;base64,…" ─▶ bytes ─▶ header: format, oriented size ─▶ limits ─▶ number of tokens
"""

from __future__ import annotations

import dataclasses
import re
import urllib.parse
from collections.abc import Sequence

import pybase64
import xxhash

from vlm_worker.core.families import Family
from vlm_worker.errors import InvalidImageError, InvalidRequestError
from vlm_worker.gateway.api.errors import ApiError, invalid
from vlm_worker.gateway.api.messages import ImagePart
from vlm_worker.gateway.config import Config, Limits
from vlm_worker.media.header import ImageHeader, ImageLimits, read_header

_DATA_URL = re.compile(r"data:(image/[a-z0-9.+-]{1,32});base64,")
_PREFIX_LENGTH = 64


@dataclasses.dataclass(frozen=True, slots=True)
class Picture:
    """One picture, as the encoder will be told of it.

    `max_pixels` caps what the model sees (0 = its own maximum); `digest` is for routing alone, the
    cache key is the encoder's own.
    """

    data: bytes
    format: str
    width: int
    height: int
    num_tokens: int
    max_pixels: int
    digest: bytes
    path: str


def read_pictures(
    parts: Sequence[ImagePart], config: Config, family: Family
) -> tuple[Picture | None, ...]:
    """Check and count every picture; nothing is fetched, nothing is decoded.

    Returns:
        One entry a part; None where a broken picture is left out (`on_corrupt: Skip`).

    Raises:
        ApiError: 400 naming the part.
    """
    limit = config.limits.images_per_request
    if len(parts) > limit:
        raise invalid(
            f"This service takes up to {limit} pictures a request, this one has {len(parts)}.",
            param=parts[limit].path,
            code="too_many_images",
        )
    return tuple(_read(i, part, config, family) for i, part in enumerate(parts))


def _read(index: int, part: ImagePart, config: Config, family: Family) -> Picture | None:
    mime_type, data = _bytes_of(part, config)
    limits = config.limits
    hard = ImageLimits()
    try:
        header = read_header(
            data,
            item=index,
            limits=dataclasses.replace(hard, max_bytes=min(hard.max_bytes, limits.bytes_per_image)),
            mime_type=mime_type,
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
    return Picture(
        data=data,
        format=header.format,
        width=header.width,
        height=header.height,
        num_tokens=geometry.num_tokens,
        max_pixels=max_pixels,
        digest=xxhash.xxh3_128_digest(data),
        path=part.path,
    )


def _cap(part: ImagePart, header: ImageHeader, limits: Limits, family: Family) -> int:
    """The pixels that the model may see of this picture; 0 = its own maximum."""
    cap = family.max_pixels_of(part.detail)
    if header.width * header.height <= limits.pixels_per_image:
        return cap
    if limits.on_oversize == "Reject":
        raise invalid(
            f"The picture has {header.width}x{header.height} pixels; this service takes up to "
            f"{limits.pixels_per_image}: send it smaller.",
            param=part.path,
            code="image_too_large",
        )
    return min(cap or limits.pixels_per_image, limits.pixels_per_image)


def _bytes_of(part: ImagePart, config: Config) -> tuple[str, bytes]:
    """The media type and the bytes of a data URL."""
    url = part.url
    match = _DATA_URL.match(url[: len("data:;base64,") + _PREFIX_LENGTH])
    if match is None:
        raise _not_a_picture(part, config)
    encoded = memoryview(url.encode("ascii", "replace"))[match.end() :]
    limit = config.limits.bytes_per_image
    if len(encoded) // 4 * 3 > limit + 3:
        raise invalid(
            f"The picture has more than {limit} bytes: send it smaller.",
            param=part.path,
            code="image_too_large",
        )
    try:
        data = pybase64.b64decode(encoded, validate=True)
    except ValueError as error:
        raise _bad_base64(part) from error
    if not data or pybase64.b64encode(data[len(data) // 3 * 3 - 3 :])[-4:] != encoded[-4:]:
        raise _bad_base64(part)
    return match.group(1), data


def _not_a_picture(part: ImagePart, config: Config) -> ApiError:
    scheme = part.url[:32].partition(":")[0].lower()
    if scheme == "data":
        return invalid(
            "A data URL must read data:image/TYPE;base64,DATA.",
            param=f"{part.path}.url",
            code="invalid_image_url",
        )
    if scheme not in ("http", "https"):
        return invalid(
            "The url must be a data: URL with a base64 picture.",
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
        "This service fetches no pictures from this address: send a data: URL.",
        param=f"{part.path}.url",
        code="image_url_not_allowed",
    )


def _host(url: str) -> str | None:
    try:
        return urllib.parse.urlsplit(url[:2048]).hostname
    except ValueError:
        return None


def _bad_base64(part: ImagePart) -> ApiError:
    return invalid(
        "The data URL does not hold canonical base64.",
        param=f"{part.path}.url",
        code="invalid_image_url",
    )


def _sentence(error: Exception) -> str:
    text = str(error)
    return f"{text[:1].upper()}{text[1:]}."
