"""What kind of picture some bytes are, by how they begin. Pure."""

from __future__ import annotations

import base64

_BEGINS = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF8": "image/gif",
    b"RIFF": "image/webp",
}


def media_type(data: bytes) -> str | None:
    """The MIME type; None of what the gateway does not take."""
    return next((mime for begin, mime in _BEGINS.items() if data.startswith(begin)), None)


def data_url(data: bytes) -> str:
    """A picture as a `data:` URL, as the OpenAI API takes it."""
    return f"data:{media_type(data)};base64,{base64.b64encode(data).decode()}"
