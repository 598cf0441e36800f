"""Bytes through files in memory that both sides reach: two workers of one machine or one pod.

    DIR/triptych-domain     16 random bytes: who reads the same ones shares the directory
    DIR/triptych-<hex>      one transfer; made, locked and removed by its producer

A file whose consumer said that it reads no more is kept, under a name that nobody was told, and is
the next transfer's: getting pages from the system and giving them back costs as much as filling
them. A consumer that kept it open all the same would find bytes whose digest is not its own.

Files that are used again stay mapped on both sides, where the native library is (`mapping.py`): a
producer makes units in them, a consumer copies each piece once, and checks its copy. New files, and
all without that library, are read and written. Either way a file that shrinks under its reader is
an error and no signal. A producer empties what it removes, as others may have it mapped. The
consumer opens what it was told by a name that can only lie in its own directory, and holds the size
to what it expects itself. The lock goes with the process, so that `sweep_leftovers` knows the files
of the dead.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Final

import xxhash

from vlm_worker.errors import CorruptTransferError, GoneError, Refusal
from vlm_worker.transfer.mapping import KeptMappings, Mapping, mapper_of
from vlm_worker.transfer.segment_files import (
    NAME_BYTES,
    SegmentFile,
    domain_of,
    path_of,
    sweep_leftovers,
)
from vlm_worker.transfer.transport import Ledger
from vlm_worker.wire.copying import COPIED_BYTES, Copier, Memory, address_of, copier_of
from vlm_worker.wire.frames import PLACED_VERSION

NAME: Final = "shared-memory"


class SharedMemory:
    """Files in `directory`, which lies in memory; `capacity_bytes` bounds what is exposed.

    `native_library` is the file of the kernels in C++; without it no file is mapped.

    Raises:
        OSError: the directory cannot be written to.
    """

    name = f"{NAME}/{PLACED_VERSION}"

    def __init__(
        self,
        directory: Path,
        *,
        capacity_bytes: int,
        leftover_seconds: float,
        native_library: str | None = None,
    ) -> None:
        self.ledger = Ledger(capacity_bytes)
        self._mapper = mapper_of(native_library)
        self._copier = copier_of(native_library)
        self._views = KeptMappings(capacity_bytes)
        self._directory = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._domain = domain_of(self._directory)
        except BaseException:
            os.close(self._directory)
            raise
        self._spares: list[SegmentFile] = []
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
            file = self._spare(num_bytes) or SegmentFile(self._directory, self._mapper)
            file.resize(num_bytes)
        except OSError:  # no more files, or no more memory
            if file is not None:
                file.discard()
            self.ledger.give_back(num_bytes)
            return None
        self._trim()
        return _Segment(file, ledger=self.ledger, keep=self._keep)

    def view(self, opening: bytes, num_bytes: int) -> _SegmentView:
        """A producer's file.

        Raises:
            CorruptTransferError: there is none, or not of this size.
        """
        file = _opened(self._directory, opening, num_bytes)
        mapping = self._views.take(file, num_bytes)
        if mapping is None and self._mapper is not None and num_bytes:
            with contextlib.suppress(OSError):  # then it is read
                mapping = self._mapper.map(file, num_bytes, is_written=False)
        return _SegmentView(file, mapping, copier=self._copier, keep=self._views.keep)

    def close(self) -> None:
        """Leave the directory."""
        if not self._closed:
            self._closed = True
            self._views.close()
            while self._spares:
                self._spares.pop().discard()
            os.close(self._directory)

    def _spare(self, num_bytes: int) -> SegmentFile | None:
        """The one nearest in size; none that would lose more pages than it keeps."""
        fitting = [file for file in self._spares if file.num_bytes <= 2 * num_bytes]
        if not fitting:
            return None
        nearest = min(fitting, key=lambda file: abs(file.num_bytes - num_bytes))
        self._spares.remove(nearest)
        return nearest

    def _keep(self, file: SegmentFile) -> None:
        """For the next transfer; spare files are within the capacity as well."""
        try:
            file.rename()
        except OSError:
            file.discard()
            return
        self._spares.append(file)
        self._trim()

    def _trim(self) -> None:
        left = self.ledger.capacity - self.ledger.used - self.ledger.lost
        while self._spares and sum(file.num_bytes for file in self._spares) > left:
            self._spares.pop(0).discard()


class _Segment:
    """A producer's file during one transfer."""

    def __init__(
        self, file: SegmentFile, *, ledger: Ledger, keep: Callable[[SegmentFile], None]
    ) -> None:
        self.num_bytes = file.num_bytes
        self.opening = file.name
        self._ledger = ledger
        self._keep = keep
        self._file: SegmentFile | None = file
        # an object of this transfer's own: it outlives us where somebody still writes to a room
        self._memory = None if file.mapping is None else file.mapping.bytes

    def room(self, position: int, num_bytes: int) -> memoryview | None:
        """Of the mapping; it stays valid, whatever becomes of the transfer."""
        if self._memory is None:
            return None
        assert 0 <= position <= self.num_bytes - num_bytes
        return self._memory[position : position + num_bytes].data

    def place(self, position: int, data: memoryview) -> memoryview:
        """Write, unless it was made here; nothing travels."""
        if self._file is None:
            raise GoneError("the transfer was given up")
        room = self.room(position, data.nbytes)
        if room is None:
            assert 0 <= position <= self.num_bytes - data.nbytes
            try:
                self._file.write(position, data)
            except OSError as error:
                raise GoneError(f"shared memory: {os.strerror(error.errno or 0)}") from error
        elif address_of(room) != address_of(data):
            room[:] = data
        if not self._file.is_whole:
            raise GoneError("shared memory: there was no page for all of it")
        return memoryview(b"")

    def close(self) -> None:
        """Take the file for the next transfer: its consumer reads no more."""
        file, self._file = self._file, None
        if file is not None:
            self._ledger.give_back(self.num_bytes)
            is_free = self._leave_memory()
            if is_free and file.is_whole:
                self._keep(file)
            else:
                file.discard()

    def abandon(self) -> None:
        """Remove the file; its memory stays counted, as somebody may hold it open."""
        file, self._file = self._file, None
        if file is not None:
            self._ledger.lose(self.num_bytes)
            file.remove()
            self._leave_memory()

    def _leave_memory(self) -> bool:
        """False where a copy that was given up in the middle still goes on into a room of ours."""
        if self._memory is None:
            return True
        memory, self._memory = weakref.ref(self._memory), None
        return memory() is None


