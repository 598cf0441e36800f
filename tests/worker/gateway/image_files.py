"""Small images for requests."""

from __future__ import annotations

import base64
import io

from PIL import Image


def png(colour: tuple[int, int, int] = (200, 30, 30), size: tuple[int, int] = (112, 84)) -> bytes:
    return encoded("PNG", colour, size)


def encoded(
    form: str, colour: tuple[int, int, int] = (200, 30, 30), size: tuple[int, int] = (112, 84)
) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, colour).save(buffer, form)
    return buffer.getvalue()


def broken_inside(data: bytes) -> bytes:
    """An image whose header is well-formed and whose pixels are not."""
    broken = bytearray(data)
    at = broken.index(b"IDAT") + 8
    broken[at : at + 8] = b"\xff" * 8
    return bytes(broken)


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def ask(*contents: object, role: str = "user") -> dict[str, object]:
    """A message of texts and images (bytes)."""
    parts = [
        {"type": "text", "text": c}
        if isinstance(c, str)
        else {"type": "image_url", "image_url": {"url": data_url(c)}}  # type: ignore[arg-type]
        for c in contents
    ]
    return {"role": role, "content": parts}
