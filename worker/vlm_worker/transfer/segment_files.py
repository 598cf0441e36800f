"""The files of shared memory: creates, locks, reuses and removes them, and sweeps leftovers.

`shared_memory.py` describes their use.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
from typing import Final

from vlm_worker.transfer.mapping import Mapper, Mapping

NAME_BYTES: Final = 16
PREFIX: Final = "triptych-"
_DOMAIN: Final = "triptych-domain"


class SegmentFile:
    """A producer's file with a unique name, locked while the producer runs.

    With a `mapper`, it is mapped from its second transfer on: new pages are cheaper to write
    without a mapping.
    """

    def __init__(self, directory: int, mapper: Mapper | None) -> None:
        self.name = secrets.token_bytes(NAME_BYTES)
        self.num_bytes = 0
        self.mapping: Mapping | None = None
        self._mapper = mapper
        self._directory = directory
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.open(path_of(self.name), flags, 0o600, dir_fd=directory)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            self.remove()
            raise

    @property
    def is_whole(self) -> bool:
        """Whether no page of the mapping was lost so far."""
        return self.mapping is None or self.mapping.is_whole

    def resize(self, num_bytes: int) -> None:
        """Set the size without allocating, which would write every page twice. Raises OSError."""
        os.ftruncate(self._file, num_bytes)
        has_most_pages, self.num_bytes = num_bytes <= 2 * self.num_bytes, num_bytes
        if self.mapping is not None and self.mapping.num_bytes < num_bytes:
            self.mapping = None
        if self.mapping is None and self._mapper is not None and has_most_pages:
            with contextlib.suppress(OSError):  # without a mapping, `write` is used
                self.mapping = self._mapper.map(self._file, num_bytes, is_written=True)

    def write(self, position: int, data: memoryview) -> None:
        """Write bytes at a position. Raises OSError if memory is exhausted."""
        done = 0
        while done < data.nbytes:
            done += os.pwrite(self._file, data[done:], position + done)

    def rename(self) -> None:
        """Give the file a new random name, which no consumer knows."""
        name = secrets.token_bytes(NAME_BYTES)
        directory = self._directory
        os.rename(path_of(self.name), path_of(name), src_dir_fd=directory, dst_dir_fd=directory)
        self.name = name

    def discard(self) -> None:
        """Free its memory now, even if a consumer still has the file mapped: none reads it."""
        with contextlib.suppress(OSError):
            os.ftruncate(self._file, 0)
        self.remove()

    def remove(self) -> None:
        """Remove the file; its memory is freed when no process has it open."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path_of(self.name), dir_fd=self._directory)
        self.mapping = None
        os.close(self._file)


def path_of(name: bytes) -> str:
    """The path of a file, relative to its directory."""
    return PREFIX + name.hex()


def sweep_leftovers(directory: int, *, older_than: float) -> int:
    """Remove the files of producers that died; returns their number.

    A running producer holds the lock of its file. A recent file may not be locked yet.
    `older_than` is in seconds since 1970.
    """
    num_removed = 0
    for name in os.listdir(directory):
        if not name.startswith(PREFIX) or name == _DOMAIN:
            continue
        with contextlib.suppress(OSError):  # another process removes it, or holds the lock
            file = os.open(name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=directory)
            try:
                if os.fstat(file).st_mtime < older_than:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.ftruncate(file, 0)  # frees the memory even if a consumer has it mapped
                    os.unlink(name, dir_fd=directory)
                    num_removed += 1
            finally:
                os.close(file)
    return num_removed


def domain_of(directory: int) -> bytes:
    """The directory's 16 random bytes. The first worker creates them, atomically by a link."""
    for _ in range(2):
        with contextlib.suppress(FileNotFoundError):
            file = os.open(_DOMAIN, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=directory)
            try:
                what = os.fstat(file)
                found = os.read(file, NAME_BYTES + 1)
            finally:
                os.close(file)
            if (
                what.st_uid != os.geteuid()
                or what.st_mode & 0o077
                or not stat.S_ISREG(what.st_mode)
            ):
                raise OSError(
                    f"{_DOMAIN} in the shared memory directory belongs to user {what.st_uid} with "
                    f"mode {stat.S_IMODE(what.st_mode):o}, and must be this user's own with mode "
                    "600: remove it, or use another directory"
                )
            if len(found) != NAME_BYTES:
                raise OSError(f"{_DOMAIN} in the shared memory directory is not ours: remove it")
            return found
        draft = f"{PREFIX}{secrets.token_hex(NAME_BYTES)}"
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        file = os.open(draft, flags, 0o600, dir_fd=directory)
        try:
            os.write(file, secrets.token_bytes(NAME_BYTES))
            with contextlib.suppress(FileExistsError):
                os.link(draft, _DOMAIN, src_dir_fd=directory, dst_dir_fd=directory)
        finally:
            os.close(file)
            os.unlink(draft, dir_fd=directory)
    raise OSError(f"{_DOMAIN} vanished from the shared memory directory")
