"""Copied and digested at once: every byte, no other one, and the digest of what was written."""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from kernels.variants import library_of

from vlm_kernels.cpu import libraries, native

LEAST = 241
LARGEST = 70_000
"""Several windows of four pages."""
ENDS = sorted({at + by for at in (1024, 2048, 16384, 32768) for by in range(-97, 66, 32)})


@pytest.fixture(params=[v.name for v in libraries.supported()], scope="module")
def copy(request: pytest.FixtureRequest) -> Any:
    try:
        library = library_of(request.param)
    except libraries.NativeError as error:
        pytest.skip(str(error))
    return native.typed(
        library,
        "triptych_copy_digest",
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_char_p,
        ctypes.c_int64,
        ctypes.c_char_p,
    )


def digest_of(copy: Any, moves: list[tuple[np.ndarray, np.ndarray]], head: bytes) -> bytes:
    """Of a copy from each first array to its second one."""
    table = np.array([(to.ctypes.data, of.ctypes.data, of.nbytes) for of, to in moves], np.int64)
    digest = ctypes.create_string_buffer(16)
    copy(table.ctypes.data, len(moves), head, len(head), digest)
    return digest.raw


sizes = st.integers(0, LARGEST) | st.sampled_from(ENDS)


@given(
    parts=st.lists(st.tuples(sizes, st.integers(0, 130), st.integers(0, 130)), max_size=4),
    head_bytes=st.sampled_from([0, 1, 63, 64, 65, 96, 240]) | st.integers(0, 3000),
    seed=st.integers(0, 99),
)
def test_all_is_copied_and_nothing_else_and_the_digest_is_xxh3(
    copy: Any, parts: list[tuple[int, int, int]], head_bytes: int, seed: int
) -> None:
    """Whatever the sizes, and wherever in a line and a page source and target begin."""
    rng = np.random.default_rng(seed)
    head_bytes = max(head_bytes, LEAST - sum(size for size, _, _ in parts))
    head = rng.bytes(head_bytes)
    sources = [rng.integers(0, 256, start + size, np.uint8)[start:] for size, start, _ in parts]
    around = [np.full(start + size + 64, 7, np.uint8) for size, _, start in parts]
    targets = [
        buffer[start : start + size] for buffer, (size, _, start) in zip(around, parts, strict=True)
    ]
    digest = digest_of(copy, list(zip(sources, targets, strict=True)), head)
    assert digest == xxhash.xxh3_128_digest(head + b"".join(s.tobytes() for s in sources))
    for buffer, target, source, (size, _, start) in zip(
        around, targets, sources, parts, strict=True
    ):
        assert np.array_equal(target, source)
        assert (buffer[:start] == 7).all()
        assert (buffer[start + size :] == 7).all()


def test_the_digest_is_of_what_was_written_though_the_source_changes_meanwhile(copy: Any) -> None:
    source = np.zeros(1 << 20, np.uint8)
    has_changed, is_over = threading.Event(), threading.Event()

    def change() -> None:
        value = 0
        while not is_over.is_set():
            value = (value + 1) % 256
            source.fill(value)
            has_changed.set()

    writer = threading.Thread(target=change)
    writer.start()
    has_changed.wait()
    found, deadline = set(), time.monotonic() + 20
    try:
        while len(found) < 5:
            assert time.monotonic() < deadline, "it never changes"
            target = np.empty_like(source)
            digest = digest_of(copy, [(source, target)], b"")
            assert digest == xxhash.xxh3_128_digest(target)
            found.add(digest)
    finally:
        is_over.set()
        writer.join()
