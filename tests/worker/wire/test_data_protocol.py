"""Data connections: what was sent arrives, in order and in its place, or nothing of it is used."""

from __future__ import annotations

import itertools
import random
import socket
import struct
import threading
import tracemalloc
from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from worker.seeds import drawing
from worker.transfer import damages
from worker.transfer.damages import DAMAGES, make_transfer
from worker.wire.test_frames import Transfer, transfers

from vlm_worker.errors import (
    CorruptTransferError,
    IncompatibleError,
    PeerLostError,
    Refusal,
    WorkerError,
)
from vlm_worker.wire.buffers import DestinationBuffers
from vlm_worker.wire.data_protocol import (
    RECORD,
    receive_units,
    send_batch,
)
from vlm_worker.wire.frame_reader import FrameReader
from vlm_worker.wire.frames import (
    HEADER_BYTES,
    MAX_LARGE_BYTES,
    MAX_PAYLOAD_BYTES,
    Frame,
    FrameKind,
)
from vlm_worker.wire.sockets import data_connection

FRAME, FAILURE = 0, 1
NUM_DAMAGES = 1_500


def framed(frames: Iterable[bytes]) -> list[Frame]:
    return [Frame(frame[:HEADER_BYTES], memoryview(frame)[HEADER_BYTES:]) for frame in frames]


def recorded(frames: Iterable[bytes]) -> bytes:
    """As they are on a connection."""
    return b"".join(RECORD.pack(FRAME, len(frame)) + frame for frame in frames)


def received(connection: socket.socket, reader: FrameReader) -> bytes:
    """All units that are given, to the commit."""
    data = b""
    while (units := receive_units(connection, reader, peer="peer")) is not None:
        data += units.data
    if reader.commit is None:
        raise CorruptTransferError("it ended without its commit", refusal=Refusal.COMMIT)
    return data


def received_of(stream: bytes, reader: FrameReader) -> bytes:
    """As `received`, of a stream that ends; small enough for the buffers."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            theirs.sendall(stream)
        return received(ours, reader)


def sent_and_received(runs: list[list[Frame]], reader: FrameReader) -> bytes:
    """What comes of runs that are sent on a thread."""
    ours, theirs = socket.socketpair()

    def send() -> None:
        for run in runs:
            send_batch(theirs, run)

    sending = threading.Thread(target=send)
    with ours, theirs:
        sending.start()
        try:
            return received(ours, reader)
        finally:
            sending.join()


@given(
    transfer=transfers(),
    waits=st.booleans(),
    run=st.integers(1, 5),
    place=st.sampled_from(["nowhere", "one piece", "pieces"]),
)
@example(transfer=Transfer(MAX_PAYLOAD_BYTES + 1, 1, 2, 1), waits=True, run=2, place="nowhere")
@example(transfer=Transfer(400_000, 0, 4, 3), waits=True, run=3, place="one piece")
@example(transfer=Transfer(700_000, 1, 7, 3), waits=True, run=3, place="pieces")
def test_what_was_sent_arrives(transfer: Transfer, waits: bool, run: int, place: str) -> None:
    frames = framed(transfer.frames(waits=waits))
    runs = [frames[start : start + run] for start in range(0, len(frames), run)]
    memory = memoryview(bytearray(len(transfer.data)))
    step = max(1, len(memory) if place == "one piece" else transfer.unit_bytes)
    pieces = [memory[start : start + step] for start in range(0, len(memory), step)]
    reader = transfer.reader(into=None if place == "nowhere" else DestinationBuffers(pieces))
    data = sent_and_received(runs, reader)
    assert (data if place == "nowhere" else memory) == transfer.data
    assert reader.commit == transfer.commit


@given(transfers(), st.integers(1, 40))
def test_how_the_bytes_are_cut_on_their_way_does_not_matter(transfer: Transfer, step: int) -> None:
    stream = recorded(transfer.frames())
    ours, theirs = socket.socketpair()

    def send() -> None:
        for start in range(0, len(stream), step):
            theirs.sendall(stream[start : start + step])

    sending = threading.Thread(target=send)
    with ours, theirs:
        sending.start()
        try:
            assert received(ours, transfer.reader()) == transfer.data
        finally:
            sending.join()


# ---- damaged streams -----------------------------------------------------------------------------


def refusal_of(stream: bytes, transfer: damages.Transfer) -> str | None:
    """What refused it; None where all came, and came right."""
    try:
        data = received_of(stream, transfer.reader())
    except CorruptTransferError as error:
        return error.refusal.value
    except IncompatibleError:
        return Refusal.LAYOUT.value
    except (WorkerError, OSError) as error:
        return type(error).__name__
    assert data == transfer.data
    return None


def test_damaged_frames_are_all_refused() -> None:
    draw = drawing()
    caught: Counter[str] = Counter()
    for number in range(NUM_DAMAGES):
        damage = DAMAGES[number % len(DAMAGES)]
        transfer = make_transfer(draw)
        frames = transfer.frames(draw)
        damaged = damage(frames, transfer, draw)
        by = refusal_of(recorded(damaged), transfer)
        # what follows the commit is of no fetch: such a connection is not used again
        assert by is not None or damaged[: len(frames)] == frames, damage.__name__
        caught[str(by)] += 1
    print(dict(caught))


def test_damaged_bytes_are_refused_or_did_no_harm() -> None:
    """Four of a record's eight bytes say nothing that matters."""
    draw = drawing()
    caught: Counter[str] = Counter()
    for _ in range(NUM_DAMAGES):
        transfer = make_transfer(draw)
        stream = bytearray(recorded(transfer.frames(draw)))
        at = draw.randrange(len(stream))
        match draw.choice(("flip", "cut", "insert", "drop", "overwrite")):
            case "flip":
                stream[at] ^= 1 << draw.randrange(8)
            case "cut":
                del stream[at:]
            case "insert":
                stream[at:at] = draw.randbytes(draw.randint(1, 300))
            case "drop":
                del stream[at : at + draw.randint(1, 300)]
            case "overwrite":
                num_bytes = min(draw.randint(1, 300), len(stream) - at)
                stream[at : at + num_bytes] = draw.randbytes(num_bytes)
        caught[str(refusal_of(bytes(stream), transfer))] += 1
    print(dict(caught))
    assert caught["None"] < NUM_DAMAGES / 20


