"""Detects the format of an image from its first bytes. Pure."""

from __future__ import annotations

import base64

_BEGINS = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF8": "image/gif",
    b"RIFF": "image/webp",
}


def media_type(data: bytes) -> str | None:
    """Return the MIME type; None if the gateway does not accept the format."""
    return next((mime for begin, mime in _BEGINS.items() if data.startswith(begin)), None)


def data_url(data: bytes) -> str:
    """Return an image as a `data:` URL for the OpenAI API."""
    return f"data:{media_type(data)};base64,{base64.b64encode(data).decode()}"
