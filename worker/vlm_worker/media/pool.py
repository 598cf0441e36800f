"""A pool of decode children: image bytes in, patches out.

    prepare(bytes) ─ header ─ wait for a child ─▶ [decode child], one of several ─▶ pixels ─ cut ─▶
                                                   child died: another one replaces it. The image
                                                   fails, or is retried if the cause is external

Owned by one event loop. If a caller is cancelled, its image leaves the queue at once. If a child is
already decoding the image, decoding continues within its limits and the result is dropped.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import hashlib
import logging
import math
import time
from typing import Any, Final, Protocol

import numpy as np

from vlm_worker.core.image_geometry import Geometry, Processor
from vlm_worker.errors import EngineError, InvalidImageError, InvalidRequestError, OverloadedError
from vlm_worker.media.decode_channel import (
    MAX_SALT_BYTES,
    ChildConfig,
    ChildDiedError,
    DecodeChild,
    DecodeRequest,
    DecodeResult,
)
from vlm_worker.media.image_header import ImageHeader, ImageLimits, read_header
from vlm_worker.media.patches import PatchExtractor
from vlm_worker.media.texture import pixel_relevance
from vlm_worker.reduction import Reduction, cells_of, num_kept
from vlm_worker.types import PreparedImage

logger = logging.getLogger(__name__)

HASH_INLINE_BYTES: Final = 256 * 1024
"""Larger files are hashed on a thread, so that the event loop is not blocked."""
DECODE_MEMORY_BYTES = 352 * 1024 * 1024
"""For decoding the largest file: WebP with transparency needs five times four bytes a pixel."""
CHILD_BYTES = 48 << 20
"""Memory of an idle child."""
LARGE_PIXELS = 4 * 1024 * 1024
AT_ONCE_BYTES = 1 << 20
"""Pixel bytes up to this size are cut on the loop: waking a thread would take longer."""


@dataclasses.dataclass(frozen=True, slots=True)
class ImageSpec:
    """What a request states about one image; the pool compares each field to the file.

    `width` and `height` are oriented. `max_pixels` is the request's cap, 0 for the model's limit.
    `salt` separates tenants. `num_tokens` is after the `reduction`.
    """

    item: int
    format: str
    width: int
    height: int
    num_tokens: int
    max_pixels: int = 0
    salt: bytes = b""
    reduction: Reduction | None = None


REFUSALS: Final = (
    "invalid_image",
    "image_too_large",
    "image_aspect_ratio",
    "image_type_mismatch",
    "image_mismatch",
    "unsupported_image_format",
    "animated_not_supported",
)
"""Every code of an InvalidImageError that the pool raises."""


@dataclasses.dataclass(frozen=True, slots=True)
class MediaTimes:
    """The durations of one image within `media`, in seconds.

    `queue`: waiting for a child. `decode`: to RGB. `prepare`: to patches. `key`: hashing.
    """

    queue: float
    decode: float
    prepare: float
    key: float


class MediaObserver(Protocol):
    """Receives the result of each image."""

    def image_prepared(self, times: MediaTimes) -> None:
        """The patches are complete."""

    def image_refused(self, code: str) -> None:
        """The image was refused with a code of `REFUSALS`."""


@dataclasses.dataclass(frozen=True, slots=True)
class MediaSettings:
    """Sizes and limits of a pool.

    `max_waiting` and `max_waiting_pixels` limit the queue. After `timeout_seconds` in a child, the
    child counts as frozen. With `scaled_jpeg`, a JPEG is decoded at the smallest of 1/1, 1/2, 1/4
    and 1/8 that is not smaller than the resized image.
    """

    num_children: int = 2
    max_waiting: int = 256
    max_waiting_pixels: int = 64 * 16_777_216
    max_aliases: int = 4096
    cpu_seconds: int = 2
    timeout_seconds: float = 20.0
    limits: ImageLimits = dataclasses.field(default_factory=ImageLimits)
    scaled_jpeg: bool = False


def decoders_bytes(processor: Processor, *, num_children: int) -> int:
    """Memory of all decode processes: all except one may decode a large image at once."""
    large = DECODE_MEMORY_BYTES + processor.work_bytes
    small = large * LARGE_PIXELS // ImageLimits().max_pixels
    if num_children == 1:
        return CHILD_BYTES + large
    return num_children * CHILD_BYTES + (num_children - 1) * large + small


@dataclasses.dataclass(frozen=True, slots=True)
class _Image:
    data: bytes | memoryview
    header: ImageHeader
    geometry: Geometry
    spec: ImageSpec

    @property
    def pixels(self) -> int:
        return self.header.width * self.header.height

    @property
    def large(self) -> bool:
        """Whether decoding may take a large part of a second."""
        return self.pixels > LARGE_PIXELS


class MediaPool:
    """Call `start` before use and `close` at the end, on the loop that uses it."""

    def __init__(
        self,
        processor: Processor,
        *,
        model_revision: str,
        settings: MediaSettings | None = None,
        observer: MediaObserver | None = None,
        native_library: str | None = None,
    ) -> None:
        self._settings = settings or MediaSettings()
        self._processor = processor
        self._config = ChildConfig(
            processor=processor,
            model_revision=model_revision,
            memory_bytes=DECODE_MEMORY_BYTES + processor.work_bytes,
            cpu_seconds=self._settings.cpu_seconds,
            native_library=native_library,
            scaled_jpeg=self._settings.scaled_jpeg,
        )
        self._cutter = PatchExtractor(native_library)
        self._observer = observer
        self._processes = DecodeProcessPool(self._config, num_places=self._settings.num_children)
        self._running: set[asyncio.Task[Any]] = set()
        self._dropped: set[asyncio.Task[Any]] = set()
        self._aliases: collections.OrderedDict[bytes, PreparedImage] = collections.OrderedDict()
        self._num_waiting = 0
        self._waiting_pixels = 0
        self._seconds_per_image = 0.02
        self._closed = False

    async def start(self) -> None:
        """Start all children; raises EngineError if one does not start."""
        try:
            await self._processes.start()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Kill the children and their work; prepare() fails from now on."""
        self._closed = True
        self._processes.refuse(self._num_waiting)
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        self._processes.end()

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    @property
    def pids(self) -> frozenset[int]:
        return frozenset(child.pid for child in self._processes.alive)

    async def known_key(self, data: bytes | memoryview, spec: ImageSpec) -> PreparedImage | None:
        """The image that the same file gave before, without its patches. Decodes nothing.

        Returns None if the file is new, or has another number of tokens, parameters or salt.
        """
        if len(data) > HASH_INLINE_BYTES:
            digest = await asyncio.to_thread(_digest, data)
        else:
            digest = _digest(data)
        alias = _alias(digest, spec)
        known = self._aliases.get(alias)
        if known is None:
            return None
        known = dataclasses.replace(known, reduction=spec.reduction)
        if known.kept_tokens != spec.num_tokens:
            return None
        self._aliases.move_to_end(alias)
        return known

    def image_bytes(self, spec: ImageSpec) -> int:
        """Bytes of this process that one image takes: its patches and its pixels.

        Computed from `spec`: `prepare` refuses a file that differs from it. 0 if the geometry is
        not supported.
        """
        try:
            geometry = self._processor.capped(spec.max_pixels).geometry(spec.height, spec.width)
        except InvalidRequestError:
            return 0
        patches = 4 * math.prod(geometry.grid_thw) * self._processor.patch_dim
        return patches + 3 * geometry.height * geometry.width

    async def prepare(self, data: bytes | memoryview, spec: ImageSpec) -> PreparedImage:
        """Decode and preprocess one image.

        Raises:
            InvalidImageError: the file cannot be used, or differs from `spec`.
            OverloadedError: too many images wait already.
            EngineError: no child can be started.
        """
        try:
            task = await self._admit(self._check(data, spec))
            try:
                prepared, digest = await asyncio.shield(task)
            except asyncio.CancelledError:
                if not task.done():
                    self._dropped.add(task)
                raise
        except InvalidImageError as error:
            if self._observer is not None:
                self._observer.image_refused(error.code or "invalid_image")
            raise
        alias = _alias(digest, spec)
        self._aliases[alias] = dataclasses.replace(prepared, patches=memoryview(b""), relevance=b"")
        self._aliases.move_to_end(alias)
        if len(self._aliases) > self._settings.max_aliases:
            self._aliases.popitem(last=False)
        return prepared

    def _check(self, data: bytes | memoryview, spec: ImageSpec) -> _Image:
        """Read the header, and compare it to what the gateway used to count tokens."""
        header = read_header(data, item=spec.item, limits=self._settings.limits)
        if len(spec.salt) > MAX_SALT_BYTES:
            raise InvalidRequestError(f"cache_salt has more than {MAX_SALT_BYTES} bytes")
        processor = self._processor.capped(spec.max_pixels)
        geometry = processor.geometry(header.height, header.width)
        num_tokens = num_kept(spec.reduction, geometry.grid_thw, geometry.num_tokens)
        actual = (header.format, header.width, header.height, num_tokens)
        stated = (spec.format, spec.width, spec.height, spec.num_tokens)
        if actual != stated:
            raise InvalidImageError(
                f"the image is {_describe(*actual)}; the request counted on {_describe(*stated)}",
                item=spec.item,
                code="image_mismatch",
            )
        return _Image(data, header, geometry, spec)

    async def _admit(self, image: _Image) -> asyncio.Task[tuple[PreparedImage, bytes]]:
        """Wait for a child, within the queue's limits, and start the request on it."""
        if self._closed:
            raise EngineError("the media pool is closed")
        settings, num_waiting = self._settings, self._num_waiting
        num_pixels = self._waiting_pixels + image.pixels
        if num_waiting >= settings.max_waiting or num_pixels > settings.max_waiting_pixels:
            wait = num_waiting * self._seconds_per_image / settings.num_children
            raise OverloadedError(
                f"{num_waiting} images wait to be decoded already",
                retry_after_seconds=max(1.0, wait),
            )
        queued = time.monotonic()
        self._num_waiting += 1
        self._waiting_pixels += image.pixels
        try:
            child = await self._processes.take(large=image.large)
        finally:
            self._num_waiting -= 1
            self._waiting_pixels -= image.pixels
        # no await between the child and its task: a cancellation cannot lose it
        task = asyncio.create_task(self._work(child, image, queued))
        self._keep(task)
        return task

    async def _work(
        self, child: DecodeChild | None, image: _Image, queued: float
    ) -> tuple[PreparedImage, bytes]:
        """Run one request from child to patches; cutting overlaps the next image's decoding."""
        started = time.monotonic()
        done, body = await self._decoded(child, image)
        if not done.ok:
            raise _refusal(bytes(body), image.spec.item)
        if asyncio.current_task() in self._dropped:  # patches have many times the pixels' bytes
            raise asyncio.CancelledError
        return await self._result(done, body, image, started - queued), done.file_digest

    async def _decoded(
        self, child: DecodeChild | None, image: _Image
    ) -> tuple[DecodeResult, memoryview]:
        """The child's answer; always returns the place to the pool."""
        spec = image.spec
        request = DecodeRequest(image.header, spec.max_pixels, spec.salt, len(image.data))
        try:
            for attempt in (1, 2):
                child = child or await self._processes.spawn()
                try:
                    return await child.run(
                        request,
                        image.data,
                        expected=image.geometry,
                        timeout_seconds=self._settings.timeout_seconds,
                    )
                except ChildDiedError as death:
                    self._processes.remove_dead(child, death)
                    child = None
                    if attempt == 2 or not death.blameless:
                        raise self._verdict(death, spec.item) from death
            raise AssertionError("the second attempt returns or raises")
        finally:
            if child is None:
                self._keep(asyncio.create_task(self._processes.refill(large=image.large)))
            else:
                self._processes.return_process(child, large=image.large)

    async def _result(
        self, done: DecodeResult, body: memoryview, image: _Image, queued: float
    ) -> PreparedImage:
        started = time.perf_counter()
        geometry, reduction = image.geometry, image.spec.reduction
        pixels = np.frombuffer(body, np.uint8).reshape(geometry.height, geometry.width, 3)
        relevance = b""
        if reduction is not None and reduction.method.needs_relevance:
            # before the patches exist, within the memory that is reserved for them
            cells = cells_of(done.grid_thw, done.num_tokens)
            relevance = (await asyncio.to_thread(pixel_relevance, pixels, cells)).tobytes()
        args = pixels, self._processor, geometry  # a cap changes only the geometry
        if self._cutter.is_native and len(body) <= AT_ONCE_BYTES:
            patches = self._cutter.cut(*args)
        else:
            patches = await asyncio.to_thread(self._cutter.cut, *args)
        prepare = done.prepare_us / 1e6 + time.perf_counter() - started
        times = MediaTimes(queued, done.decode_us / 1e6, prepare, done.key_us / 1e6)
        seconds = times.decode + times.prepare + times.key
        self._seconds_per_image += 0.1 * (seconds - self._seconds_per_image)
        if self._observer is not None:
            self._observer.image_prepared(times)
        known = done.image_key, done.grid_thw, done.num_tokens
        data = patches.data.cast("B")
        return PreparedImage(*known, data, reduction, relevance, image.spec.salt)

    def _verdict(self, death: ChildDiedError, item: int) -> Exception:
        if death.returncode >= 0:
            return EngineError(f"the decode child failed with exit status {death.returncode}")
        return InvalidImageError(
            f"the image cannot be decoded within {self._settings.cpu_seconds} s and "
            f"{self._config.memory_bytes >> 20} MiB",
            item=item,
        )

    def _keep(self, task: asyncio.Task[Any]) -> None:
        self._running.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        self._dropped.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio logs no warning if the caller left


