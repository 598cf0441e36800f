"""TLS on a data connection: bytes arrive as they were sent, however they are cut, or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections.abc import Iterator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from worker.authority import Authority
from worker.wire.test_data_protocol import framed, received
from worker.wire.test_frames import Transfer, transfers

from vlm_worker.errors import PeerLostError
from vlm_worker.types import Role
from vlm_worker.wire.buffers import DestinationBuffers
from vlm_worker.wire.data_protocol import is_readable, receive_units, send_batch, shut_down
from vlm_worker.wire.identity_store import IdentityStore
from vlm_worker.wire.secure_connection import (
    RECEIVED_BYTES,
    SENT_BYTES,
    SecureConnection,
    secure,
)

RECORD_BYTES = 1 << 14
PEEK = socket.MSG_PEEK | socket.MSG_DONTWAIT


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> tuple[IdentityStore, IdentityStore]:
    authority = Authority(tmp_path_factory.mktemp("certificates") / "own")
    return (
        IdentityStore(authority.pair("decode"), Role.DECODE),
        IdentityStore(authority.pair("prefill"), Role.PREFILL),
    )


Stores = tuple[IdentityStore, IdentityStore]


@contextlib.contextmanager
def connected(stores: Stores) -> Iterator[tuple[SecureConnection, SecureConnection]]:
    """The consumer's and the producer's end of a connection."""
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)

    async def handshakes() -> list[SecureConnection]:
        return await asyncio.gather(
            *(
                secure(end, store.now, server_side=number == 1)
                for number, (end, store) in enumerate(zip(ends, stores, strict=True))
            )
        )

    with ends[0], ends[1]:
        ours, theirs = asyncio.run(handshakes())
        for end in ends:
            end.setblocking(True)
        yield ours, theirs


@contextlib.contextmanager
def on_thread(work: object, *args: object) -> Iterator[None]:
    thread = threading.Thread(target=work, args=args)  # type: ignore[arg-type]
    thread.start()
    try:
        yield
    finally:
        thread.join()


SIZES = st.integers(1, 70_000) | st.sampled_from(
    [1, RECORD_BYTES - 1, RECORD_BYTES, RECORD_BYTES + 1, SENT_BYTES + 1, RECEIVED_BYTES + 1]
)


# ---- laws ----------------------------------------------------------------------------------------


@given(st.lists(SIZES, min_size=1, max_size=8), st.integers(0, 2**32))
def test_bytes_arrive_in_order_however_they_are_sent_read_and_peeked_at(
    stores: Stores, sizes: list[int], seed: int
) -> None:
    rng = random.Random(seed)  # how often it is asked depends on the kernel
    parts = [rng.randbytes(size) for size in sizes]

    def send() -> None:
        for number, part in enumerate(parts):
            if number % 2:
                theirs.sendall(memoryview(part))
            else:
                cut = rng.randrange(len(part) + 1)
                assert theirs.sendmsg((part[:cut], memoryview(part)[cut:])) == len(part)

    expected = b"".join(parts)
    data = bytearray()
    with connected(stores) as (ours, theirs), on_thread(send):
        while len(data) < len(expected):
            size = min(rng.randint(1, 100_000), len(expected) - len(data))
            buffer = memoryview(bytearray(size))
            how = rng.choice(["all", "some", "peek", "look"])
            if how == "look":
                with contextlib.suppress(BlockingIOError):
                    assert expected[len(data) :].startswith(ours.recv(size, PEEK))
                continue
            flags = {"all": socket.MSG_WAITALL, "some": 0, "peek": socket.MSG_PEEK}[how]
            num_received = ours.recv_into(buffer, min(size, 4096) if how == "peek" else size, flags)
            assert num_received > 0
            assert num_received == size or how != "all"
            assert expected[len(data) :].startswith(buffer[:num_received])
            if how != "peek":
                data += buffer[:num_received]
        with pytest.raises(BlockingIOError):
            ours.recv(1, PEEK)
    assert data == expected


@given(transfer=transfers(), is_placed=st.booleans())
@example(transfer=Transfer(700_000, 1, 7, 3), is_placed=True)
def test_a_transfer_over_tls_equals_the_one_that_was_sent(
    stores: Stores, transfer: Transfer, is_placed: bool
) -> None:
    memory = memoryview(bytearray(len(transfer.data)))
    reader = transfer.reader(into=DestinationBuffers([memory]) if is_placed else None)
    with (
        connected(stores) as (ours, theirs),
        on_thread(send_batch, theirs, framed(transfer.frames())),
    ):
        data = received(ours, reader)  # type: ignore[arg-type]
    assert (memory if is_placed else data) == transfer.data
    assert reader.commit == transfer.commit


@given(st.lists(SIZES, min_size=1, max_size=4), st.integers(1, 50_000), st.integers(1, 2000))
@example([5, 1], 1, 1)
def test_how_records_are_cut_on_their_way_does_not_matter(
    stores: Stores, sizes: list[int], size: int, step: int
) -> None:
    parts = [random.Random(size).randbytes(size) for size in sizes]
    with connected(stores) as (ours, theirs):
        stream = b"".join(ours.encrypt(part) for part in parts)
        for part in parts:
            assert part not in stream or len(part) < 8
        plain = bytearray()
        for start in range(0, len(stream), step):
            plain += theirs.decrypt(stream[start : start + step])
        assert plain == b"".join(parts)

        def send() -> None:
            stream = theirs.encrypt(b"".join(parts))
            for start in range(0, len(stream), size):
                theirs.raw.sendall(stream[start : start + size])

        with on_thread(send):
            buffer = memoryview(bytearray(len(plain)))
            assert ours.recv_into(buffer, len(buffer), socket.MSG_WAITALL) == len(buffer)
        assert buffer == plain


# ---- what is not as it was sent ------------------------------------------------------------------


@given(position=st.integers(0, 3 * RECORD_BYTES), bit=st.integers(0, 7))
def test_a_changed_record_is_an_error_and_gives_no_byte_of_it(
    stores: Stores, position: int, bit: int
) -> None:
    data = random.Random(position).randbytes(3 * RECORD_BYTES)
    with connected(stores) as (ours, theirs):
        stream = bytearray(theirs.encrypt(data))
        stream[position] ^= 1 << bit
        with on_thread(theirs.raw.sendall, stream):
            buffer = memoryview(bytearray(len(data)))
            num_good = 0
            shut_down_later = threading.Timer(5, shut_down, (ours,))  # a longer record never ends
            shut_down_later.start()
            try:
                with contextlib.suppress(OSError):
                    while part := ours.recv_into(buffer[num_good:], len(data) - num_good, 0):
                        num_good += part
            finally:
                shut_down_later.cancel()
    assert num_good <= position
    assert buffer[:num_good] == data[:num_good]


@pytest.mark.parametrize("num_missing", [1, 20, RECORD_BYTES])
def test_a_transfer_that_is_cut_off_is_no_transfer(stores: Stores, num_missing: int) -> None:
    transfer = Transfer(400_000, 0, 4, 3)
    reader = transfer.reader()
    with connected(stores) as (ours, theirs):
        whole = b"".join(
            theirs.encrypt(b"\0\0\0\0" + len(frame).to_bytes(4, "little") + frame)
            for frame in transfer.frames()
        )

        def send() -> None:
            theirs.raw.sendall(whole[:-num_missing])
            theirs.close()

        with on_thread(send), pytest.raises(ConnectionResetError):
            received(ours, reader)  # type: ignore[arg-type]
    assert reader.commit is None


def test_silence_ends_after_the_timeout_of_the_socket(stores: Stores) -> None:
    with connected(stores) as (ours, theirs):
        ours.raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 0, 50_000))
        theirs.raw.sendall(theirs.encrypt(b"x" * 50)[:-1])
        with pytest.raises(PeerLostError, match="no byte"):
            receive_units(ours, Transfer(400, 0, 4, 3).reader(), "peer")


def test_a_short_answer_is_readable_when_its_last_record_is_here(stores: Stores) -> None:
    transfer = Transfer(10, 0, 4, 3)
    with connected(stores) as (ours, theirs):
        stream = b"".join(
            theirs.encrypt(b"\0\0\0\0" + len(frame).to_bytes(4, "little") + frame)
            for frame in transfer.frames()
        )
        theirs.raw.sendall(stream[:-1])
        assert not is_readable(ours)
        theirs.raw.sendall(stream[-1:])
        assert is_readable(ours)
        assert received(ours, transfer.reader()) == transfer.data  # type: ignore[arg-type]


# ---- reuse ---------------------------------------------------------------------------------------


def test_a_connection_serves_no_other_fetch_after_its_time_its_bytes_or_its_pair(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connected(stores) as (ours, theirs):
        assert ours.may_serve_another(1)
        assert not ours.may_serve_another(2)
        theirs.sendall(b"x" * 100)
        ours.recv_into(memoryview(bytearray(100)), 100, socket.MSG_WAITALL)
        for end in (ours, theirs):
            with monkeypatch.context() as changed:
                changed.setattr("vlm_worker.wire.secure_connection.MAX_BYTES", 100)
                assert not end.may_serve_another(1)
            with monkeypatch.context() as changed:
                changed.setattr("vlm_worker.wire.secure_connection.MAX_AGE_SECONDS", 0)
                assert not end.may_serve_another(1)
            assert end.may_serve_another(1)
