"""Encode calls on the engine thread: which items are pending, and which embeddings are pinned.

    encode(key, images) --HIT--> ItemReady
                        --GIVEN-> a client's rows -> cache -> ItemReady
                        --JOIN-> wait for the encoding in flight
                        --MISS-> EmbeddingReads: disk, or EncoderQueue -> cache -> all waiting calls

Prompts (`prompt_embeddings`) use the same cache: an embedding of this engine reaches its own
prefill without a copy.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Hashable
from typing import Any

from vlm_worker.core.encoder_cache import EncoderCache, Entry
from vlm_worker.core.fair_order import FIRST_COME, Rank
from vlm_worker.core.limits import Demand, QueueLimit
from vlm_worker.core.step_time import retry_after
from vlm_worker.engine.attempts import Attempt, EngineContext, ResourceKind, Totals
from vlm_worker.engine.embedding_files import EmbeddingFiles
from vlm_worker.engine.embedding_reads import EmbeddingReads
from vlm_worker.engine.encoder_batches import EncoderQueue, num_pixels
from vlm_worker.engine.events import EncodeEvent, EventBuffer, EventStream, ItemFailed, ItemReady
from vlm_worker.engine.reduced_images import ReducedImages
from vlm_worker.engine.runner import EmbeddingCopies
from vlm_worker.errors import (
    CorruptTransferError,
    DrainingError,
    DuplicateError,
    EngineError,
    GoneError,
    InvalidImageError,
    InvalidRequestError,
    WorkerError,
)
from vlm_worker.types import ImageItem, PreparedImage, RequestKey

Times = tuple[float, float, float]
"""When an item was queued, started and finished, in seconds."""


@dataclasses.dataclass(eq=False, slots=True)
class EncodeCall:
    """One `encode` call and its items that have not sent their event."""

    attempt: Attempt
    stream: EventStream[EncodeEvent]
    pending: set[int]
    rank: Rank
    events: EventBuffer
    kind = ResourceKind.ENCODE_CALL
    num_bytes = 0

    def release(self) -> bool:
        self.events.end(self.stream)
        return True


@dataclasses.dataclass(eq=False, frozen=True, slots=True)
class EmbeddingPin:
    """An embedding that is queued or held for a peer. `item` is None before `encode` names it.

    Its bytes count for each attempt, shared images included: each has copies made for its peer.
    """

    entry: Entry
    owner: Hashable
    item: int | None
    num_bytes: int
    requests: EncodeRequests
    kind = ResourceKind.EMBEDDING_PIN

    def release(self) -> bool:
        self.requests.unpin(self.entry, self.owner)
        return True


class EncodeRequests:
    """The encode track of all attempts. Engine thread only. `Engine` documents the commands."""

    def __init__(self, context: EngineContext, files: EmbeddingFiles | None = None) -> None:
        runner, settings = context.runner, context.settings
        num_tokens = settings.max_image_tokens or settings.max_model_len
        needed = num_tokens * runner.embed_layout.row_bytes
        if needed > settings.embedding_cache_bytes:  # E6
            raise ValueError(
                f"the largest image has {num_tokens} visual tokens, {needed} bytes of embedding; "
                f"embedding_cache_bytes is {settings.embedding_cache_bytes}: give it at least as "
                "much"
            )
        self.copies = EmbeddingCopies(runner)
        self.cache = EncoderCache(
            self.copies,
            max_bytes=settings.embedding_cache_bytes,
            cold_bytes=settings.embedding_cold_cache_bytes or 0,
            ttl_seconds=settings.embedding_ttl_seconds,
        )
        self.queue = EncoderQueue(context, self.cache)
        self.reads = EmbeddingReads(context, self.cache, self.queue, self.copies, files)
        self._reduced = ReducedImages(context, self.cache, self.queue, self.copies, self.reads)
        self._answers: list[Callable[[bool], None]] = []
        self._draining = False
        self._context = context
        self._runner, self._settings = runner, settings
        self._clock, self._events = context.clock, context.events
        self._attempts = context.attempts

    # ---- commands --------------------------------------------------------------------------------
    def pin_cached(self, key: RequestKey, image: PreparedImage) -> bool:
        now = self._clock()
        image_key, num_tokens = image.kept_key, image.kept_tokens
        entry = self.cache.find(image_key, num_tokens=num_tokens, now=now)
        if entry is not None and entry.ready:  # `encode` will count the lookup
            entry = self.cache.lookup(image_key, key, num_tokens=num_tokens, now=now, counted=False)
        elif entry is None and image.is_reduced_after:
            with contextlib.suppress(EngineError):  # `encode` tries again, and fails the item
                entry = self._reduced.from_cache(image, key, counted=False)
        if entry is None or not entry.ready:
            return False
        if all((pin.entry, pin.owner) != (entry, key) for pin in self._cached_pins(key)):
            pin = EmbeddingPin(entry, key, None, self._num_bytes(image), self)
            self._attempts.open(key).acquire(pin)
        return True

    def read_whole(
        self, key: RequestKey, image: PreparedImage, answer: Callable[[bool], None]
    ) -> None:
        """Read a whole image from the disk into the cache, pinned until `unpin_whole`.

        `answer` gets whether it is in the cache: False at once if the disk does not have it, or if
        the whole image is of no use to an approximate reduction.
        """
        image_key, num_tokens, now = image.image_key, image.num_tokens, self._clock()
        owner = _reader(key, image)
        whole = self.cache.find(image_key, num_tokens=num_tokens, now=now)
        begins = whole is None and self.reads.has(image_key)
        if image.is_approximate:
            answer(False)
            return
        if begins:
            whole = self.cache.begin(
                image_key, owner, num_tokens=num_tokens, counted=False, now=now
            )
        elif whole is not None and self.reads.is_reading(whole):
            self.cache.lookup(image_key, owner, num_tokens=num_tokens, now=now, counted=False)
        else:
            answer(False)
            return
        assert whole is not None
        if all((pin.entry, pin.owner) != (whole, owner) for pin in self._cached_pins(key)):
            # a reduced image's whole is unpinned before the call holds anything for a peer
            num_bytes = self._num_bytes(image) if image.reduction is None else 0
            self._attempts.open(key).acquire(EmbeddingPin(whole, owner, None, num_bytes, self))
        self._answers.append(answer)
        whole.waiters.append(lambda error: self._answer(answer, is_cached=error is None))
        if begins:  # `encode` will count the lookup
            self.reads.fill(whole, None, counted=False)

    def pin_read(self, key: RequestKey, image: PreparedImage) -> bool:
        """`pin_cached` after `read_whole`, which has read the image; includes `unpin_whole`."""
        is_pinned = self.pin_cached(key, image)
        self.unpin_whole(key, image)
        return is_pinned

    def unpin_whole(self, key: RequestKey, image: PreparedImage) -> None:
        """Unpin what `read_whole` pinned for a reduced image; idempotent.

        It is in no account, and a call lives long. If it is evicted, `encode` reads it again.
        """
        owner = _reader(key, image)
        for pin in self._cached_pins(key):
            if pin.owner == owner != key:
                self._attempts.by_key[key].release(pin)

    def unpin_cached(self, key: RequestKey) -> None:
        for pin in self._cached_pins(key):
            self._attempts.by_key[key].release(pin)

    def encode(
        self,
        key: RequestKey,
        images: tuple[PreparedImage, ...],
        stream: EventStream[EncodeEvent],
        *,
        rank: Rank = FIRST_COME,
        pins_session: bool = False,
    ) -> None:
        if not images:
            self._events.end(stream)
            return
        items = range(len(images))
        try:
            self._check(key, images)
        except WorkerError as refusal:
            for item in items:
                self._events.emit(stream, ItemFailed(item, refusal))
            self._events.end(stream)
            return
        attempt = self._attempts.open(key)
        call = EncodeCall(attempt, stream, set(items), rank, self._events)
        attempt.acquire(call)
        for item, image in enumerate(images):
            self._begin(call, item, image)
        if pins_session and self._settings.session_pin_seconds:
            self._pin_for_session(key, len(images))
        self.unpin_cached(key)  # each is pinned as an item now

    def export(self, key: RequestKey, item: int) -> memoryview:
        pin = self._item_pin(key, item)
        if pin is None or not pin.entry.ready:
            raise GoneError(f"embedding {item} of {key.request_id} is not held here")
        return self._rows(pin.entry)

    def release(self, key: RequestKey, item: int) -> None:
        pin = self._item_pin(key, item)
        if pin is not None:
            self._attempts.by_key[key].release(pin)

    def drain(self, error: WorkerError) -> int:
        """Refuse new calls and fail the waiting images; returns their number."""
        self._draining = True
        return self.queue.drain(error) + self.reads.drain(error)

    def fail_pending(self, error: WorkerError) -> None:
        """End every stream; nothing is freed."""
        for answer in tuple(self._answers):
            self._answer(answer, is_cached=False)
        for attempt in self._attempts.by_key.values():
            for call in attempt.of(EncodeCall):
                for item in sorted(call.pending):
                    self._events.emit(call.stream, ItemFailed(item, error))
                self._events.end(call.stream)

    @property
    def held(self) -> Totals:
        """The embeddings that are queued or held for peers."""
        return self._attempts.totals[ResourceKind.EMBEDDING_PIN]

    @property
    def num_whole_pins(self) -> int:
        """Pins of whole images that are filled for their reductions."""
        return self._reduced.num_pins

    # ---- for prompts -----------------------------------------------------------------------------
    def find(self, image: ImageItem | PreparedImage) -> Entry | None:
        """The entry of an image, cached or being encoded."""
        return self.cache.find(image.image_key, num_tokens=image.num_tokens, now=self._clock())

    def take(self, image: ImageItem, owner: Hashable, *, key: RequestKey) -> Entry | None:
        """Pin the entry of an image for `owner`, cached or being encoded; None if there is none."""
        return self.cache.lookup(
            image.image_key,
            owner,
            num_tokens=image.num_tokens,
            now=self._clock(),
            counted=not self._is_encoded(key),  # else its `encode` was counted
        )

    def cached(self, image: ImageItem, owner: Hashable) -> Entry | None:
        """Pin the complete entry of an image in memory for `owner`; it counts no hit."""
        entry = self.find(image)
        if entry is None or not entry.ready:
            return None
        return self.cache.lookup(
            image.image_key,
            owner,
            num_tokens=image.num_tokens,
            now=self._clock(),
            counted=False,
        )

    def check_size(self, image: ImageItem, rows: memoryview) -> None:
        """Raise CorruptTransferError if the rows are not those of an image, places included."""
        row_bytes = self._runner.embed_layout.row_bytes_of(image.reduction)
        if rows.nbytes != image.num_tokens * row_bytes:
            raise CorruptTransferError(
                f"the embedding of {image.num_tokens} tokens has {rows.nbytes} bytes, "
                f"not {image.num_tokens * row_bytes}"
            )

    def insert(self, image: ImageItem, embedding: Any, owner: Hashable) -> Entry:
        """Cache an embedding that a peer sent, pinned for `owner`."""
        entry = self.cache.begin(image.image_key, owner, num_tokens=image.num_tokens)
        self.cache.complete(entry, embedding, now=self._clock())
        self.queue.on_ready(image.image_key)
        return entry

    def unpin(self, entry: Entry, owner: Hashable) -> None:
        """Unpin an entry; if it is not encoded yet and has no other pin, dequeue it."""
        self.cache.unpin(entry, owner, now=self._clock())
        if not entry.ready and not entry.pins and not self._reduced.abandon(entry):
            self.reads.abandon(entry)

    # ---- parts -----------------------------------------------------------------------------------
    def _pin_for_session(self, key: RequestKey, num_items: int) -> None:
        """Pin the embeddings that the items of a call got, as far as they did not fail."""
        seconds, now = self._settings.session_pin_seconds, self._clock()
        for item in range(num_items):
            if (pin := self._item_pin(key, item)) is not None:
                self.cache.pin_for_session(pin.entry, seconds=seconds, now=now)

    def _cached_pins(self, key: RequestKey) -> list[EmbeddingPin]:
        return [pin for pin in self._attempts.of(key, EmbeddingPin) if pin.item is None]

    def _item_pin(self, key: RequestKey, item: int) -> EmbeddingPin | None:
        pins = self._attempts.of(key, EmbeddingPin)
        return next((pin for pin in pins if pin.item == item), None)

    def _is_encoded(self, key: RequestKey) -> bool:
        """Whether `encode` was called for a key, and its images are not all released."""
        if self._attempts.of(key, EncodeCall):
            return True
        return any(pin.item is not None for pin in self._attempts.of(key, EmbeddingPin))

    def _num_bytes(self, image: PreparedImage) -> int:
        """Bytes of the embedding that a prompt gets, places included."""
        return image.kept_tokens * self._runner.embed_layout.row_bytes_of(image.reduction)

    def _check(self, key: RequestKey, images: tuple[PreparedImage, ...]) -> None:
        """Raise the error of a call that is refused."""
        if self._draining:
            raise DrainingError("this worker is draining")
        if self._is_encoded(key):
            raise DuplicateError(f"{key.request_id} attempt {key.attempt} is encoded already")
        needed = sum(map(self._num_bytes, images))
        largest = max(image.encoded_tokens for image in images)  # before an exact reduction
        most = max(needed, largest * self._runner.embed_layout.row_bytes)
        if most > self._settings.embedding_cache_bytes:
            raise InvalidRequestError(
                f"the embeddings of this request take {most} bytes, and this worker has "
                f"{self._settings.embedding_cache_bytes}: send fewer or smaller images, or raise "
                "--embedding-cache-bytes"
            )
        self._check_limits(images, needed - sum(pin.num_bytes for pin in self._cached_pins(key)))

    def _check_limits(self, images: tuple[PreparedImage, ...], additional_bytes: int) -> None:
        queue, settings = self.queue, self._settings
        pixels = queue.waiting_pixels, sum(map(num_pixels, images)), settings.max_waiting_pixels
        embeddings = self.held.num_bytes, additional_bytes, settings.embedding_cache_bytes
        self._context.limits.check(
            (
                Demand(QueueLimit.IMAGES, len(queue), len(images), settings.max_waiting_images),
                Demand(QueueLimit.PIXELS, *pixels),
                Demand(QueueLimit.EMBEDDINGS, *embeddings),
            ),
            retry_after_seconds=lambda: retry_after(queue.seconds),
        )

    def _begin(self, call: EncodeCall, item: int, image: PreparedImage) -> None:
        attempt, now = call.attempt, self._clock()
        owner = (attempt.key, item)
        is_new = bool(image.rows.nbytes) and self.find(image) is None
        try:
            entry = self._entry(image, owner, attempt.key, rank=call.rank)
        except EngineError as error:
            self._failed(call, item, error)
            return
        except CorruptTransferError as error:  # of the client's rows
            self._failed(call, item, InvalidImageError(str(error), item=item))
            return
        attempt.acquire(EmbeddingPin(entry, owner, item, self._num_bytes(image), self))
        if entry.ready:
            self._ready(call, item, entry, (now, now, now), cache_hit=not is_new)
            return
        entry.waiters.append(lambda error: self._item_filled(call, item, entry, now, error))

    def _entry(
        self, image: PreparedImage, owner: Hashable, key: RequestKey, *, rank: Rank
    ) -> Entry:
        """The entry of an image, cached, in flight or queued now; pinned for `owner`."""
        image_key, num_tokens, now = image.kept_key, image.kept_tokens, self._clock()
        cached = self.cache.lookup(image_key, owner, num_tokens=num_tokens, now=now)
        if cached is not None:
            if not image.is_reduced_after and not image.rows.nbytes:
                self.reads.join(cached, self.reads.encoding(cached, image, key, rank))
            return cached
        if image.rows.nbytes:
            return self._given(image, owner)
        if image.is_reduced_after:
            reduced = self._reduced.from_cache(image, owner)
            return reduced or self._reduced.encode(image, owner, key, rank=rank)
        entry = self.cache.begin(image_key, owner, num_tokens=num_tokens, counted=False, now=now)
        self.reads.fill(entry, self.reads.encoding(entry, image, key, rank))
        return entry

    def _given(self, image: PreparedImage, owner: Hashable) -> Entry:
        """Cache the embedding that a client gave, pinned for `owner`. It waits for no encoder.

        Raises:
            CorruptTransferError: the rows have another size, or a value that is not finite.
            EngineError: the device fails.
        """
        try:
            embedding = self.copies.import_embedding(image.rows, image.num_tokens)
        except EngineError as error:
            self._context.device_errors.record(error)
            raise
        now = self._clock()
        entry = self.cache.begin(image.image_key, owner, num_tokens=image.num_tokens, now=now)
        entry.is_given = True
        self.cache.complete(entry, embedding, now=now)
        entry.notify(None)
        self.queue.on_ready(image.image_key)
        return entry

    def _answer(self, answer: Callable[[bool], None], *, is_cached: bool) -> None:
        if answer in self._answers:
            self._answers.remove(answer)
            answer(is_cached)

    def _item_filled(
        self, call: EncodeCall, item: int, entry: Entry, queued_at: float, error: Exception | None
    ) -> None:
        if call.attempt.encode_cancelled:
            return
        if error is not None:
            self._failed(call, item, error)
        else:
            now = self._clock()
            started = now if entry.is_from_disk else self.queue.batch_started
            times = (queued_at, started, now)
            self._ready(call, item, entry, times, cache_hit=entry.is_from_disk)

    def _ready(
        self, call: EncodeCall, item: int, entry: Entry, times: Times, *, cache_hit: bool
    ) -> None:
        rows = None
        if self._runner.kv_layout is None:  # the consumer is a peer
            try:
                rows = self._rows(entry)
            except EngineError as error:
                self._failed(call, item, error)
                return
        self._finish_item(call, ItemReady(item, cache_hit, entry.num_bytes, *times, rows))

    def _failed(self, call: EncodeCall, item: int, error: Exception) -> None:
        self.release(call.attempt.key, item)
        self._finish_item(call, ItemFailed(item, error))

    def _finish_item(self, call: EncodeCall, event: EncodeEvent) -> None:
        self._events.emit(call.stream, event)
        call.pending.discard(event.item)
        if not call.pending:
            call.attempt.release(call)

    def _rows(self, entry: Entry) -> memoryview:
        try:
            return self.copies.export_embedding(entry.buffer)
        except EngineError as error:  # an encoder pod runs no step that would detect a lost device
            self._context.device_errors.record(error)
            raise


def _reader(key: RequestKey, image: PreparedImage) -> Hashable:
    """The owner of the pin on a whole image that is read; of its own for a reduced image."""
    return key if image.reduction is None else (key, image.kept_key)
