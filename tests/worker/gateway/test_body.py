"""The bytes of a body as they come."""

from __future__ import annotations

import mmap

from hypothesis import given
from hypothesis import strategies as st

from vlm_worker.gateway.body import UNPACED_BYTES, BodyBuffer

KIBI = 1024


@given(
    st.lists(st.integers(0, 400 * KIBI), max_size=12),
    st.sampled_from([0, 1, UNPACED_BYTES, 4 * UNPACED_BYTES]),
)
def test_a_body_is_its_pieces_whatever_was_announced(sizes: list[int], announced: int) -> None:
    pieces = [bytes([index]) * size for index, size in enumerate(sizes)]
    body = BodyBuffer(announced)
    for piece in pieces:
        body.add(piece)
    assert len(body) == sum(sizes)
    assert bytes(memoryview(body.whole())) == b"".join(pieces)


def test_a_large_body_that_was_announced_is_written_where_it_stays() -> None:
    """As a bytearray it was copied some seven times, up to 7 ms on the event loop each."""
    body = BodyBuffer(32 * UNPACED_BYTES)
    piece = bytes(64 * KIBI)
    places = set()
    for _ in range(32 * UNPACED_BYTES // len(piece)):
        body.add(piece)
        places.add(id(body.whole()) if len(body) == 32 * UNPACED_BYTES else id(body._large))
    whole = body.whole()
    assert isinstance(whole, mmap.mmap)
    assert len(whole) == 32 * UNPACED_BYTES
    assert places <= {id(None), id(whole)}


def test_the_buffer_of_a_large_body_without_a_length_grows() -> None:
    body, piece = BodyBuffer(0), bytes(range(256)) * 256
    for _ in range(400):
        body.add(piece)
    whole = body.whole()
    assert len(whole) == 400 * len(piece)
    assert bytes(memoryview(whole)) == piece * 400
