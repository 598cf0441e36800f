"""Bytes through files in memory that both sides reach: two workers of one machine or one pod.

    DIR/triptych-domain     16 random bytes: who reads the same ones shares the directory
    DIR/triptych-<hex>      one transfer; made, locked and removed by its producer

A file whose consumer said that it reads no more is kept, under a name that nobody was told, and is
the next transfer's: getting pages from the system and giving them back costs as much as filling
them. A consumer that kept it open all the same would find bytes whose digest is not its own.

Both sides use read and write, never a mapping: a file that shrinks under its reader is an error
then, and no SIGBUS. The consumer opens what it was told by a name that can only lie in its own
directory, and holds the size to what it expects itself. The lock goes with the process, so that
`sweep_leftovers` knows the files of the dead.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np

from vlm_worker.errors import CorruptTransferError, GoneError, Refusal
from vlm_worker.transfer.transport import Ledger
from vlm_worker.wire.frames import PLACED_VERSION

NAME: Final = "shared-memory"
_NAME_BYTES: Final = 16
_PREFIX: Final = "triptych-"
_DOMAIN: Final = "triptych-domain"


class SharedMemory:
    """Files in `directory`, which lies in memory; `capacity_bytes` bounds what is exposed.

    Raises:
        OSError: the directory cannot be written to.
    """

    name = f"{NAME}/{PLACED_VERSION}"

    def __init__(self, directory: Path, *, capacity_bytes: int, leftover_seconds: float) -> None:
        self.ledger = Ledger(capacity_bytes)
        self._directory = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._domain = _domain(self._directory)
        except BaseException:
            os.close(self._directory)
            raise
        self._spares: list[_File] = []
        self._closed = False
        sweep_leftovers(self._directory, older_than=time.time() - leftover_seconds)

    def invitation(self) -> bytes:
        """The directory's own bytes."""
        return self._domain

    def expose(self, invitation: bytes, num_bytes: int) -> _Segment | None:
        """A file of so many bytes; None without room, or for a consumer of another directory."""
        if not secrets.compare_digest(invitation, self._domain) or num_bytes == 0:
            return None
        room = os.fstatvfs(self._directory)
        free = room.f_bavail * room.f_frsize + sum(file.num_bytes for file in self._spares)
        if num_bytes > free or not self.ledger.take(num_bytes):
            return None
        file = None
        try:
            file = self._spare(num_bytes) or _File(self._directory)
            file.resize(num_bytes)
        except OSError:  # no more files, or no more memory
            if file is not None:
                file.remove()
            self.ledger.give_back(num_bytes)
            return None
        self._trim()
        return _Segment(file, ledger=self.ledger, keep=self._keep)

    def view(self, opening: bytes, num_bytes: int) -> _SegmentView:
        """A producer's file.

        Raises:
            CorruptTransferError: there is none, or not of this size.
        """
        return _SegmentView(self._directory, opening, num_bytes)

    def close(self) -> None:
        """Leave the directory."""
        if not self._closed:
            self._closed = True
            while self._spares:
                self._spares.pop().remove()
            os.close(self._directory)

    def _spare(self, num_bytes: int) -> _File | None:
        """The one nearest in size; none that would lose more pages than it keeps."""
        fitting = [file for file in self._spares if file.num_bytes <= 2 * num_bytes]
        if not fitting:
            return None
        nearest = min(fitting, key=lambda file: abs(file.num_bytes - num_bytes))
        self._spares.remove(nearest)
        return nearest

    def _keep(self, file: _File) -> None:
        """For the next transfer; spare files are within the capacity as well."""
        try:
            file.rename()
        except OSError:
            file.remove()
            return
        self._spares.append(file)
        self._trim()

    def _trim(self) -> None:
        left = self.ledger.capacity - self.ledger.used - self.ledger.lost
        while self._spares and sum(file.num_bytes for file in self._spares) > left:
            self._spares.pop(0).remove()


