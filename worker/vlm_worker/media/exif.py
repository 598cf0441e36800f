"""The one EXIF field that changes what a person sees: the orientation. The others are ignored."""

from __future__ import annotations

import struct

ORIENTATION_TAG = 0x0112
MAX_ENTRIES = 1024
_SHORT = 3


def orientation(tiff: bytes | memoryview) -> int:
    """The orientation, 1 to 8, in EXIF's TIFF structure; 1 where it is absent or broken.

    Reads only the first directory and follows no other offset, so it cannot loop.
    """
    head = bytes(tiff[:8])
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(head[:4])
    if order is None or len(head) < 8:
        return 1
    (start,) = struct.unpack(order + "I", head[4:])
    if start + 2 > len(tiff):
        return 1
    (num_entries,) = struct.unpack_from(order + "H", tiff, start)
    for i in range(min(num_entries, MAX_ENTRIES)):
        at = start + 2 + 12 * i
        if at + 12 > len(tiff):
            break
        tag, kind, count, value = struct.unpack_from(order + "HHIH", tiff, at)
        if tag == ORIENTATION_TAG:
            return value if kind == _SHORT and count == 1 and 1 <= value <= 8 else 1
    return 1
