"""The directory of the encoder cache's disk tier, and the thread that reads and writes it.

    engine thread   write(job), read(job) --> [deques] --> thread   reads first, writes in order
                    take() <-- ended jobs, `on_ended` <---'

Only regular files whose names match the format are read or deleted, and no link is followed. A file
is written under a temporary name and renamed: it is complete or absent. It is not synchronized to
the disk: after a crash of the node, its digest tells.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import errno
import fcntl
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from vlm_worker.core.disk_index import StoredFile
from vlm_worker.core.embedding_file import (
    HEAD_BYTES,
    NAME,
    TEMPORARY,
    BadFileError,
    StoredEmbedding,
    file_name,
    pack,
    read_header,
    unpack,
)
from vlm_worker.types import EmbedLayout

logger = logging.getLogger(__name__)

TICK_SECONDS: Final = 60.0
"""Maximum time after which an idle engine deletes expired files."""
CLOSE_SECONDS: Final = 5.0
"""Maximum wait for the thread at the end of the engine: a read or a write of a disk that works."""
LOCK_NAME: Final = "triptych.lock"
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Directory:
    """The calls on one directory; each raises OSError. Tests replace it to inject faults.

    It holds a lock on the directory until `close`, because two processes would delete each other's
    files.
    """

    def __init__(self, path: Path) -> None:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._lock = os.open(LOCK_NAME, flags, 0o600, dir_fd=self._fd)
        except OSError:
            os.close(self._fd)
            raise
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        os.close(self._lock)
        os.close(self._fd)

    def names(self) -> list[str]:
        with os.scandir(self._fd) as entries:
            return [entry.name for entry in entries]

    def read(self, name: str, max_bytes: int) -> tuple[bytearray, float]:
        """At most the first `max_bytes` bytes of a regular file, and when it was written.

        Raises BadFileError if it is something else.
        """
        fd = os.open(name, _READ, dir_fd=self._fd)
        with os.fdopen(fd, "rb", buffering=0) as file:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise BadFileError(f"{name} is not a regular file")
            data = bytearray(min(status.st_size, max_bytes))
            view, filled = memoryview(data), 0
            while filled < len(data) and (count := file.readinto(view[filled:])):
                filled += count
        return data[:filled] if filled < len(data) else data, status.st_mtime

    def size(self, name: str) -> int | None:
        """Bytes of a regular file; None if it is something else."""
        status = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def write(self, name: str, parts: Sequence[bytes | memoryview]) -> None:
        """Write a file of mode 0600 and give it its name; if that fails, no file remains."""
        temporary = f"{name}.{os.urandom(8).hex()}.tmp"
        fd = os.open(temporary, _CREATE, 0o600, dir_fd=self._fd)
        try:
            with os.fdopen(fd, "wb", buffering=0) as file:
                for part in parts:
                    self._write_all(file.fileno(), memoryview(part))
            os.rename(temporary, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        except OSError:
            with contextlib.suppress(OSError):
                self.remove(temporary)
            raise

    def remove(self, name: str) -> None:
        """Delete a regular file; what is absent or something else is left alone."""
        with contextlib.suppress(FileNotFoundError):
            if self.size(name) is not None:
                os.unlink(name, dir_fd=self._fd)

    def _write_all(self, fd: int, data: memoryview) -> None:
        while data.nbytes:
            data = data[os.write(fd, data) :]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class WriteJob:
    """Delete `victims`, then write `stored` as `file`; without `stored`, only delete."""

    victims: tuple[StoredFile, ...]
    file: StoredFile | None = None
    stored: StoredEmbedding | None = None


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ReadJob:
    """Read the file of an image."""

    image_key: bytes
    num_tokens: int
    num_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Ended:
    """The result of a job: what a read has read, or None; whether a write was written.

    A file that `is_bad` is missing or has wrong bytes: another read would fail, too. `remaining`
    are victims that could not be deleted.
    """

    job: WriteJob | ReadJob
    stored: StoredEmbedding | None = None
    is_bad: bool = False
    is_written: bool = False
    remaining: tuple[StoredFile, ...] = ()


class EmbeddingFiles:
    """The files of one directory. `wall_clock` gives the seconds of `StoredFile.written_at`.

    `found` are those that an earlier process wrote. `job_started` is when the thread began its
    current job, in seconds of `clock`; None while it has none. Raises OSError if the directory
    cannot be read.
    """

    def __init__(
        self,
        directory: Directory,
        layout: EmbedLayout,
        *,
        wall_clock: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.layout, self.wall_clock, self.clock = layout, wall_clock, clock
        self.job_started: float | None = None
        self._directory = directory
        self._changed = threading.Condition()
        self._reads: collections.deque[ReadJob] = collections.deque()
        self._writes: collections.deque[WriteJob] = collections.deque()
        self._ended: collections.deque[Ended] = collections.deque()
        self._stopping = False
        self._on_ended: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._main, name="embedding-files", daemon=True)
        self.found = tuple(self._scan())

    def _scan(self) -> list[StoredFile]:
        """The files of this layout; deletes temporary files, and those of other layouts."""
        found = []
        for name in sorted(self._directory.names()):
            is_temporary = TEMPORARY.fullmatch(name) is not None
            if not is_temporary and NAME.fullmatch(name) is None:
                continue
            with contextlib.suppress(OSError):
                size = self._directory.size(name)
                if size is None:
                    continue
                file = None if is_temporary else self._known(name, size)
                if file is None:
                    self._directory.remove(name)
                else:
                    found.append(file)
        return found

    def start(self, on_ended: Callable[[], None]) -> None:
        """Start the thread, which calls `on_ended` after each job, and at rest at intervals."""
        self._on_ended = on_ended
        self._thread.start()

    def close(self) -> None:
        """End the thread after its current job and drop the others; idempotent.

        If the disk does not answer, the thread is left: it ends with its job or the process.
        """
        with self._changed:
            if self._stopping:
                return
            self._stopping = True
            self._changed.notify()
        if self._thread.ident is None:  # it was not started
            self._directory.close()
            return
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            logger.warning(
                "the disk of the encoder cache does not answer: its thread is not awaited",
                extra={"waited_seconds": CLOSE_SECONDS},
            )

    def write(self, job: WriteJob) -> None:
        with self._changed:
            self._writes.append(job)
            self._changed.notify()

    def read(self, job: ReadJob) -> None:
        with self._changed:
            self._reads.append(job)
            self._changed.notify()

    def take(self) -> list[Ended]:
        """The jobs that have ended since the last call."""
        with self._changed:
            ended = list(self._ended)
            self._ended.clear()
        return ended

    # ---- on the thread ---------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            self._work()
        finally:
            self._directory.close()

    def _work(self) -> None:
        while True:
            with self._changed:
                if not (self._stopping or self._reads or self._writes):
                    self._changed.wait(TICK_SECONDS)
                if self._stopping:
                    return
                waiting = self._reads or self._writes
                job = waiting.popleft() if waiting else None
            if job is not None:
                self.job_started = self.clock()
                ended = self._read(job) if isinstance(job, ReadJob) else self._write(job)
                self.job_started = None
                with self._changed:
                    self._ended.append(ended)
                del job, ended, waiting
            self._on_ended()

    def _read(self, job: ReadJob) -> Ended:
        name = file_name(job.image_key)
        try:
            data, _ = self._directory.read(name, job.num_bytes + 1)
            stored = unpack(
                memoryview(data), self.layout, image_key=job.image_key, num_tokens=job.num_tokens
            )
        except Exception as error:  # noqa: BLE001  a thread that dies would leave requests waiting
            logger.warning(
                "an embedding cannot be read from the disk: its image is encoded",
                extra={"file": name, "error": str(error)},
            )
            return Ended(job, is_bad=_is_bad(error))
        return Ended(job, stored)

    def _write(self, job: WriteJob) -> Ended:
        remaining = []
        for victim in job.victims:
            try:
                self._directory.remove(victim.name)
            except OSError as error:
                _log_write(victim.name, error)
                remaining.append(victim)
        if job.file is None or job.stored is None or remaining:
            return Ended(job, remaining=tuple(remaining))
        try:
            self._directory.write(job.file.name, pack(job.stored, self.layout))
        except Exception as error:  # noqa: BLE001  as above
            _log_write(job.file.name, error)
            return Ended(job)
        return Ended(job, is_written=True)

    def _known(self, name: str, size: int) -> StoredFile | None:
        """A file that this worker can serve; None if it must be deleted."""
        try:
            data, written_at = self._directory.read(name, HEAD_BYTES)
            header = read_header(memoryview(data))
        except BadFileError:
            return None
        is_ours = header.fingerprint == self.layout.fingerprint.hex() and header.num_bytes == size
        return StoredFile(name, size, written_at, header.scores_bytes > 0) if is_ours else None


def _is_bad(error: Exception) -> bool:
    """Whether the file is the cause of a read's error; lack of memory or a bad disk is not."""
    is_link = isinstance(error, OSError) and error.errno == errno.ELOOP
    return is_link or isinstance(error, (BadFileError, FileNotFoundError))


def _log_write(name: str, error: BaseException) -> None:
    logger.warning(
        "the disk tier of the encoder cache cannot be written",
        extra={"file": name, "error": str(error)},
    )
