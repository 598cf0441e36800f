"""Answers that have come to their commit are received without waiting, whatever they say."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worker.seeds import drawing
from worker.wire.test_data_protocol import framed, received, recorded
from worker.wire.test_frames import Transfer

from vlm_worker.errors import PeerLostError, WorkerError
from vlm_worker.wire.data_protocol import (
    MAX_SHORT_BYTES,
    RECORD,
    is_readable,
    send_nonblocking,
)

SHORT = Transfer(unit_bytes=32, first_unit=0, num_units=4, batch=2)
STREAM = recorded(SHORT.frames(waits=True))
NUM_DAMAGES = 300


def has_come_of(stream: bytes) -> bool:
    """Of a stream on a connection; afterwards it is still there, and nothing waits."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(stream)
        found = is_readable(ours)
        ours.setblocking(False)
        left = ours.recv(len(stream) + 1) if stream else b""
        assert left == stream, "nothing was taken"
    return found


def test_an_answer_has_come_with_the_last_byte_of_its_commit_and_no_earlier() -> None:
    assert has_come_of(STREAM)
    assert has_come_of(STREAM + b"more")
    assert not any(has_come_of(STREAM[:num_bytes]) for num_bytes in range(len(STREAM)))


def test_a_failure_and_an_answer_longer_than_short_ones_are_left_to_a_thread() -> None:
    assert not has_come_of(RECORD.pack(1, 4) + b"\0" * 200)
    long = recorded(
        Transfer(unit_bytes=MAX_SHORT_BYTES, first_unit=0, num_units=1, batch=1).frames()
    )
    assert not has_come_of(long)


def test_a_connection_that_is_gone_has_nothing() -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours:
        assert not is_readable(ours)
    assert not is_readable(ours)


def received_at_once(stream: bytes) -> None:
    """Receive what has come, from a socket that would raise PeerLostError rather than wait."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(stream)
        ours.setblocking(False)
        if is_readable(ours):
            try:
                received(ours, SHORT.reader())
            except PeerLostError:
                raise AssertionError("it waits for more") from None
            except WorkerError:
                pass  # refused


def test_a_damaged_record_makes_no_reader_wait() -> None:
    draw = drawing()
    for _ in range(NUM_DAMAGES):
        stream = bytearray(STREAM)
        for _ in range(draw.randint(1, 3)):
            stream[draw.randrange(len(stream))] = draw.randrange(256)
        received_at_once(bytes(stream))


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 300), st.binary(max_size=300))))
def test_records_of_any_kind_and_length_make_no_reader_wait(
    records: list[tuple[int, int, bytes]],
) -> None:
    received_at_once(b"".join(RECORD.pack(kind, size) + data for kind, size, data in records))


@pytest.mark.parametrize("num_before", [0, 1, 10**9])
def test_what_there_is_no_room_for_is_sent_later_and_arrives_whole(num_before: int) -> None:
    frames = framed(SHORT.frames())
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        num_sent = 0
        ours.setblocking(False)
        try:
            while num_sent < num_before:
                num_sent += ours.send(b"x" * min(512, num_before - num_sent))
        except BlockingIOError:
            pass
        rest = send_nonblocking(ours, frames)
        assert bool(rest) == (num_before > 1)
        theirs.recv(num_sent, socket.MSG_WAITALL)
        ours.setblocking(True)
        ours.sendall(rest)
        ours.close()
        assert received(theirs, SHORT.reader()) == SHORT.data


def test_a_closed_peer_is_reported() -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours, pytest.raises(OSError, match="pipe"):
        send_nonblocking(ours, framed(SHORT.frames()))
