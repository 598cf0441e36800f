"""A mapped file that shrinks: zeros and an answer, in whichever thread; other bus errors go on."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vlm_kernels.cpu import native

PAGE = os.sysconf("SC_PAGESIZE")
NUM_PAGES = 8
SIZE = NUM_PAGES * PAGE

pytestmark = pytest.mark.skipif(
    native.path() is None, reason="no native library: nothing is mapped"
)


@pytest.fixture(scope="module")
def file() -> Iterator[int]:
    with tempfile.TemporaryFile(dir="/dev/shm") as opened:
        yield opened.fileno()


class Mapped:
    """A file, through the C ABI."""

    def __init__(self, file: int, num_bytes: int = SIZE, *, library: Any = None) -> None:
        self._library = library or native.library()
        self._library.triptych_is_whole.restype = ctypes.c_bool
        address = ctypes.c_void_p()
        self.number = self._library.triptych_map(
            file, ctypes.c_int64(num_bytes), ctypes.c_bool(True), ctypes.byref(address)
        )
        if self.number >= 0:
            assert address.value is not None
            self.bytes = np.ctypeslib.as_array(
                (ctypes.c_uint8 * num_bytes).from_address(address.value)
            )

    @property
    def is_whole(self) -> bool:
        return bool(self._library.triptych_is_whole(self.number))

    def close(self) -> None:
        self._library.triptych_unmap(self.number)


def filled(file: int) -> np.ndarray:
    """Lets the file have all pages, no byte of them 0; returns what is in it."""
    data = np.arange(SIZE, dtype=np.uint32).astype(np.uint8) | 1
    os.ftruncate(file, 0)
    os.pwrite(file, data.tobytes(), 0)
    return data


@given(kept=st.integers(0, SIZE), begin=st.integers(0, SIZE - 1), length=st.integers(1, SIZE))
def test_what_is_read_is_the_files_or_the_mapping_says_so(
    file: int, kept: int, begin: int, length: int
) -> None:
    data = filled(file)
    ours, beside = Mapped(file), Mapped(file)
    os.ftruncate(file, kept)
    end = min(begin + length, SIZE)
    found = ours.bytes[begin:end].copy()
    pages_kept = -(-kept // PAGE) * PAGE
    assert ours.is_whole == (end <= pages_kept)
    read = min(max(kept - begin, 0), len(found))
    assert np.array_equal(found[:read], data[begin : begin + read])
    assert not found[read:].any(), "zeros where the file had nothing"
    assert beside.is_whole, "nobody used it"
    ours.close()
    beside.close()


def test_what_is_written_where_no_page_is_reaches_no_file(file: int) -> None:
    data = filled(file)
    mapped = Mapped(file)
    os.ftruncate(file, PAGE)
    mapped.bytes[:] = 7
    assert not mapped.is_whole
    os.ftruncate(file, SIZE)
    mapped.bytes[PAGE:] = 8
    assert os.pread(file, SIZE, 0) == bytes([7]) * PAGE + bytes(SIZE - PAGE)
    mapped.close()
    again = Mapped(file)
    assert again.is_whole
    again.bytes[:] = data
    assert os.pread(file, SIZE, 0) == data.tobytes()
    again.close()


def test_each_of_many_threads_hears_of_its_own_mapping_alone(file: int) -> None:
    filled(file)
    whole, broken = [Mapped(file, PAGE) for _ in range(4)], [Mapped(file) for _ in range(4)]
    os.ftruncate(file, PAGE)
    sums = {}

    def add(mapped: Mapped) -> None:
        for _ in range(100):
            sums[mapped.number] = int(mapped.bytes.sum())

    threads = [threading.Thread(target=add, args=(m,)) for m in (*whole, *broken)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(sums.values())) == 1
    assert [m.is_whole for m in (*whole, *broken)] == [True] * 4 + [False] * 4
    for mapped in (*whole, *broken):
        mapped.close()


def test_there_is_a_most_of_mappings_and_a_reason(file: int) -> None:
    filled(file)
    ctypes.set_errno(0)
    library = ctypes.CDLL(native.path(), use_errno=True)
    found = [Mapped(file, PAGE, library=library) for _ in range(1025)]
    assert found[-1].number == -1
    assert ctypes.get_errno() == errno.EMFILE
    for mapped in found:
        if mapped.number >= 0:
            mapped.close()
    assert Mapped(-1, PAGE, library=library).number == -1
    assert ctypes.get_errno() == errno.EBADF
    again = Mapped(file, PAGE)
    assert again.number >= 0
    again.close()


@pytest.mark.parametrize("how", ["a fault", "sent"])
@pytest.mark.parametrize("before", ["nobody", "faulthandler"])
def test_a_bus_error_of_anybody_else_goes_where_it_went_before(before: str, how: str) -> None:
    script = (
        "import ctypes, faulthandler, mmap, os, signal, sys, tempfile\n"
        "signal.signal(signal.SIGBUS, signal.SIG_DFL)\n"
        "if sys.argv[2] == 'faulthandler': faulthandler.enable()\n"
        "opened = tempfile.TemporaryFile(dir='/dev/shm'); file = opened.fileno()\n"
        "os.ftruncate(file, 9000)\n"
        "library = ctypes.CDLL(sys.argv[1]); address = ctypes.c_void_p()\n"
        "number = library.triptych_map(file, ctypes.c_int64(9000), True, ctypes.byref(address))\n"
        "others = mmap.mmap(file, 9000); os.ftruncate(file, 10)\n"
        "print(ctypes.string_at(address.value + 8000, 1), number, flush=True)\n"
        "others[8000] if sys.argv[3] == 'a fault' else os.kill(os.getpid(), signal.SIGBUS)\n"
        "print('it went on')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(native.path()), before, how],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.stdout, done.returncode) == ("b'\\x00' 0\n", -signal.SIGBUS), done.stderr
    assert ("Bus error" in done.stderr) == (before == "faulthandler")


def test_the_library_loads_late_beside_torch(tmp_path: Path) -> None:
    assert torch.get_num_threads() > 0, "torch has its libraries in this process"
    for number in range(3):
        copy = shutil.copy(str(native.path()), tmp_path / f"{number}.so")
        assert ctypes.CDLL(str(copy)).triptych_is_whole(0)
