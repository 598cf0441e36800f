"""A frame as a consumer gets it: as one message, or its head and then its payload."""

from __future__ import annotations

from vlm_worker.errors import CorruptTransferError, Refusal
from vlm_worker.wire.frame_reader import FrameReader
from vlm_worker.wire.frames import HEADER_BYTES, Units


def read(reader: FrameReader, frame: bytes, *, in_parts: bool) -> Units | None:
    """What the frame completes, either way."""
    if not in_parts:
        return reader.read(frame)
    if len(frame) < HEADER_BYTES:
        raise CorruptTransferError("no head", refusal=Refusal.SIZE)
    view = memoryview(frame)
    payload = view[HEADER_BYTES:]
    for buffer in reader.begin(view[:HEADER_BYTES], payload.nbytes):
        buffer[:], payload = payload[: buffer.nbytes], payload[buffer.nbytes :]
        reader.update(buffer[: buffer.nbytes // 3])
        reader.update(buffer[buffer.nbytes // 3 :])
    return reader.end()
