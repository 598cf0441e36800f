"""The index of the encoder cache's disk tier: which files exist, and which to delete. Pure.

    begin_write(file) -> victims, or None: too large    complete_write / remove
    find(name)        -> a complete file, not expired   touch: it is used

The caller deletes the victims before it writes the file. A file that is being written counts, is
not found and is no victim.

Laws (tests/worker/core/test_disk_index.py):

    D1  if each victim can be deleted, the files never exceed `max_bytes`, those that are being
        written included
    D2  an expired file is never found, and `expire` returns it; after a deletion that failed, it
        returns none for RETRY_SECONDS
    D3  only complete files are victims: expired ones first, then least recently used
    D4  equal calls give equal victims
    D5  a file with a session pin is a victim only if no other complete file is left; it expires as
        the others
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Final

from vlm_worker.core.session_pins import MAX_PERCENT, DropReason, SessionPins

RETRY_SECONDS: Final = 60.0
"""After a deletion that failed, no expired file is deleted for so long: others may fail, too."""


@dataclasses.dataclass(frozen=True, slots=True)
class StoredFile:
    """One file. `num_bytes` is its size, `written_at` seconds of the wall clock.

    With `has_scores`, a reduction that needs the scores of visual tokens can use it.
    """

    name: str
    num_bytes: int
    written_at: float
    has_scores: bool = False


class DiskIndex:
    """Files by name, least recently used first. Time is an argument, seconds of the wall clock.

    A file expires `max_age_seconds` after it was written, however often it is used.
    """

    def __init__(self, *, max_bytes: int, max_age_seconds: float) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_evictions = 0
        self.num_expirations = 0
        self.num_put_back = 0
        self.session_pins: SessionPins[str] = SessionPins(max_bytes=max_bytes * MAX_PERCENT // 100)
        self._max_age_seconds = max_age_seconds
        self._next_expiry = math.inf  # no complete file expires before
        self._pinned_until = -math.inf  # of the last session pin
        self._retry_at = -math.inf  # no expired file is deleted before
        self._files: dict[str, StoredFile] = {}
        self._writing: dict[str, StoredFile] = {}

    def __len__(self) -> int:
        """Complete files."""
        return len(self._files)

    def load(self, files: Iterable[StoredFile], *, now: float) -> list[StoredFile]:
        """Add the files that a start found, the oldest as least recently used.

        Returns those to delete: the expired ones, and the oldest that exceed the bound. A file
        from the future counts as written now.
        """
        for file in sorted(files, key=lambda file: (file.written_at, file.name)):
            self._add(dataclasses.replace(file, written_at=min(file.written_at, now)))
        return self.expire(now=now) + self._make_room(0)

    def find(self, name: str, *, now: float) -> StoredFile | None:
        """The complete file of a name, if it is not expired. Changes nothing."""
        file = self._files.get(name)
        return None if file is None or self._is_expired(file, now) else file

    def touch(self, name: str) -> None:
        """Make a file the most recently used one."""
        if name in self._files:
            self._files[name] = self._files.pop(name)

    def pin_for_session(self, name: str, *, seconds: float, now: float) -> None:
        """Make a file a victim after all others for so long; it is complete or being written.

        A pin never ends before one that was made earlier.
        """
        file = self._files.get(name) or self._writing.get(name)
        if file is None:
            return
        self.session_pins.expire(now=now)
        self._pinned_until = max(self._pinned_until, now + seconds)
        self.session_pins.pin(name, file.num_bytes, until=self._pinned_until)

    def is_writing(self, name: str) -> bool:
        return name in self._writing

    def begin_write(self, file: StoredFile, *, now: float) -> list[StoredFile] | None:
        """Reserve the bytes of a file; returns the files to delete before it is written.

        A file of the same name is among them, and gives the new one the rest of its session pin.
        None if it does not fit beside the files that are being written: then nothing changes.
        """
        assert file.name not in self._writing
        reserved = sum(other.num_bytes for other in self._writing.values())
        if reserved + file.num_bytes > self.max_bytes:
            return None
        victims = self.expire(now=now)
        self.session_pins.expire(now=now)
        pinned_seconds = self.session_pins.seconds_left(file.name, now=now)
        if file.name in self._files:
            victims.append(self._take(file.name))
        victims += self._make_room(file.num_bytes)
        self._writing[file.name] = file
        self.num_bytes += file.num_bytes
        if pinned_seconds:
            self.pin_for_session(file.name, seconds=pinned_seconds, now=now)
        return victims

    def complete_write(self, name: str) -> None:
        """The file is written: it can be found, as the most recently used one."""
        file = self._writing.pop(name)
        self.num_bytes -= file.num_bytes
        self._add(file)

    def abort_write(self, name: str) -> None:
        """The file was not written, and is not on the disk."""
        self.num_bytes -= self._writing.pop(name).num_bytes
        self.session_pins.drop(name, DropReason.REPLACED)

    def remove(self, name: str, reason: DropReason = DropReason.REPLACED) -> StoredFile:
        """Forget a complete file; the caller deletes it."""
        self.session_pins.drop(name, reason)
        return self._take(name)

    def put_back(self, file: StoredFile, *, now: float) -> None:
        """Count a victim that could not be deleted, as the most recently used file."""
        self.num_put_back += 1
        self._retry_at = now + RETRY_SECONDS
        if file.name not in self._files and file.name not in self._writing:
            self._add(file)

    def expire(self, *, now: float) -> list[StoredFile]:
        """Forget the expired files and return them; the caller deletes them."""
        if now < max(self._next_expiry, self._retry_at):
            return []
        expired = [file for file in self._files.values() if self._is_expired(file, now)]
        self.num_expirations += len(expired)
        for file in expired:
            self.remove(file.name, DropReason.EXPIRED)
        written = (file.written_at for file in self._files.values())
        self._next_expiry = min(written, default=math.inf) + self._max_age_seconds
        return expired

    def check(self) -> None:
        """Raise AssertionError if the files and the counts disagree."""
        files = [*self._files.values(), *self._writing.values()]
        assert self.num_bytes == sum(file.num_bytes for file in files)
        self.session_pins.check()
        is_bounded = self.num_bytes <= self.max_bytes or self.num_put_back
        assert is_bounded, "D1: the disk tier exceeds its bound"

    def _make_room(self, num_bytes: int) -> list[StoredFile]:
        victims = []
        while self._files and self.num_bytes + num_bytes > self.max_bytes:
            name = self.session_pins.first_without(self._files) or next(iter(self._files))
            victims.append(self.remove(name, DropReason.EVICTED))
        self.num_evictions += len(victims)
        return victims

    def _take(self, name: str) -> StoredFile:
        """Forget a complete file, but not its pin."""
        file = self._files.pop(name)
        self.num_bytes -= file.num_bytes
        return file

    def _add(self, file: StoredFile) -> None:
        self._files[file.name] = file
        self.num_bytes += file.num_bytes
        self._next_expiry = min(self._next_expiry, file.written_at + self._max_age_seconds)

    def _is_expired(self, file: StoredFile, now: float) -> bool:
        return now - file.written_at >= self._max_age_seconds
