"""A transport through files in memory, for two workers of one machine or one pod.

    DIR/triptych-domain     16 random bytes: workers that read the same bytes share the directory
    DIR/triptych-<hex>      one transfer; created, locked and removed by its producer

If the consumer has confirmed that it reads no more, the file gets a new secret name and is reused
for the next transfer: allocating and freeing pages costs as much as filling them. If a consumer
kept the old file open, the digest of its frame would not match the new bytes.

With the native library, reused files stay mapped on both sides (`mapping.py`). The producer then
makes units in them, and the consumer copies each part once and validates its copy. New files, and
all files without that library, are read and written. If a file shrinks during a read, the result is
an error, not a signal. A producer truncates what it removes, because a consumer may have it mapped.
A consumer opens a file only by a name inside its own directory, and checks that the size is the
one that it expects. A lock ends with its process, so `sweep_leftovers` finds files of dead
producers.
"""

from __future__ import annotations

import contextlib
import fcntl
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
from vlm_worker.transfer.mapping import Mapper, Mapping, MappingCache, mapper_of
from vlm_worker.transfer.transport import HOST_ONLY, ExposureAccount
from vlm_worker.wire.buffers import COPIED_BYTES, Copier, Regions, address_of, host_views
from vlm_worker.wire.frames import OUT_OF_BAND_VERSION

NAME: Final = "shared-memory"
NAME_BYTES: Final = 16
PREFIX: Final = "triptych-"
_DOMAIN: Final = "triptych-domain"


class SharedMemory:
    """Files in `directory`, which is in memory; `capacity_bytes` limits the exposed bytes.

    `native_library` is the file of the C++ kernels; without it no file is mapped.

    Raises:
        OSError: the directory is not writable.
    """

    name = f"{NAME}/{OUT_OF_BAND_VERSION}"
    accepts = HOST_ONLY

    def __init__(
        self,
        directory: Path,
        *,
        capacity_bytes: int,
        leftover_seconds: float,
        native_library: str | None = None,
    ) -> None:
        self.account = ExposureAccount(capacity_bytes)
        self._mapper = mapper_of(native_library)
        self._copier = Copier(native_library)
        self._views = MappingCache(capacity_bytes)
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
        return self._domain

    def expose(self, invitation: bytes, num_bytes: int) -> _Segment | None:
        """A file of `num_bytes`; None without capacity, or for a consumer of another directory."""
        if not secrets.compare_digest(invitation, self._domain) or num_bytes == 0:
            return None
        status = os.fstatvfs(self._directory)
        free = status.f_bavail * status.f_frsize + sum(file.num_bytes for file in self._spares)
        if num_bytes > free or not self.account.take(num_bytes):
            return None
        file = None
        try:
            file = self._spare(num_bytes) or SegmentFile(self._directory, self._mapper)
            file.resize(num_bytes)
        except OSError:  # the limit of open files, or of memory, is reached
            if file is not None:
                file.discard()
            self.account.release(num_bytes)
            return None
        self._trim()
        return _Segment(file, account=self.account, keep=self._keep)

    def view(self, opening: bytes, num_bytes: int) -> _SegmentView:
        """Open a producer's file.

        Raises:
            CorruptTransferError: it does not exist, or its size differs.
        """
        file = _open(self._directory, opening, num_bytes)
        mapping = self._views.take(file, num_bytes)
        if mapping is None and self._mapper is not None and num_bytes:
            with contextlib.suppress(OSError):  # without a mapping, the view reads the file
                mapping = self._mapper.map(file, num_bytes, is_written=False)
        return _SegmentView(file, mapping, copier=self._copier, keep=self._views.keep)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._views.close()
            while self._spares:
                self._spares.pop().discard()
            os.close(self._directory)

    def _spare(self, num_bytes: int) -> SegmentFile | None:
        """The spare file nearest in size, unless it would lose more pages than it keeps."""
        fitting = [file for file in self._spares if file.num_bytes <= 2 * num_bytes]
        if not fitting:
            return None
        nearest = min(fitting, key=lambda file: abs(file.num_bytes - num_bytes))
        self._spares.remove(nearest)
        return nearest

    def _keep(self, file: SegmentFile) -> None:
        try:
            file.rename()
        except OSError:
            file.discard()
            return
        self._spares.append(file)
        self._trim()

    def _trim(self) -> None:
        while self._spares and sum(file.num_bytes for file in self._spares) > self.account.free:
            self._spares.pop(0).discard()