def _refusal(body: bytes, item: int) -> InvalidImageError:
    """A child's error. A malicious file may control the child: only known codes are passed on."""
    code, _, message = body.decode(errors="replace").partition("\0")
    if code not in REFUSALS:
        return InvalidImageError("the image cannot be decoded", item=item)
    return InvalidImageError(message, item=item, code=code)


def _digest(data: bytes | memoryview) -> bytes:
    return hashlib.sha256(data).digest()


def _alias(file_digest: bytes, spec: ImageSpec) -> bytes:
    """A key of `_aliases`. Fixed-size fields come first, so that the salt needs no length."""
    return _digest(file_digest + spec.max_pixels.to_bytes(8, "little") + spec.salt)


def _describe(file_format: str, width: int, height: int, num_tokens: int) -> str:
    return f"a {file_format} of {width}x{height} pixels and {num_tokens} tokens"


class DecodeProcessPool:
    def __init__(self, config: ChildConfig, *, num_places: int) -> None:
        self._config = config
        self._num_places = num_places
        self._idle: asyncio.LifoQueue[DecodeChild | None] = asyncio.LifoQueue()
        # with a single place, large images use it too
        self._large = asyncio.Semaphore(max(num_places - 1, 1))
        self.alive: set[DecodeChild] = set()
        self._closed = False

    async def start(self) -> None:
        """Start all children; raises EngineError if one does not start."""
        starting = [self.spawn() for _ in range(self._num_places)]
        # wait for all, so that none starts after the failure of another one closed the pool
        for child in await asyncio.gather(*starting, return_exceptions=True):
            if isinstance(child, BaseException):
                raise child
            self._idle.put_nowait(child)
        if not all(child.filtered for child in self.alive):
            logger.warning("decode children run without a filter of system calls")

    def refuse(self, num_waiting: int) -> None:
        """Start no more children, and wake the waiters, which then find the pool closed."""
        self._closed = True
        for _ in range(num_waiting):
            self._large.release()
            self._idle.put_nowait(None)

    def end(self) -> None:
        for child in self.alive:
            child.close()
        self.alive.clear()

    async def take(self, *, large: bool) -> DecodeChild | None:
        """An idle child; None is a place whose child died. First come, first served per size."""
        if large:
            await self._large.acquire()
        try:
            return await self._idle.get()
        except BaseException:
            if large:
                self._large.release()
            raise

    def return_process(self, child: DecodeChild | None, *, large: bool) -> None:
        """Return the place that `take` gave, with the child that is in it now."""
        if large:
            self._large.release()
        self._idle.put_nowait(child)

    async def spawn(self) -> DecodeChild:
        """Start one child; raises EngineError if it does not start or the pool is closed."""
        if self._closed:
            raise EngineError("the media pool is closed")
        child = await DecodeChild.start(self._config)
        self.alive.add(child)
        if self._closed:  # meanwhile: `end` did not see this child
            self.alive.discard(child)
            child.close()
            raise EngineError("the media pool is closed")
        return child

    async def refill(self, *, large: bool) -> None:
        """Return the place of a child that died, with a new child if one starts."""
        child = None
        try:
            child = await self.spawn()
        except EngineError as error:
            logger.warning("decode child not restarted", extra={"error": str(error)})
        finally:
            self.return_process(child, large=large)

    def remove_dead(self, child: DecodeChild, death: ChildDiedError) -> None:
        logger.warning(
            "decode child died", extra={"pid": child.pid, "returncode": death.returncode}
        )
        self.alive.discard(child)
        child.close()
