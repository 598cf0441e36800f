"""Decode children behind one awaitable: bytes in, patches out, whatever the bytes do.

    prepare(bytes) ─ header ─ wait for a child ─▶ [decode child], one of several ─▶ pixels ─ cut ─▶
                                                   dies? another takes its place; the picture
                                                   is an error, or tried again if not to blame

Owned by one event loop. A picture whose caller is cancelled leaves the queue at once; one that is
already being decoded runs to its end, which its limits bound, and its result is dropped.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from typing import Any

import numpy as np

from vlm_worker.core.geometry import Geometry, Processor
from vlm_worker.errors import EngineError, InvalidImageError, InvalidRequestError, OverloadedError
from vlm_worker.media.aliases import AliasCache, KnownImage
from vlm_worker.media.child import ChildDiedError, DecodeChild
from vlm_worker.media.children import Children
from vlm_worker.media.frames import ChildConfig, Done, Job
from vlm_worker.media.header import ImageHeader, read_header
from vlm_worker.media.patches import Cutter
from vlm_worker.media.spec import REFUSALS, ImageSpec, MediaObserver, MediaSettings, MediaTimes
from vlm_worker.types import PreparedImage

__all__ = ["ImageSpec", "KnownImage", "MediaObserver", "MediaPool", "MediaSettings", "MediaTimes"]

DECODE_MEMORY_BYTES = 512 * 1024 * 1024
LARGE_PIXELS = 4 * 1024 * 1024
AT_ONCE_BYTES = 1 << 20
"""Of pixels: cut on the loop, in less time than a thread takes to be woken."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Picture:
    """One file on its way: what its header says, what it is to become, what was asked."""

    data: bytes | memoryview
    header: ImageHeader
    geometry: Geometry
    spec: ImageSpec

    @property
    def pixels(self) -> int:
        """Before resizing."""
        return self.header.width * self.header.height

    @property
    def large(self) -> bool:
        """It may take a good part of a second."""
        return self.pixels > LARGE_PIXELS

    @property
    def job(self) -> Job:
        """What a child is told."""
        return Job(self.header, self.spec.max_pixels, self.spec.salt, len(self.data))


