"""Bad images in requests, and what must come back."""

from __future__ import annotations

import struct
import zlib
from typing import Any

from worker.gateway.corpus import Bad, chat
from worker.gateway.image_files import data_url, encoded, png


def image(url: Any, **fields: Any) -> dict[str, Any]:
    part = {"type": "image_url", "image_url": {"url": url, **fields}}
    return chat(messages=[{"role": "user", "content": [part]}])


def png_of_size(width: int, height: int) -> bytes:
    """A PNG that claims a size; its header alone is well-formed."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = b"IDAT" + zlib.compress(b"\0" * 10)
    parts = [
        struct.pack(">I", len(part) - 4) + part + struct.pack(">I", zlib.crc32(part))
        for part in (header, data, b"IEND")
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


URL = "messages[0].content[0].image_url.url"
IMAGE = "messages[0].content[0].image_url"
PNG = data_url(png())

IMAGE_ROWS = [
    Bad("an unknown detail", image(PNG, detail="ultra"), 400, "invalid_value", f"{IMAGE}.detail"),
    Bad(
        "an unknown field beside the url",
        image(PNG, media_io_kwargs={}),
        400,
        "unknown_parameter",
        f"{IMAGE}.media_io_kwargs",
    ),
    Bad("a url that is a number", image(5), 400, "invalid_type", URL),
    Bad("an https url", image("https://example.com/a.png"), 400, "image_url_not_allowed", URL),
    Bad(
        "the metadata service",
        image("http://169.254.169.254/"),
        400,
        "image_url_not_allowed",
        URL,
    ),
    Bad("a file", image("file:///etc/passwd"), 400, "invalid_image_url", URL),
    Bad("no comma", image("data:image/png;base64"), 400, "invalid_image_url", URL),
    Bad("not base64", image("data:image/png,abc"), 400, "invalid_image_url", URL),
    Bad("white space alone", image("data:image/png;base64, \n"), 400, "invalid_image_url", URL),
    Bad("a cut character", image("data:image/png;base64,QUJDQ"), 400, "invalid_image_url", URL),
    Bad(
        "padding that is not canonical",
        image("data:image/png;base64,QR=="),
        400,
        "invalid_image_url",
        URL,
    ),
    Bad("an empty image", image("data:image/png;base64,"), 400, "invalid_image_url", URL),
    Bad(
        "an endless media type",
        image(f"data:image/{'x' * 4000};base64,AAAA"),
        400,
        "invalid_image_url",
        URL,
    ),
    Bad("a nested data url", image(f"data:image/png;base64,{PNG}"), 400, "invalid_image_url", URL),
    Bad(
        "not an image",
        image(data_url(b"hello there, this is text")),
        400,
        "unsupported_image_format",
        IMAGE,
    ),
    Bad(
        "a BMP",
        image(data_url(encoded("BMP"), "image/bmp")),
        400,
        "unsupported_image_format",
        IMAGE,
    ),
    Bad("an image cut short", image(data_url(png()[:30])), 400, "invalid_image", IMAGE),
    Bad(
        "an image too large",
        image(data_url(png_of_size(9000, 9000))),
        400,
        "image_too_large",
        IMAGE,
    ),
    Bad(
        "an image too narrow",
        image(data_url(png_of_size(1, 201))),
        400,
        "image_aspect_ratio",
        IMAGE,
    ),
    Bad(
        "an image without pixels",
        image(data_url(png_of_size(0, 5))),
        400,
        "invalid_image",
        IMAGE,
    ),
]