class _Segment:
    def __init__(
        self, file: SegmentFile, *, account: ExposureAccount, keep: Callable[[SegmentFile], None]
    ) -> None:
        self.num_bytes = file.num_bytes
        self.opening = file.name
        self._account = account
        self._keep = keep
        self._file: SegmentFile | None = file
        # owned by this transfer: buffers keep it alive while a thread still writes to one
        self._memory = None if file.mapping is None else file.mapping.bytes

    def buffer(self, position: int, num_bytes: int) -> memoryview | None:
        """A view of the mapping; it stays valid after the transfer has ended."""
        if self._memory is None:
            return None
        assert 0 <= position <= self.num_bytes - num_bytes
        return self._memory[position : position + num_bytes].data

    def write(self, position: int, source: Regions) -> memoryview:
        """Write, unless the bytes were made in the mapping; the frame needs no bytes."""
        if self._file is None:
            raise GoneError("the transfer was abandoned")
        assert 0 <= position <= self.num_bytes - source.num_bytes
        for data in host_views(source):
            buffer = self.buffer(position, data.nbytes)
            if buffer is None:
                try:
                    self._file.write(position, data)
                except OSError as error:
                    raise GoneError(f"shared memory: {os.strerror(error.errno or 0)}") from error
            elif address_of(buffer) != address_of(data):
                buffer[:] = data
            position += data.nbytes
        if not self._file.is_whole:
            raise GoneError("shared memory: there was no page for all of it")
        return memoryview(b"")

    def close(self) -> None:
        """Keep the file for the next transfer: its consumer reads no more."""
        file, self._file = self._file, None
        if file is not None:
            self._account.release(self.num_bytes)
            if self._drop_mapping() and file.is_whole:
                self._keep(file)
            else:
                file.discard()

    def abandon(self) -> None:
        """Remove the file; its memory stays counted, because a consumer may have it open."""
        file, self._file = self._file, None
        if file is not None:
            self._account.abandon(self.num_bytes)
            file.remove()
            self._drop_mapping()

    def _drop_mapping(self) -> bool:
        """Drop the mapping; False if an abandoned copy still writes into a buffer of it."""
        if self._memory is None:
            return True
        memory, self._memory = weakref.ref(self._memory), None
        return memory() is None


class _SegmentView:
    """The consumer side of a producer's file."""

    accepts = HOST_ONLY

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

    def read(self, position: int, destination: Regions, *, head: bytes) -> bytes:
        """Copy into the consumer's memory; the digest is that of the copy."""
        destinations, end = host_views(destination), position + destination.num_bytes
        if self._mapping is not None and self._memory is not None and end <= self._memory.nbytes:
            digest = self._copier.copy([self._memory[position:end]], destinations, head=head)
            if self._mapping.is_whole:
                return digest
        state = xxhash.xxh3_128(head)
        for view in destinations:
            for start in range(0, view.nbytes, COPIED_BYTES):
                part = view[start : start + COPIED_BYTES]
                self._read(position, part)
                state.update(part)
                position += part.nbytes
        return state.digest()

    def _read(self, position: int, buffer: memoryview) -> None:
        assert self._file is not None
        try:
            num_read = os.preadv(self._file, [buffer], position)
        except OSError as error:
            raise _missing(os.strerror(error.errno or 0)) from error
        if num_read != buffer.nbytes:
            raise _missing(f"it ends before byte {position + buffer.nbytes}")

    def close(self) -> None:
        """Keep file and mapping for the next transfer of this file."""
        file, self._file = self._file, None
        mapping, self._mapping, self._memory = self._mapping, None, None
        if file is not None and mapping is not None and mapping.is_whole:
            self._keep(file, mapping)
        elif file is not None:
            os.close(file)


def _open(directory: int, opening: bytes, num_bytes: int) -> int:
    """Open a producer's file of exactly this size, by a name inside the directory."""
    if len(opening) != NAME_BYTES:
        raise _missing(f"a name of {len(opening)} bytes")
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        file = os.open(path_of(opening), flags, dir_fd=directory)
    except OSError as error:
        raise _missing(os.strerror(error.errno or 0)) from error
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode) or status.st_size != num_bytes:
        os.close(file)
        raise _missing(f"it has {status.st_size} bytes where {num_bytes} are due")
    return file


def _missing(what: str) -> CorruptTransferError:
    return CorruptTransferError(f"the producer's shared memory: {what}", refusal=Refusal.MEMORY)


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
                status = os.fstat(file)
                domain = os.read(file, NAME_BYTES + 1)
            finally:
                os.close(file)
            mode, is_ours = status.st_mode, status.st_uid == os.geteuid()
            if not is_ours or mode & 0o077 or not stat.S_ISREG(mode):
                raise OSError(
                    f"{_DOMAIN} in the shared memory directory belongs to user {status.st_uid} "
                    f"with mode {stat.S_IMODE(mode):o}, and must be this user's own with mode "
                    "600: remove it, or use another directory"
                )
            if len(domain) != NAME_BYTES:
                raise OSError(f"{_DOMAIN} in the shared memory directory is not ours: remove it")
            return domain
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
