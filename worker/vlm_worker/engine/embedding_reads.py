"""How an entry of the encoder cache is filled: from a file of the disk tier, else by the encoder.

    fill(entry) --on disk--> a read --> complete: all who wait for the entry get it
                                `-> no file, or a bad one --+
                --not on disk, or the disk is slow----------+--> `encode`: the EncoderQueue
    an entry that leaves memory --> a write, if the thread keeps up

Without a disk tier (`files` is None), every entry is encoded. One read is in flight at a time, so
that the results take bounded memory. Only whole images are stored: reductions are computed anew.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import Final

from vlm_worker.core.disk_index import DiskIndex, StoredFile
from vlm_worker.core.embedding_file import HEAD_BYTES, StoredEmbedding, file_name
from vlm_worker.core.encoder_cache import EncoderCache, Entry, Tier
from vlm_worker.core.fair_order import Rank
from vlm_worker.core.session_pins import SessionPins
from vlm_worker.engine.attempts import EngineContext
from vlm_worker.engine.embedding_files import EmbeddingFiles, Ended, ReadJob, WriteJob
from vlm_worker.engine.encoder_batches import EncoderQueue
from vlm_worker.engine.runner import EmbeddingCopies
from vlm_worker.engine.settings import DiskStats
from vlm_worker.errors import CancelledError, GoneError, WorkerError
from vlm_worker.types import PreparedImage, RequestKey

BUFFER_BYTES: Final = 128 << 20
"""Bytes that may wait to be written: also those of the largest file, and of the current read."""
READ_SECONDS: Final = 2.0
"""An image that waits longer for the disk is encoded: that takes less, even behind a few others."""
MAX_READS: Final = 16
"""So many reads may wait. A disk of 200 MB/s reads 16 images of 28 MB in about READ_SECONDS."""
SCORE_BYTES: Final = 4
"""A float32 for each visual token."""

Encode = Callable[[], None]
"""Queues the encoding of an entry, for a request that has the image's patches."""


@dataclasses.dataclass(eq=False, slots=True)
class Read:
    """A read that fills `entry`; `counted` if it is the lookup of a request.

    `encode` is called if it fails. Without it, the entry fails. It began at `began`, in seconds.
    """

    entry: Entry
    num_bytes: int
    encode: Encode | None
    counted: bool
    began: float