class MediaPool:
    """See the module. `start` before use, `close` at the end; both by the loop that uses it."""

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
        self._cutter = Cutter(native_library)
        self._observer = observer
        self._children = Children(self._config, num_places=self._settings.num_children)
        self._running: set[asyncio.Task[Any]] = set()
        self._dropped: set[asyncio.Task[Any]] = set()
        self._aliases = AliasCache(self._settings.max_aliases)
        self._num_waiting = 0
        self._waiting_pixels = 0
        self._seconds_per_image = 0.02
        self._closed = False

    async def start(self) -> None:
        """Start all children; raises EngineError where one does not come up."""
        try:
            await self._children.start()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End the children and what they run; prepare() fails from here on."""
        self._closed = True
        self._children.refuse(self._num_waiting)
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        self._children.end()

    @property
    def num_waiting(self) -> int:
        """Pictures that wait for a child."""
        return self._num_waiting

    @property
    def pids(self) -> frozenset[int]:
        """Process ids of the children that run."""
        return frozenset(child.pid for child in self._children)

    async def known_key(self, data: bytes | memoryview, spec: ImageSpec) -> KnownImage | None:
        """What this very file became before, under the same parameters and salt; no decoding.

        None where it is new, or where `spec` promises another number of tokens.
        """
        return await self._aliases.find(
            data, max_pixels=spec.max_pixels, salt=spec.salt, num_tokens=spec.num_tokens
        )

    def image_bytes(self, spec: ImageSpec) -> int:
        """Memory of this process that one image takes: its patches and its pixels.

        As `spec` says: `prepare` refuses a file that says otherwise. 0 if no such image is served.
        """
        try:
            geometry = self._processor.capped(spec.max_pixels).geometry(spec.height, spec.width)
        except InvalidRequestError:
            return 0
        patches = 4 * math.prod(geometry.grid_thw) * self._processor.patch_dim
        return patches + 3 * geometry.height * geometry.width

    async def prepare(self, data: bytes | memoryview, spec: ImageSpec) -> PreparedImage:
        """Decode and preprocess one picture.

        Raises:
            InvalidImageError: the file cannot be used, or is not what `spec` says.
            OverloadedError: too many pictures wait already.
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
                self._observer.picture_refused(error.code or "invalid_image")
            raise
        self._aliases.add(digest, prepared, max_pixels=spec.max_pixels, salt=spec.salt)
        return prepared

    def _check(self, data: bytes | memoryview, spec: ImageSpec) -> _Picture:
        """Read the header, and hold it to what the gateway counted its tokens from."""
        header = read_header(data, item=spec.item, limits=self._settings.limits)
        if len(spec.salt) > Job.MAX_SALT_BYTES:
            raise InvalidRequestError(f"cache_salt has more than {Job.MAX_SALT_BYTES} bytes")
        processor = self._processor.capped(spec.max_pixels)
        geometry = processor.geometry(header.height, header.width)
        found = (header.format, header.width, header.height, geometry.num_tokens)
        said = (spec.format, spec.width, spec.height, spec.num_tokens)
        if found != said:
            raise InvalidImageError(
                f"the image is {_describe(*found)}; the request counted on {_describe(*said)}",
                item=spec.item,
                code="image_mismatch",
            )
        return _Picture(data, header, geometry, spec)

    async def _admit(self, picture: _Picture) -> asyncio.Task[tuple[PreparedImage, bytes]]:
        """Wait for a child, within the queue's bounds, and hand it the job."""
        if self._closed:
            raise EngineError("the media pool is closed")
        pixels, settings = picture.pixels, self._settings
        if (
            self._num_waiting >= settings.max_waiting
            or self._waiting_pixels + pixels > settings.max_waiting_pixels
        ):
            wait = self._num_waiting * self._seconds_per_image / settings.num_children
            raise OverloadedError(
                f"{self._num_waiting} images wait to be decoded already",
                retry_after_seconds=max(1.0, wait),
            )
        queued = time.monotonic()
        self._num_waiting += 1
        self._waiting_pixels += pixels
        try:
            child = await self._children.take(large=picture.large)
        finally:
            self._num_waiting -= 1
            self._waiting_pixels -= pixels
        # no await between the child and its task: a cancellation cannot lose it
        task = asyncio.create_task(self._work(child, picture, queued))
        self._keep(task)
        return task

    async def _work(
        self, child: DecodeChild | None, picture: _Picture, queued: float
    ) -> tuple[PreparedImage, bytes]:
        """One job from child to patches, which are cut beside the next picture's decoding."""
        begun = time.monotonic()
        done, body = await self._decoded(child, picture)
        if not done.ok:
            raise _refusal(bytes(body), picture.spec.item)
        if asyncio.current_task() in self._dropped:  # patches are many times the pixels
            raise asyncio.CancelledError
        return await self._result(done, body, picture.geometry, begun - queued), done.file_digest

    async def _decoded(
        self, child: DecodeChild | None, picture: _Picture
    ) -> tuple[Done, bytearray]:
        """What a child says; always gives a place in the pool back."""
        try:
            for attempt in (1, 2):
                child = child or await self._children.spawn()
                try:
                    return await child.run(
                        picture.job,
                        picture.data,
                        expected=picture.geometry,
                        timeout_seconds=self._settings.timeout_seconds,
                    )
                except ChildDiedError as death:
                    self._children.bury(child, death)
                    child = None
                    if attempt == 2 or not death.blameless:
                        raise self._verdict(death, picture.spec.item) from death
            raise AssertionError("the second attempt returns or raises")
        finally:
            if child is None:
                self._keep(asyncio.create_task(self._refill(large=picture.large)))
            else:
                self._children.give_back(child, large=picture.large)

    async def _result(
        self, done: Done, body: bytearray, geometry: Geometry, queued: float
    ) -> PreparedImage:
        """Patches of a child's pixels."""
        begun = time.perf_counter()
        pixels = np.frombuffer(body, np.uint8).reshape(geometry.height, geometry.width, 3)
        given = pixels, self._processor, geometry  # of which a cap changes the geometry alone
        if self._cutter.is_native and len(body) <= AT_ONCE_BYTES:
            patches = self._cutter.cut(*given)
        else:
            patches = await asyncio.to_thread(self._cutter.cut, *given)
        prepare = done.prepare_us / 1e6 + time.perf_counter() - begun
        times = MediaTimes(queued, done.decode_us / 1e6, prepare, done.key_us / 1e6)
        seconds = times.decode + times.prepare + times.key
        self._seconds_per_image += 0.1 * (seconds - self._seconds_per_image)
        if self._observer is not None:
            self._observer.picture_prepared(times)
        values = patches.data.cast("B")
        return PreparedImage(done.image_key, done.grid_thw, done.num_tokens, values)

    def _verdict(self, death: ChildDiedError, item: int) -> Exception:
        if death.returncode >= 0:
            return EngineError(f"the decode child failed with exit status {death.returncode}")
        return InvalidImageError(
            f"the image cannot be decoded within {self._settings.cpu_seconds} s and "
            f"{self._config.memory_bytes >> 20} MiB",
            item=item,
        )

    async def _refill(self, *, large: bool) -> None:
        """Give back the place of a child that died, with another one where possible."""
        child = None
        try:
            child = await self._children.replacement()
        finally:
            self._children.give_back(child, large=large)

    def _keep(self, task: asyncio.Task[Any]) -> None:
        self._running.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        self._dropped.discard(task)
        if not task.cancelled():
            task.exception()  # marks it as seen where its caller is gone


def _refusal(body: bytes, item: int) -> InvalidImageError:
    """A child's error. It may be in the hands of the file: only codes that exist are passed on."""
    code, _, message = body.decode(errors="replace").partition("\0")
    if code not in REFUSALS:
        return InvalidImageError("the image cannot be decoded", item=item)
    return InvalidImageError(message, item=item, code=code)


def _describe(file_format: str, width: int, height: int, num_tokens: int) -> str:
    return f"a {file_format} of {width}x{height} pixels and {num_tokens} tokens"
