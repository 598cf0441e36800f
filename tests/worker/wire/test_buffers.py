"""Both ways to copy do the same: all bytes, in order, whatever the pieces, and one digest."""

from __future__ import annotations

import random

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from vlm_kernels.cpu import native
from vlm_worker.wire.buffers import COPIED_BYTES, Copier, split_views


@pytest.fixture(params=["plain", "native"], scope="module")
def copier(request: pytest.FixtureRequest) -> Copier:
    library = native.path()
    if request.param == "native" and library is None:
        pytest.skip("no native library on this machine")
    return Copier(library if request.param == "native" else None)


def split(data: bytearray, ends: list[int]) -> list[memoryview]:
    """All of it, in pieces, some of which may be empty."""
    cuts = sorted(end % (len(data) + 1) for end in ends)
    return [
        memoryview(data)[start:end]
        for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)
    ]


ends = st.lists(st.integers(0, 1 << 30), max_size=6)


@given(
    num_bytes=st.integers(0, 3000) | st.integers(COPIED_BYTES - 2, COPIED_BYTES + 2),
    of=ends,
    to=ends,
    head=st.binary(max_size=200),
)
def test_parts_fill_rooms_and_the_digest_is_of_both(
    copier: Copier, num_bytes: int, of: list[int], to: list[int], head: bytes
) -> None:
    source, target = bytearray(random.Random(num_bytes).randbytes(num_bytes)), bytearray(num_bytes)
    digest = copier.copy(split(source, of), split(target, to), head=head)
    assert target == source
    assert digest == xxhash.xxh3_128_digest(head + source)


@given(of=ends, to=ends)
def test_a_cut_has_all_bytes_in_runs_of_the_sizes_that_were_asked_for(
    of: list[int], to: list[int]
) -> None:
    data = bytearray(range(256))
    sizes = [piece.nbytes for piece in split(data, to)]
    runs = list(split_views(split(data, of), sizes))
    assert [sum(part.nbytes for part in run) for run in runs] == sizes
    assert b"".join(part for run in runs for part in run) == data


def test_memory_that_may_not_be_written_is_not(copier: Copier) -> None:
    buffer = memoryview(bytes(1000))
    with pytest.raises((AssertionError, ValueError)):
        copier.copy([memoryview(bytes(1000)[::-1])], [buffer], head=b"")
