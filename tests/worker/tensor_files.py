"""Safetensors files of one tensor, written by hand, so that they may be wrong."""

from __future__ import annotations

import json
import struct
from typing import Any

NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def tensor_file(
    rows: bytes, dtype: str, shape: tuple[int, ...], *, grid: Any = None, **changes: Any
) -> bytes:
    """A file; `grid` is a text in its metadata, and `changes` are fields of the tensor's entry."""
    entry = {"dtype": NAMES.get(dtype, dtype), "shape": shape, "data_offsets": [0, len(rows)]}
    fields: dict[str, Any] = {"embeds": {**entry, **changes}}
    if grid is not None:
        fields["__metadata__"] = {"grid_thw": grid}
    return with_header(json.dumps(fields).encode(), rows)


def with_header(header: bytes, rows: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + rows
