"""The disk index's laws D1-D4, for every order of operations."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from vlm_worker.core.disk_index import RETRY_SECONDS, DiskIndex, StoredFile

BOUND, AGE = 100, 50.0
names = st.sampled_from("abcdef")
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["write", "complete", "abort", "touch", "expire", "remove", "wait"]),
        names,
        st.integers(1, 120),
    ),
    max_size=60,
)


@dataclasses.dataclass
class Disk:
    """What is on the disk if the caller does what the index says, and the order of use."""

    files: dict[str, int] = dataclasses.field(default_factory=dict)
    writing: dict[str, StoredFile] = dataclasses.field(default_factory=dict)
    written_at: dict[str, float] = dataclasses.field(default_factory=dict)
    used: list[str] = dataclasses.field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        return sum(self.files.values()) + sum(file.num_bytes for file in self.writing.values())

    def delete(self, name: str) -> None:
        del self.files[name]
        self.used.remove(name)


def run(operations: list[tuple[str, str, int]]) -> list[str]:
    """Apply operations to an index and a disk; returns the victims, and checks D1 to D3."""
    index, disk, now, log = DiskIndex(max_bytes=BOUND, max_age_seconds=AGE), Disk(), 0.0, []
    for what, name, number in operations:
        expired = {one for one in disk.used if now - disk.written_at[one] >= AGE}
        if what == "write" and name not in disk.writing:
            file = StoredFile(name, number, now)
            victims = index.begin_write(file, now=now)
            reserved = sum(one.num_bytes for one in disk.writing.values())
            assert (victims is None) == (reserved + number > BOUND)
            if victims is None:
                continue
            gone = [one.name for one in victims]
            log += gone
            assert expired <= set(gone)
            order = [one for one in disk.used if one not in expired and one != name]
            evicted = [one for one in gone if one not in expired and one != name]
            assert evicted == order[: len(evicted)], "D3: not the least recently used"
            num_last = disk.files[evicted[-1]] if evicted else BOUND
            for one in gone:
                disk.delete(one)
            assert disk.num_bytes + number + num_last > BOUND, "D3: one too many"
            disk.writing[name] = file
        elif what == "complete" and name in disk.writing:
            index.complete_write(name)
            file = disk.writing.pop(name)
            disk.files[name], disk.written_at[name] = file.num_bytes, file.written_at
            disk.used.append(name)
        elif what == "abort" and name in disk.writing:
            index.abort_write(name)
            del disk.writing[name]
        elif what == "touch" and name in disk.files:
            index.touch(name)
            disk.used.remove(name)
            disk.used.append(name)
        elif what == "expire":
            gone = [one.name for one in index.expire(now=now)]
            assert set(gone) == expired, "D2: not exactly the expired files"
            log += gone
            for one in gone:
                disk.delete(one)
        elif what == "remove" and name in disk.files:
            index.remove(name)
            disk.delete(name)
        elif what == "wait":
            now += number
        assert index.num_bytes == disk.num_bytes <= BOUND, "D1"
        index.check()
        for one in "abcdef":
            is_expired = one in disk.files and now - disk.written_at[one] >= AGE
            found = index.find(one, now=now)
            assert (found is not None) == (one in disk.files and not is_expired), "D2"
    return log


@given(OPERATIONS)
def test_the_index_keeps_its_laws_and_gives_equal_victims_for_equal_calls(
    operations: list[tuple[str, str, int]],
) -> None:
    assert run(operations) == run(operations)  # D4


def test_a_start_keeps_the_newest_files_within_size_and_age() -> None:
    index = DiskIndex(max_bytes=BOUND, max_age_seconds=AGE)
    files = [StoredFile("old", 10, 40.0), StoredFile("a", 60, 60.0), StoredFile("b", 50, 99.0)]
    deleted = index.load(files, now=100.0)
    assert [file.name for file in deleted] == ["old", "a"]
    assert index.find("b", now=100.0) is not None
    assert (len(index), index.num_bytes) == (1, 50)


def test_a_file_from_the_future_expires_as_one_that_is_written_now() -> None:
    index = DiskIndex(max_bytes=BOUND, max_age_seconds=AGE)
    assert index.load([StoredFile("a", 10, 1e9)], now=100.0) == []
    assert index.find("a", now=149.0) is not None
    assert index.find("a", now=150.0) is None
    assert [file.name for file in index.expire(now=150.0)] == ["a"]


def test_a_victim_that_cannot_be_deleted_still_counts() -> None:
    index = DiskIndex(max_bytes=BOUND, max_age_seconds=AGE)
    index.load([StoredFile("a", 80, 0.0)], now=0.0)
    victims = index.begin_write(StoredFile("b", 50, 1.0), now=1.0)
    assert victims == [StoredFile("a", 80, 0.0)]
    index.abort_write("b")
    index.put_back(victims[0], now=1.0)
    assert index.num_bytes == 80
    assert index.find("a", now=1.0) is not None


def test_an_expired_file_that_cannot_be_deleted_is_tried_again_later() -> None:
    index = DiskIndex(max_bytes=BOUND, max_age_seconds=AGE)
    index.load([StoredFile("a", 80, 0.0)], now=0.0)
    for attempt in range(3):
        now = AGE + attempt * RETRY_SECONDS
        assert index.expire(now=now - 0.1) == []
        (file,) = index.expire(now=now)
        index.put_back(file, now=now)
        assert index.expire(now=now) == []
        assert index.find("a", now=now) is None  # D2
    index.check()