@given(st.binary(max_size=600))
def test_bytes_from_anywhere_are_refused(stream: bytes) -> None:
    assert refusal_of(stream, make_transfer(random.Random(0))) is not None


def check_refused_unread(stream: bytes, transfer: damages.Transfer) -> None:
    """For its size, and without memory of that size."""
    tracemalloc.start()
    try:
        with pytest.raises(CorruptTransferError) as refused:
            received_of(stream, transfer.reader())
        assert tracemalloc.get_traced_memory()[1] < 1 << 16
    finally:
        tracemalloc.stop()
    assert refused.value.refusal is Refusal.SIZE


@pytest.mark.parametrize(
    ("kind", "length"),
    [
        (FRAME, 0),
        (FRAME, HEADER_BYTES - 1),
        (FRAME, 2**32 - 1),
        (FAILURE, 2**32 - 1),
        (FAILURE, 1 << 16),
        (2, 200),
        (255, 0),
    ],
)
def test_no_memory_is_given_for_what_a_record_claims(kind: int, length: int) -> None:
    transfer = make_transfer(random.Random(1))
    stream = RECORD.pack(kind, length) + transfer.frames(random.Random(1))[0]
    check_refused_unread(stream, transfer)


@pytest.mark.parametrize("kind", [FrameKind.COMMIT, FrameKind.WAIT, FrameKind.OPEN, 7])
def test_no_memory_is_given_for_what_a_frame_without_units_claims(kind: int) -> None:
    transfer = make_transfer(random.Random(1))
    frame = bytearray(transfer.frames(random.Random(1))[0])
    struct.pack_into("<H", frame, 6, kind)
    stream = RECORD.pack(FRAME, HEADER_BYTES + MAX_LARGE_BYTES) + frame
    check_refused_unread(stream, transfer)


@given(st.binary(max_size=300))
def test_an_unknown_failure_is_a_failure(data: bytes) -> None:
    with pytest.raises(WorkerError):
        received_of(
            RECORD.pack(FAILURE, len(data)) + data, Transfer(8, 0, num_units=4, batch=1).reader()
        )


# ---- connections that are lost -------------------------------------------------------------------


@pytest.mark.parametrize("num_bytes", [0, 3, 8, 60, 130, 140])
def test_a_connection_that_is_closed_in_any_place_is_lost(num_bytes: int) -> None:
    transfer = Transfer(unit_bytes=32, first_unit=0, num_units=4, batch=4)
    with pytest.raises(OSError, match="closed"):
        received_of(recorded(transfer.frames())[:num_bytes], transfer.reader())


@pytest.mark.parametrize("num_bytes", [0, 3, 8, 60, 130, 140])
def test_a_producer_that_falls_silent_in_any_place_is_lost(num_bytes: int) -> None:
    transfer = Transfer(unit_bytes=32, first_unit=0, num_units=4, batch=4)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours = data_connection(listener.accept()[0], receive_seconds=0.02)
    with ours, theirs:
        theirs.sendall(recorded(transfer.frames())[:num_bytes])
        with pytest.raises(PeerLostError, match="peer"):
            received(ours, transfer.reader())


def test_a_consumer_that_takes_nothing_is_lost() -> None:
    frames = framed(Transfer(1 << 16, first_unit=0, num_units=1, batch=1).frames())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours = data_connection(listener.accept()[0], send_seconds=0.05)
    with ours, theirs, pytest.raises(OSError, match="unavailable"):
        send_batch(ours, itertools.cycle(frames))


def test_a_connection_that_idles_is_probed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = data_connection(socket.create_connection(listener.getsockname()))
    with ours:
        assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        idle, interval, count = (ours.getsockopt(socket.IPPROTO_TCP, one) for one in options)
        assert idle + interval * count <= 30, "seconds until a peer that is gone is noticed"
