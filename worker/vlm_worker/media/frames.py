"""What a worker and its decode child say to each other: fixed binary frames over a socket pair.

    child  ──READY──▶ worker          imports are done, limits are set
    worker ──Job + file──▶ child
    child  ──Done + pixels──▶ worker, or ──Done + code NUL message──▶ worker

Every frame is a fixed head and as many bytes as the head says. Nothing is unpickled. Pixels are
those of `patches.model_pixels`: patches would be eight times as many bytes.
"""

from __future__ import annotations

import dataclasses
import json
import socket
import struct
from typing import ClassVar

from vlm_worker.core.geometry import PROCESSORS, Processor
from vlm_worker.media.header import FORMATS, ImageHeader

READY = b"decode/1"


@dataclasses.dataclass(frozen=True, slots=True)
class ChildConfig:
    """What a child is told once, on its command line.

    One picture may take `memory_bytes` beyond the idle child, and `cpu_seconds`; the kernel refuses
    more memory and ends a child that takes more time. `native_library` is the file with the fast
    resizing, None where there is none. `scaled_jpeg` is that of `MediaSettings`.
    """

    processor: Processor
    model_revision: str
    memory_bytes: int
    cpu_seconds: int
    native_library: str | None = None
    scaled_jpeg: bool = False

    def to_json(self) -> str:
        """One argument."""
        return json.dumps({"kind": self.processor.kind, **dataclasses.asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> ChildConfig:
        """The inverse of `to_json`."""
        fields = json.loads(text)
        kind, processor = fields.pop("kind"), fields.pop("processor")
        for name in ("image_mean", "image_std"):
            processor[name] = tuple(processor[name])
        return cls(processor=PROCESSORS[kind](**processor), **fields)


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """One file to decode; `salt` is at most `MAX_SALT_BYTES` long."""

    header: ImageHeader
    max_pixels: int
    salt: bytes
    num_bytes: int

    MAX_SALT_BYTES: ClassVar[int] = 64
    _LAYOUT: ClassVar = struct.Struct(f"<BIIBBQQB{MAX_SALT_BYTES}s")
    SIZE: ClassVar[int] = _LAYOUT.size

    def pack(self) -> bytes:
        """The frame's head; the file's bytes follow."""
        h = self.header
        return self._LAYOUT.pack(
            FORMATS.index(h.format),
            h.width,
            h.height,
            h.orientation,
            h.bits,
            self.max_pixels,
            self.num_bytes,
            len(self.salt),
            self.salt,
        )

    @classmethod
    def unpack(cls, head: bytes) -> Job:
        """The inverse of `pack`."""
        form, width, height, turned, bits, max_pixels, num_bytes, num_salt, salt = (
            cls._LAYOUT.unpack(head)
        )
        header = ImageHeader(FORMATS[form], width, height, turned, bits)
        return cls(header, max_pixels, salt[:num_salt], num_bytes)


@dataclasses.dataclass(frozen=True, slots=True)
class Done:
    """A job's end: key, digest of the file and grid, then pixels; or an error, then its text.

    `decode_us`, `prepare_us` and `key_us` are the child's own times, in microseconds.
    """

    ok: bool
    image_key: bytes
    file_digest: bytes
    grid_thw: tuple[int, int, int]
    num_tokens: int
    decode_us: int
    prepare_us: int
    key_us: int
    num_bytes: int

    _LAYOUT: ClassVar = struct.Struct("<B32s32sIIIIQQQQ")
    SIZE: ClassVar[int] = _LAYOUT.size

    def pack(self) -> bytes:
        """The frame's head."""
        return self._LAYOUT.pack(
            self.ok,
            self.image_key,
            self.file_digest,
            *self.grid_thw,
            self.num_tokens,
            self.decode_us,
            self.prepare_us,
            self.key_us,
            self.num_bytes,
        )

    @classmethod
    def unpack(cls, head: bytes) -> Done:
        """The inverse of `pack`."""
        ok, key, digest, t, h, w, *rest = cls._LAYOUT.unpack(head)
        return cls(bool(ok), key, digest, (t, h, w), *rest)

    @classmethod
    def failure(cls, num_bytes: int) -> Done:
        """The head of an error whose text has `num_bytes`."""
        return cls(False, bytes(32), bytes(32), (0, 0, 0), 0, 0, 0, 0, num_bytes)


def receive(channel: socket.socket, num_bytes: int) -> bytearray:
    """Exactly so many bytes from a blocking socket; raises EOFError where it ends before."""
    buffer = bytearray(num_bytes)
    view = memoryview(buffer)
    while view:
        count = channel.recv_into(view)
        if not count:
            raise EOFError("the other side closed the channel")
        view = view[count:]
    return buffer