class _File:
    """A producer's own file, locked while it lives, under a name of its own."""

    def __init__(self, directory: int) -> None:
        self.name = secrets.token_bytes(_NAME_BYTES)
        self.num_bytes = 0
        self._directory = directory
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        self.descriptor = os.open(_path(self.name), flags, 0o600, dir_fd=directory)
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            self.remove()
            raise

    def resize(self, num_bytes: int) -> None:
        """Not allocated: that would write every page once more."""
        os.ftruncate(self.descriptor, num_bytes)
        self.num_bytes = num_bytes

    def rename(self) -> None:
        """To a name that nobody knows."""
        name = secrets.token_bytes(_NAME_BYTES)
        directory = self._directory
        os.rename(_path(self.name), _path(name), src_dir_fd=directory, dst_dir_fd=directory)
        self.name = name

    def remove(self) -> None:
        """Give its memory back, as soon as nobody has it open."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(_path(self.name), dir_fd=self._directory)
        os.close(self.descriptor)


def _path(name: bytes) -> str:
    return _PREFIX + name.hex()


class _Segment:
    """A producer's file during one transfer."""

    def __init__(self, file: _File, *, ledger: Ledger, keep: Callable[[_File], None]) -> None:
        self.num_bytes = file.num_bytes
        self.opening = file.name
        self._ledger = ledger
        self._keep = keep
        self._file: _File | None = file

    def place(self, position: int, data: memoryview) -> memoryview:
        """Write; nothing travels."""
        if self._file is None:
            raise GoneError("the transfer was given up")
        assert 0 <= position <= self.num_bytes - data.nbytes
        done = 0
        try:
            while done < data.nbytes:
                done += os.pwrite(self._file.descriptor, data[done:], position + done)
        except OSError as error:
            raise GoneError(f"shared memory: {os.strerror(error.errno or 0)}") from error
        return memoryview(b"")

    def close(self) -> None:
        """Take the file for the next transfer: its consumer reads no more."""
        file, self._file = self._file, None
        if file is not None:
            self._ledger.give_back(self.num_bytes)
            self._keep(file)

    def abandon(self) -> None:
        """Remove the file; its memory stays counted, as somebody may hold it open."""
        file, self._file = self._file, None
        if file is not None:
            self._ledger.lose(self.num_bytes)
            file.remove()


class _SegmentView:
    """A consumer's sight of a producer's file."""

    def __init__(self, directory: int, opening: bytes, num_bytes: int) -> None:
        self._file: int | None = None
        if len(opening) != _NAME_BYTES:
            raise _missing(f"a name of {len(opening)} bytes")
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            self._file = os.open(_path(opening), flags, dir_fd=directory)
        except OSError as error:
            raise _missing(os.strerror(error.errno or 0)) from error
        found = os.fstat(self._file)
        if not stat.S_ISREG(found.st_mode) or found.st_size != num_bytes:
            self.close()
            raise _missing(f"it has {found.st_size} bytes where {num_bytes} are due")

    def take(self, position: int, num_bytes: int, travelled: memoryview) -> memoryview:
        """Read into memory of our own: what is checked is what is used."""
        if travelled.nbytes or self._file is None:
            raise _missing("its bytes travelled as well")
        data: memoryview = np.empty(num_bytes, np.uint8).data  # filled below, or refused
        try:
            num_read = os.preadv(self._file, [data], position)
        except OSError as error:
            raise _missing(os.strerror(error.errno or 0)) from error
        if num_read != num_bytes:
            raise _missing(f"it ends before byte {position + num_bytes}")
        return data

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def sweep_leftovers(directory: int, *, older_than: float) -> int:
    """Remove the files of producers that died; returns how many.

    A file is its producer's while that one lives and holds the lock. A young one may not be locked
    yet. `older_than` is in seconds since 1970.
    """
    num_removed = 0
    for name in os.listdir(directory):
        if not name.startswith(_PREFIX) or name == _DOMAIN:
            continue
        with contextlib.suppress(OSError):  # somebody else removes it, or holds it
            file = os.open(name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=directory)
            try:
                if os.fstat(file).st_mtime < older_than:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(name, dir_fd=directory)
                    num_removed += 1
            finally:
                os.close(file)
    return num_removed


def _domain(directory: int) -> bytes:
    """The directory's own 16 bytes, made by whoever comes first: a link appears whole or not."""
    for _ in range(2):
        with contextlib.suppress(FileNotFoundError):
            file = os.open(_DOMAIN, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=directory)
            try:
                found = os.read(file, _NAME_BYTES + 1)
            finally:
                os.close(file)
            if len(found) != _NAME_BYTES:
                raise OSError(f"{_DOMAIN} in the shared memory directory is not ours: remove it")
            return found
        draft = f"{_PREFIX}{secrets.token_hex(_NAME_BYTES)}"
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        file = os.open(draft, flags, 0o600, dir_fd=directory)
        try:
            os.write(file, secrets.token_bytes(_NAME_BYTES))
            with contextlib.suppress(FileExistsError):
                os.link(draft, _DOMAIN, src_dir_fd=directory, dst_dir_fd=directory)
        finally:
            os.close(file)
            os.unlink(draft, dir_fd=directory)
    raise OSError(f"{_DOMAIN} vanished from the shared memory directory")


def _missing(what: str) -> CorruptTransferError:
    return CorruptTransferError(f"the producer's shared memory: {what}", refusal=Refusal.MEMORY)
