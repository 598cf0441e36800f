"""Files in memory: found by their own kind alone, never larger or longer there than promised."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from vlm_worker.errors import CorruptTransferError, GoneError
from vlm_worker.transfer.shared_memory import SharedMemory
from vlm_worker.wire.buffers import HostRegions


def shared(directory: Path, *, leftover_seconds: float = 60.0) -> SharedMemory:
    return SharedMemory(directory, capacity_bytes=100_000, leftover_seconds=leftover_seconds)


def segments(directory: Path) -> list[str]:
    return [f.name for f in directory.iterdir() if f.name != "triptych-domain"]


def test_workers_of_other_directories_do_not_share(directory: Path) -> None:
    inner = directory / "other"
    inner.mkdir()
    try:
        ours, theirs = shared(directory), shared(inner)
        assert ours.invitation() != theirs.invitation()
        assert ours.expose(theirs.invitation(), 100) is None
        assert ours.expose(shared(directory).invitation(), 100) is not None
    finally:
        for file in inner.iterdir():
            file.unlink()
        inner.rmdir()


@pytest.mark.parametrize("end", ["close", "abandon"])
def test_a_segment_is_private_and_its_name_ends_with_it(directory: Path, end: str) -> None:
    transport = shared(directory)
    exposure = transport.expose(transport.invitation(), 5000)
    assert exposure is not None
    [name] = segments(directory)
    assert (directory / name).stat().st_mode & 0o777 == 0o600
    getattr(exposure, end)()
    getattr(exposure, end)()
    assert name not in segments(directory)
    with pytest.raises(GoneError):
        exposure.write(0, HostRegions([memoryview(b"late")]))
    transport.close()
    assert segments(directory) == []


def test_a_file_that_is_read_no_more_is_the_next_transfers(directory: Path) -> None:
    transport = shared(directory)
    first = transport.expose(transport.invitation(), 5000)
    assert first is not None
    made = (directory / segments(directory)[0]).stat().st_ino
    first.close()
    second = transport.expose(transport.invitation(), 7000)
    assert second is not None
    assert second.opening != first.opening
    [name] = segments(directory)
    assert (directory / name).stat().st_ino == made
    assert (directory / name).stat().st_size == 7000
    second.abandon()
    third = transport.expose(transport.invitation(), 7000)
    assert third is not None
    assert [(directory / name).stat().st_ino for name in segments(directory)] != [made]
    third.close()
    transport.close()


def test_a_small_transfer_leaves_a_large_file_its_pages(directory: Path) -> None:
    transport = shared(directory)
    large = transport.expose(transport.invitation(), 50_000)
    assert large is not None
    large.close()
    [kept] = segments(directory)
    small = transport.expose(transport.invitation(), 5000)
    assert small is not None
    assert (directory / kept).stat().st_size == 50_000
    small.close()
    for size in (50_000, 5000):
        again = transport.expose(transport.invitation(), size)
        assert again is not None
        assert len(segments(directory)) == 2
        again.close()
    transport.close()


def test_files_that_are_kept_count_within_the_capacity(directory: Path) -> None:
    transport = shared(directory)
    both = [transport.expose(transport.invitation(), 40_000) for _ in range(2)]
    for exposure in both:
        assert exposure is not None
        exposure.close()
    assert len(segments(directory)) == 2
    large = transport.expose(transport.invitation(), 90_000)
    assert large is not None
    assert len(segments(directory)) == 1
    large.close()
    transport.close()


@pytest.mark.parametrize("size", [0, 4999, 5001])
def test_a_segment_of_another_size_than_we_expect_is_refused(directory: Path, size: int) -> None:
    transport = shared(directory)
    exposure = transport.expose(transport.invitation(), 5000)
    assert exposure is not None
    os.truncate(directory / segments(directory)[0], size)
    with pytest.raises(CorruptTransferError, match="bytes where 5000 are due"):
        transport.view(exposure.opening, 5000)
    exposure.close()


def test_a_segment_that_shrinks_under_its_reader_is_an_error_and_no_signal(directory: Path) -> None:
    transport = shared(directory)
    exposure = transport.expose(transport.invitation(), 50_000)
    assert exposure is not None
    view = transport.view(exposure.opening, 50_000)
    os.truncate(directory / segments(directory)[0], 100)
    with pytest.raises(CorruptTransferError, match="ends before"):
        view.read(40_000, HostRegions([memoryview(bytearray(10_000))]), head=b"")
    exposure.write(40_000, HostRegions([memoryview(b"x")]))  # nor does it end its writer
    view.close()
    exposure.close()


def test_what_is_no_file_of_ours_is_not_followed(directory: Path) -> None:
    transport = shared(directory)
    opening = secrets.token_bytes(16)
    (directory / f"triptych-{opening.hex()}").symlink_to("/etc/passwd")
    with pytest.raises(CorruptTransferError):
        transport.view(opening, Path("/etc/passwd").stat().st_size)


@pytest.mark.parametrize("what", ["no file", "no space"])
def test_without_memory_on_the_machine_the_transport_steps_aside(
    directory: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    transport = shared(directory)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    if what == "no file":
        monkeypatch.setattr(os, "ftruncate", full)
    else:
        empty = os.statvfs_result((4096, 4096, 10, 0, 0, 10, 10, 10, 0, 255))
        monkeypatch.setattr(os, "fstatvfs", lambda _: empty)
    assert transport.expose(transport.invitation(), 100) is None
    assert transport.account.used == 0
    assert segments(directory) == []


def test_memory_that_ends_in_the_middle_ends_the_transfer(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = shared(directory)
    exposure = transport.expose(transport.invitation(), 100)
    assert exposure is not None

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(GoneError, match="No space left"):
        exposure.write(0, HostRegions([memoryview(b"x")]))
    exposure.close()


def test_files_of_ended_processes_are_removed_and_others_stay(directory: Path) -> None:
    script = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[2])\n"
        "from vlm_worker.transfer.shared_memory import SharedMemory\n"
        "t = SharedMemory(Path(sys.argv[1]), capacity_bytes=10**6, leftover_seconds=60)\n"
        "e = t.expose(t.invitation(), 1000); print(e.opening.hex(), flush=True); input()\n"
    )
    worker = str(Path(__file__).parents[3] / "worker")
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(directory), worker],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    name = f"triptych-{process.stdout.readline().strip()}"
    os.utime(directory / name, (0, 0))
    shared(directory)
    assert segments(directory) == [name], "its producer lives"
    process.kill()
    process.communicate()
    shared(directory)
    assert segments(directory) == []


def test_a_file_that_was_just_made_is_left_alone(directory: Path) -> None:
    young = directory / f"triptych-{secrets.token_hex(16)}"
    young.touch()
    shared(directory)
    assert segments(directory) == [young.name]
    shared(directory, leftover_seconds=-60.0)
    assert segments(directory) == []


def test_many_that_come_first_agree_on_one_domain(directory: Path) -> None:
    assert len({shared(directory).invitation() for _ in range(5)}) == 1
    (directory / "triptych-domain").write_bytes(b"short")
    with pytest.raises(OSError, match="not ours"):
        shared(directory)


@pytest.mark.parametrize("mode", [0o644, 0o660, 0o602])
def test_a_domain_that_others_may_write_or_read_is_refused(directory: Path, mode: int) -> None:
    """Another user may have put it there first."""
    domain = directory / "triptych-domain"
    domain.write_bytes(bytes(16))
    domain.chmod(mode)
    with pytest.raises(OSError, match="must be this user's own with mode 600"):
        shared(directory)
    domain.chmod(0o600)
    assert shared(directory).invitation() == bytes(16)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_domain_of_another_user_is_refused(directory: Path) -> None:
    domain = directory / "triptych-domain"
    domain.write_bytes(bytes(16))
    domain.chmod(0o600)
    os.chown(domain, 65534, -1)
    with pytest.raises(OSError, match="belongs to user 65534"):
        shared(directory)
