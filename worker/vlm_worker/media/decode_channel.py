"""The protocol between worker and decode child: binary frames on a socket pair; the worker side.

    child  ──READY──▶ worker          imports are done, limits are set; with or without seccomp
    worker ──DecodeRequest + file──▶ child
    child  ──DecodeResult + pixels──▶ worker, or ──DecodeResult + code NUL message──▶ worker

A frame is a fixed head and a body whose length is in the head. Nothing is unpickled. The child
returns the pixels of `patches.model_pixels`, because patches would have eight times the bytes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from typing import NamedTuple, Self

from vlm_worker.core.image_geometry import PROCESSORS, Geometry, Processor
from vlm_worker.errors import EngineError
from vlm_worker.media.image_header import FORMATS, ImageHeader
from vlm_worker.wire.buffers import new_buffer

READY = b"decode/2"
READY_UNFILTERED = b"decode:2"
"""Sent instead of `READY`, with the same length, if the kernel does not support seccomp."""


@dataclasses.dataclass(frozen=True, slots=True)
class ChildConfig:
    """The configuration of a child, passed on its command line.

    One image may use `memory_bytes` more than the idle child, and `cpu_seconds`. The kernel refuses
    more memory and kills a child that uses more CPU time. `native_library` is the file with the
    native resizing; None selects Pillow. `scaled_jpeg` is that of `MediaSettings`.
    """

    processor: Processor
    model_revision: str
    memory_bytes: int
    cpu_seconds: int
    native_library: str | None = None
    scaled_jpeg: bool = False

    def to_json(self) -> str:
        return json.dumps({"kind": self.processor.kind, **dataclasses.asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> ChildConfig:
        fields = json.loads(text)
        kind, processor = fields.pop("kind"), fields.pop("processor")
        for name in ("image_mean", "image_std"):
            processor[name] = tuple(processor[name])
        return cls(processor=PROCESSORS[kind](**processor), **fields)


MAX_SALT_BYTES = 64
_REQUEST = struct.Struct(f"<BIIBBQQB{MAX_SALT_BYTES}s")
_RESULT = struct.Struct("<?32s32sIIIIQQQQ")
REQUEST_BYTES = _REQUEST.size
RESULT_BYTES = _RESULT.size


class DecodeRequest(NamedTuple):
    """One file to decode; `salt` is at most `MAX_SALT_BYTES` long."""

    header: ImageHeader
    max_pixels: int
    salt: bytes
    num_bytes: int

    def pack(self) -> bytes:
        """The frame's head; the file's bytes follow."""
        h, salt = self.header, self.salt
        side = FORMATS.index(h.format), h.width, h.height, h.orientation, h.bits
        return _REQUEST.pack(*side, self.max_pixels, self.num_bytes, len(salt), salt)

    @classmethod
    def unpack(cls, head: bytes) -> DecodeRequest:
        form, *side, max_pixels, num_bytes, num_salt, salt = _REQUEST.unpack(head)
        return cls(ImageHeader(FORMATS[form], *side), max_pixels, salt[:num_salt], num_bytes)


class DecodeResult(NamedTuple):
    """The result of a request: key, file digest and grid, then pixels; or an error, then its text.

    `decode_us`, `prepare_us` and `key_us` are durations measured by the child, in microseconds.
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

    def pack(self) -> bytes:
        """The frame's head; pixels, or the error's text, follow."""
        return _RESULT.pack(*self[:3], *self.grid_thw, *self[4:])

    @classmethod
    def unpack(cls, head: bytes) -> DecodeResult:
        ok, key, digest, t, h, w, *rest = _RESULT.unpack(head)
        return cls(ok, key, digest, (t, h, w), *rest)

    @classmethod
    def failure(cls, num_bytes: int) -> DecodeResult:
        """The head of an error whose text has `num_bytes` bytes."""
        return cls(False, bytes(32), bytes(32), (0, 0, 0), 0, 0, 0, 0, num_bytes)


def receive(channel: socket.socket, num_bytes: int) -> bytearray:
    """Receive exactly `num_bytes` from a blocking socket; raises EOFError if it closes earlier."""
    buffer = bytearray(num_bytes)
    view = memoryview(buffer)
    while view:
        count = channel.recv_into(view)
        if not count:
            raise EOFError("the other side closed the channel")
        view = view[count:]
    return buffer


START_SECONDS = 30.0
BUFFER_BYTES = 1 << 20

MAX_ERROR_BYTES = 4096