class _SegmentView:
    """A consumer's sight of a producer's file."""

    def __init__(
        self,
        file: int,
        mapping: Mapping | None,
        *,
        copier: Copier,
        keep: Callable[[int, Mapping], None],
    ) -> None:
        self._file: int | None = file
        self._mapping = mapping
        self._memory = None if mapping is None else mapping.bytes.data
        self._copier = copier
        self._keep = keep

    def take(self, position: int, rooms: Memory, *, head: bytes) -> bytes:
        """Copy into memory of our own: what is checked is what is used."""
        end = position + sum(room.nbytes for room in rooms)
        if self._mapping is not None and self._memory is not None and end <= self._memory.nbytes:
            digest = self._copier.copy([self._memory[position:end]], rooms, head=head)
            if self._mapping.is_whole:
                return digest
        state = xxhash.xxh3_128(head)
        for room in rooms:
            for start in range(0, room.nbytes, COPIED_BYTES):
                part = room[start : start + COPIED_BYTES]
                self._read(position, part)
                state.update(part)
                position += part.nbytes
        found: bytes = state.digest()
        return found

    def _read(self, position: int, room: memoryview) -> None:
        assert self._file is not None
        try:
            num_read = os.preadv(self._file, [room], position)
        except OSError as error:
            raise _missing(os.strerror(error.errno or 0)) from error
        if num_read != room.nbytes:
            raise _missing(f"it ends before byte {position + room.nbytes}")

    def close(self) -> None:
        """Leave file and mapping to the next transfer that comes this way."""
        file, self._file = self._file, None
        mapping, self._mapping, self._memory = self._mapping, None, None
        if file is not None and mapping is not None and mapping.is_whole:
            self._keep(file, mapping)
        elif file is not None:
            os.close(file)


def _opened(directory: int, opening: bytes, num_bytes: int) -> int:
    """A producer's file of just this size, by a name that can only lie in the directory."""
    if len(opening) != NAME_BYTES:
        raise _missing(f"a name of {len(opening)} bytes")
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        file = os.open(path_of(opening), flags, dir_fd=directory)
    except OSError as error:
        raise _missing(os.strerror(error.errno or 0)) from error
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode) or found.st_size != num_bytes:
        os.close(file)
        raise _missing(f"it has {found.st_size} bytes where {num_bytes} are due")
    return file


def _missing(what: str) -> CorruptTransferError:
    return CorruptTransferError(f"the producer's shared memory: {what}", refusal=Refusal.MEMORY)