class EmbeddingReads:
    """Fills entries. Engine thread only; `files` has a thread of its own."""

    def __init__(
        self,
        context: EngineContext,
        cache: EncoderCache,
        queue: EncoderQueue,
        copies: EmbeddingCopies,
        files: EmbeddingFiles | None,
    ) -> None:
        settings = context.settings
        self._context, self._cache, self._queue = context, cache, queue
        self._copies, self._files = copies, files
        self._index = DiskIndex(
            max_bytes=settings.embedding_disk_bytes,
            max_age_seconds=settings.embedding_disk_age_seconds,
        )
        self._reads: dict[Entry, Read] = {}
        self._waiting: collections.deque[Read] = collections.deque()
        self._current: Read | None = None
        self._waiting_bytes = 0
        self._num_written = self._num_dropped = 0
        self._num_write_errors = self._num_read_errors = 0
        if files is not None:
            cache.on_leave, cache.can_leave = self._store, self._can_store
            self._delete(self._index.load(files.found, now=files.wall_clock()))

    @property
    def is_on(self) -> bool:
        """Whether there is a disk tier."""
        return self._files is not None

    @property
    def stats(self) -> DiskStats:
        index = self._index
        return DiskStats(
            entries=len(index),
            bytes=index.num_bytes if self.is_on else 0,
            capacity_bytes=index.max_bytes if self.is_on else 0,
            hits=self._cache.num_disk_hits,
            evictions=index.num_evictions,
            expirations=index.num_expirations,
            writes=self._num_written,
            dropped_writes=self._num_dropped,
            write_errors=self._num_write_errors,
            read_errors=self._num_read_errors,
        )

    def has(self, image_key: bytes) -> bool:
        """Whether the disk has the embedding of a whole image, and may be asked for it."""
        if self._files is None or self._is_slow():
            return False
        now = self._files.wall_clock()
        return self._index.find(file_name(image_key), now=now) is not None

    @property
    def session_pins(self) -> SessionPins[str]:
        """The session pins of files."""
        return self._index.session_pins

    @property
    def seconds_left(self) -> float | None:
        """Seconds until an image has waited too long for the disk; None if no image waits."""
        if self._files is None or not self._reads:
            return None
        first, started = next(iter(self._reads.values())).began, self._files.job_started
        since = first if started is None else min(first, started)
        return max(since + READ_SECONDS - self._files.clock(), 0.0)

    @property
    def seconds_to_turn(self) -> float | None:
        """Seconds until an idle engine takes a turn: an image has waited too long, or a pin ends.

        None if nothing of both will happen.
        """
        pinned = self._cache.session_pins.seconds_to_end(now=self._context.clock())
        times = [self.seconds_left, pinned]
        if self._files is not None:
            times.append(self._index.session_pins.seconds_to_end(now=self._files.wall_clock()))
        return min((seconds for seconds in times if seconds is not None), default=None)

    def is_reading(self, entry: Entry) -> bool:
        return entry in self._reads

    def encoding(self, entry: Entry, image: PreparedImage, key: RequestKey, rank: Rank) -> Encode:
        """What `fill` and `join` call if the disk does not fill the entry."""
        return functools.partial(self._queue.push, entry, image, key, rank=rank)

    def fill(self, entry: Entry, encode: Encode | None, *, counted: bool = True) -> None:
        """Read an entry that began to be filled if the disk has it in time; else encode it.

        Its owner began it uncounted. With `counted`, this counts the hit or the miss.
        """
        file = None
        if self._files is not None:
            name, now = file_name(entry.image_key), self._files.wall_clock()
            file = self._index.find(name, now=now)
        if self._files is None or file is None or self._is_slow():
            self._num_read_errors += file is not None
            self._encode(entry, encode, counted=counted)
            return
        self._index.touch(file.name)
        began = self._files.clock()
        read = self._reads[entry] = Read(entry, file.num_bytes, encode, counted, began)
        self._waiting.append(read)
        self._read_next()

    def join(self, entry: Entry, encode: Encode) -> None:
        """A request with the patches waits for an entry, too: if its read fails, encode it."""
        read = self._reads.get(entry)
        if read is not None and read.encode is None:
            read.encode = encode

    def abandon(self, entry: Entry) -> None:
        """Stop to fill an entry: no call waits for it."""
        if entry in self._reads:
            self._forget(entry)
            self._fail(entry, CancelledError("no call waits for this image"))
        else:
            self._queue.abandon(entry)

    def drain(self, error: WorkerError) -> int:
        """Fail the entries that wait for a read; returns their number."""
        entries = list(self._reads)
        for entry in entries:
            self._forget(entry)
            self._fail(entry, error)
        return len(entries)

    def turn(self) -> bool:
        """Take the results of the thread, and delete expired files; True if a read has ended.

        End the session pins whose time is over.
        """
        self._cache.session_pins.expire(now=self._context.clock())
        if self._files is None:
            return False
        num_ended = 0
        for ended in self._files.take():
            if isinstance(ended.job, ReadJob):
                num_ended += self._read_ended(ended)
            else:
                self._write_ended(ended.job, ended)
        num_ended += self._give_up()
        self._read_next()
        now = self._files.wall_clock()
        self._delete(self._index.expire(now=now))
        self._index.session_pins.expire(now=now)
        return num_ended > 0

    def check(self) -> None:
        """Raise AssertionError if the counts disagree. Called while no job is pending."""
        self._index.check()

    # ---- reads -----------------------------------------------------------------------------------

    def _is_stalled(self) -> bool:
        """Whether the current job of the thread takes too long."""
        assert self._files is not None
        started = self._files.job_started
        return started is not None and self._files.clock() - started >= READ_SECONDS

    def _is_slow(self) -> bool:
        """Whether an image is encoded sooner than another read would end."""
        return len(self._waiting) >= MAX_READS or self._is_stalled()

    def _give_up(self) -> int:
        """Encode the images that wait too long for the disk; returns their number."""
        assert self._files is not None
        if not self._reads:
            return 0
        is_stalled, now = self._is_stalled(), self._files.clock()
        reads = self._reads.values()
        late = [read for read in reads if is_stalled or now - read.began >= READ_SECONDS]
        for read in late:
            self._num_read_errors += 1
            self._forget(read.entry)
            self._encode(read.entry, read.encode, counted=read.counted)
        return len(late)

    def _read_next(self) -> None:
        if self._current is None and self._waiting and self._files is not None:
            self._current = read = self._waiting.popleft()
            entry = read.entry
            self._files.read(ReadJob(entry.image_key, entry.num_tokens, read.num_bytes))

    def _read_ended(self, ended: Ended) -> bool:
        """Fill the entry of the current read, or encode it; False if none waits for it."""
        read, self._current = self._current, None
        assert read is not None
        if ended.is_bad:
            self._delete_bad(read.entry.image_key)
        if self._reads.pop(read.entry, None) is None:
            return False
        self._num_read_errors += ended.stored is None
        if ended.stored is None or not self._complete(read, ended.stored):
            self._encode(read.entry, read.encode, counted=read.counted)
        return True

    def _complete(self, read: Read, stored: StoredEmbedding) -> bool:
        """Fill an entry; False if the device cannot take it, or its values are wrong."""
        entry = read.entry
        try:
            embedding = self._copies.import_embedding(stored.rows, stored.num_tokens)
            embedding = self._copies.with_scores(embedding, stored.scores)
        except WorkerError as error:
            self._context.device_errors.record(error)
            self._num_read_errors += 1
            return False
        self._cache.num_disk_hits += read.counted
        entry.counts_as_disk = not read.counted
        entry.is_from_disk = True
        self._cache.complete(entry, embedding, now=self._context.clock())
        entry.notify(None)
        self._queue.on_ready(entry.image_key)
        return True

    def _encode(self, entry: Entry, encode: Encode | None, *, counted: bool) -> None:
        self._cache.num_misses += counted
        if encode is None:
            self._fail(entry, GoneError("the disk no longer has this embedding"))
        else:
            encode()

    def _fail(self, entry: Entry, error: WorkerError) -> None:
        self._cache.fail(entry)
        entry.notify(error)

    def _forget(self, entry: Entry) -> None:
        read = self._reads.pop(entry)
        if read is not self._current:
            self._waiting.remove(read)

    # ---- writes ----------------------------------------------------------------------------------

    def _can_store(self, entry: Entry) -> bool:
        """Whether a write of an entry would not be dropped because too many bytes wait.

        Each write that ends wakes the engine, which lets expired entries leave then. If the disk is
        stalled, or the entry is larger than the buffer, waiting would not help.
        """
        num_bytes = entry.num_bytes + SCORE_BYTES * entry.num_tokens + HEAD_BYTES  # at most
        has_room = self._waiting_bytes + num_bytes <= BUFFER_BYTES
        return has_room or not self._waiting_bytes or self._is_stalled()

    def _store(self, entry: Entry) -> None:
        """Write an entry that leaves memory, and give its file the rest of its session pin.

        That file may be an earlier one, complete or being written.
        """
        row_bytes = self._context.runner.embed_layout.row_bytes
        if self._files is None or entry.num_bytes != entry.num_tokens * row_bytes:
            return  # a reduced image
        if entry.is_given:  # each request brings it: no read would be saved
            return
        name = file_name(entry.image_key)
        self._write(self._files, entry, name)
        self._pin_as(entry, name)

    def _write(self, files: EmbeddingFiles, entry: Entry, name: str) -> None:
        """Write an entry unless the disk has as much of it.

        The engine thread only copies it from the device, and only if the thread keeps up.
        """
        now = files.wall_clock()
        known = self._index.find(name, now=now)
        try:
            scores = entry.scores
            if entry.tier is Tier.HOT:
                scores = self._copies.export_scores(entry.buffer)
            if known is not None and (known.has_scores or not scores.nbytes):
                self._index.touch(name)
                return
            num_bytes = entry.num_bytes + scores.nbytes + HEAD_BYTES  # of the header, the most
            if self._index.is_writing(name) or self._waiting_bytes + num_bytes > BUFFER_BYTES:
                self._num_dropped += 1
                return
            rows = entry.buffer
            if entry.tier is Tier.HOT:
                rows = self._copies.export_embedding(entry.buffer)
        except WorkerError as error:
            self._context.device_errors.record(error)
            self._num_dropped += 1
            return
        file = StoredFile(name, num_bytes, now, has_scores=scores.nbytes > 0)
        victims = self._index.begin_write(file, now=now)
        if victims is None:
            self._num_dropped += 1
            return
        self._waiting_bytes += num_bytes
        stored = StoredEmbedding(entry.image_key, entry.num_tokens, rows, scores)
        files.write(WriteJob(tuple(victims), file, stored))

    def _pin_as(self, entry: Entry, name: str) -> None:
        """Give the file of an entry that leaves memory, if there is one, the rest of its pin."""
        assert self._files is not None
        seconds = self._cache.session_pins.seconds_left(entry, now=self._context.clock())
        if seconds:
            self._index.pin_for_session(name, seconds=seconds, now=self._files.wall_clock())

    def _write_ended(self, job: WriteJob, ended: Ended) -> None:
        if job.file is not None:
            self._waiting_bytes -= job.file.num_bytes
            if ended.is_written:
                self._num_written += 1
                self._index.complete_write(job.file.name)
            else:
                self._index.abort_write(job.file.name)
        self._num_write_errors += len(ended.remaining) or (
            job.file is not None and not ended.is_written
        )
        assert self._files is not None
        for file in ended.remaining:
            self._index.put_back(file, now=self._files.wall_clock())

    def _delete_bad(self, image_key: bytes) -> None:
        """Delete a bad or missing file, if it was not replaced meanwhile."""
        assert self._files is not None
        name = file_name(image_key)
        if self._index.find(name, now=self._files.wall_clock()) is not None:
            self._delete([self._index.remove(name)])

    def _delete(self, files: list[StoredFile]) -> None:
        if files and self._files is not None:
            self._files.write(WriteJob(tuple(files)))