# If one of these ends a child, its cause is external (OOM killer, operator), not the image.
OUTSIDE_SIGNALS = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT})


class ChildDiedError(Exception):
    """The child ended during a request.

    `returncode` is the exit status of the process, negative for a signal. `blameless` is True if
    an external cause ended or froze the child: the request may then be retried on another child.
    """

    def __init__(self, returncode: int, *, blameless: bool) -> None:
        super().__init__(f"the decode child ended with {returncode}")
        self.returncode = returncode
        self.blameless = blameless


class DecodeChild:
    """One decode process. Its owner runs one request at a time and closes it.

    `filtered`: a seccomp filter limits it to the system calls that decoding needs.
    """

    def __init__(self, process: subprocess.Popen[bytes], channel: socket.socket) -> None:
        self._process = process
        self._channel = channel
        self.filtered = False

    @property
    def pid(self) -> int:
        return self._process.pid

    @classmethod
    async def start(cls, config: ChildConfig) -> Self:
        """Start a process and wait until it is ready; raises EngineError if it fails."""
        ours, theirs = socket.socketpair()
        with theirs:
            for end in (ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
            ours.setblocking(False)
            process = _spawn(config, theirs)
        child = cls(process, ours)
        try:
            ready = await asyncio.wait_for(child._receive(len(READY)), START_SECONDS)
            child.filtered = bytes(ready) == READY
            if bytes(ready) not in (READY, READY_UNFILTERED):
                raise EngineError("the decode child speaks another protocol")
        except (TimeoutError, EOFError, OSError) as error:
            child.close()
            raise EngineError(
                f"the decode child did not start (exit status {process.returncode})"
            ) from error
        except BaseException:
            child.close()
            raise
        return child

    async def run(
        self,
        request: DecodeRequest,
        data: bytes | memoryview,
        *,
        expected: Geometry,
        timeout_seconds: float,
    ) -> tuple[DecodeResult, memoryview]:
        """Run one request. The second value is the pixels, or the error's text.

        A malicious file may control the child. If the answer's shape differs from `expected`, the
        child is killed before any memory is allocated for the answer.

        Raises:
            ChildDiedError: the process ended before it answered, or exceeded the timeout.
        """
        try:
            async with asyncio.timeout(timeout_seconds):
                loop = asyncio.get_running_loop()
                await loop.sock_sendall(self._channel, request.pack())
                await loop.sock_sendall(self._channel, data)
                result = DecodeResult.unpack(bytes(await self._receive(RESULT_BYTES)))
                if _is_sound(result, expected):
                    return result, await self._receive(result.num_bytes)
        except TimeoutError as error:
            # its CPU limit is lower, so it was frozen, or got no CPU time
            self._process.kill()
            raise ChildDiedError(await self._wait(), blameless=True) from error
        except (EOFError, OSError) as error:
            returncode = await self._wait()
            blameless = -returncode in OUTSIDE_SIGNALS
            raise ChildDiedError(returncode, blameless=blameless) from error
        self._process.kill()
        raise ChildDiedError(await self._wait(), blameless=False)

    def close(self) -> None:
        """Kill the process; it has no state to save."""
        self._channel.close()
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    async def _wait(self) -> int:
        return await asyncio.to_thread(self._process.wait)

    async def _receive(self, num_bytes: int) -> memoryview:
        loop = asyncio.get_running_loop()
        buffer = view = new_buffer(num_bytes)
        while view:
            count = await loop.sock_recv_into(self._channel, view)
            if not count:
                raise EOFError
            view = view[count:]
        return buffer


def _is_sound(result: DecodeResult, expected: Geometry) -> bool:
    if not result.ok:
        return result.num_bytes <= MAX_ERROR_BYTES
    return (result.grid_thw, result.num_tokens, result.num_bytes) == (
        expected.grid_thw,
        expected.num_tokens,
        3 * expected.height * expected.width,
    )


def _spawn(config: ChildConfig, channel: socket.socket) -> subprocess.Popen[bytes]:
    """Start with exec, not fork: the child inherits no memory, descriptors or environment."""
    module = "vlm_worker.media.decode_child"
    return subprocess.Popen(  # noqa: S603 - our own interpreter and module
        # -W: a library's warnings about malformed files do not belong in the worker's log
        [sys.executable, "-P", "-S", "-W", "ignore", "-m", module, config.to_json()],
        stdin=channel.fileno(),
        stdout=subprocess.DEVNULL,
        env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OPENBLAS_NUM_THREADS": "1"},
        close_fds=True,
        start_new_session=True,
    )
