"""Frames: what was sent arrives whole and in order, or nothing of it is used."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worker.wire.reading import read

from vlm_worker.errors import CorruptTransferError, IncompatibleError, Refusal
from vlm_worker.types import FinishReason, RequestKey
from vlm_worker.wire.buffers import DestinationBuffers
from vlm_worker.wire.frame_reader import FrameReader
from vlm_worker.wire.frames import (
    HEADER_BYTES,
    MAX_FRAME_BYTES,
    MAX_PAYLOAD_BYTES,
    Commit,
    Frame,
    FrameWriter,
    TransferId,
)

IDENTITY = TransferId(RequestKey("r-1", 1), "t-1", b"b" * 16, b"f" * 16, "pod-1", b"c" * 32)


@dataclasses.dataclass(frozen=True)
class Transfer:
    unit_bytes: int
    first_unit: int
    num_units: int
    batch: int

    @property
    def data(self) -> bytes:
        size = self.unit_bytes * (self.num_units - self.first_unit)
        return bytes((7 * i + i // 251) % 256 for i in range(size))

    @property
    def commit(self) -> Commit:
        return Commit(self.num_units, 4 * self.num_units, first_token_id=5)

    def frames(self, identity: TransferId = IDENTITY, *, waits: bool = False) -> list[bytes]:
        writer = FrameWriter(identity, unit_bytes=self.unit_bytes, first_unit=self.first_unit)
        frames: list[Frame] = []
        step = self.batch * self.unit_bytes
        for start in range(0, len(self.data), step):
            if waits:
                frames.append(writer.wait())
            frames += writer.write(memoryview(self.data)[start : start + step])
        frames.append(writer.commit(self.commit))
        return [frame.to_bytes() for frame in frames]

    def reader(
        self, identity: TransferId = IDENTITY, *, into: DestinationBuffers | None = None
    ) -> FrameReader:
        identity = dataclasses.replace(identity, pod_uid=None)
        return FrameReader(
            identity,
            unit_bytes=self.unit_bytes,
            first_unit=self.first_unit,
            end_unit=self.num_units,
            into=into,
        )


@st.composite
def transfers(draw: st.DrawFn) -> Transfer:
    num_units = draw(st.integers(0, 40))
    return Transfer(
        unit_bytes=draw(st.integers(1, 300)),
        first_unit=draw(st.integers(0, num_units)),
        num_units=num_units,
        batch=draw(st.integers(1, 9)),
    )


def receive(reader: FrameReader, frames: list[bytes], *, in_parts: bool = False) -> bytes:
    """All units; raises where anything is wrong, the missing commit included."""
    received = b""
    for frame in frames:
        before = reader.assembler.num_bytes
        units = read(reader, frame, in_parts=in_parts)
        if units is not None:
            assert units.data.nbytes == reader.assembler.num_bytes - before
            received += bytes(units.data)
    if reader.commit is None:
        raise CorruptTransferError("no commit")
    return received


@given(transfers(), st.booleans(), st.booleans())
def test_what_was_sent_arrives(transfer: Transfer, waits: bool, in_parts: bool) -> None:
    reader = transfer.reader()
    assert receive(reader, transfer.frames(waits=waits), in_parts=in_parts) == transfer.data
    assert reader.commit == transfer.commit


@pytest.mark.parametrize("unit_bytes", [MAX_PAYLOAD_BYTES - 1, MAX_PAYLOAD_BYTES, 2_500_000])
def test_a_unit_larger_than_a_frame_arrives_in_parts(unit_bytes: int) -> None:
    transfer = Transfer(unit_bytes, first_unit=1, num_units=3, batch=2)
    frames = transfer.frames()
    assert all(len(frame) <= MAX_FRAME_BYTES for frame in frames)
    for in_parts in (False, True):
        assert receive(transfer.reader(), frames, in_parts=in_parts) == transfer.data


def test_parts_that_disagree_on_their_units_are_caught() -> None:
    writer = FrameWriter(IDENTITY, unit_bytes=8)
    reader = Transfer(unit_bytes=8, first_unit=0, num_units=4, batch=4).reader()
    assert (
        reader.read(writer._frame(memoryview(bytes(8)), num_units=2, offset=0).to_bytes()) is None
    )
    with pytest.raises(CorruptTransferError, match="after a part of others"):
        reader.read(writer._frame(memoryview(bytes(16)), num_units=3, offset=8).to_bytes())


@given(transfers(), st.data())
def test_every_flipped_bit_is_caught(transfer: Transfer, data: st.DataObject) -> None:
    frames = transfer.frames()
    index = data.draw(st.integers(0, len(frames) - 1))
    bit = data.draw(st.integers(0, 8 * len(frames[index]) - 1))
    damaged = bytearray(frames[index])
    damaged[bit // 8] ^= 1 << bit % 8
    frames[index] = bytes(damaged)
    with pytest.raises(CorruptTransferError):
        receive(transfer.reader(), frames)


@given(transfers(), st.data())
def test_every_truncated_or_lengthened_frame_is_caught(
    transfer: Transfer, data: st.DataObject
) -> None:
    frames = transfer.frames()
    index = data.draw(st.integers(0, len(frames) - 1))
    cut = data.draw(st.integers(0, len(frames[index]) - 1))
    frames[index] = data.draw(st.sampled_from([frames[index][:cut], frames[index] + b"\0"]))
    with pytest.raises(CorruptTransferError):
        receive(transfer.reader(), frames)


@settings(max_examples=200)
@given(transfers(), st.data())
def test_frames_lost_repeated_or_out_of_order_are_caught(
    transfer: Transfer, data: st.DataObject
) -> None:
    frames = transfer.frames()
    indices = data.draw(st.lists(st.integers(0, len(frames) - 1), max_size=len(frames) + 2))
    if indices == list(range(len(frames))):
        return
    with pytest.raises(CorruptTransferError):
        receive(transfer.reader(), [frames[i] for i in indices])


OTHERS = {
    "another transfer": dataclasses.replace(IDENTITY, name="t-2"),
    "another request": dataclasses.replace(IDENTITY, key=RequestKey("r-2", 1)),
    "another content": dataclasses.replace(IDENTITY, content=b"d" * 32),
    "another attempt": dataclasses.replace(IDENTITY, key=RequestKey("r-1", 2)),
    "another incarnation": dataclasses.replace(IDENTITY, boot_id=b"c" * 16),
}


@pytest.mark.parametrize("other", OTHERS)
@given(transfers(), st.data())
def test_a_frame_of_another_transfer_is_caught(
    other: str, transfer: Transfer, data: st.DataObject
) -> None:
    frames = transfer.frames()
    index = data.draw(st.integers(0, len(frames) - 1))
    frames[index] = transfer.frames(OTHERS[other])[index]
    with pytest.raises(CorruptTransferError):
        receive(transfer.reader(), frames)


def test_a_pod_that_changes_in_the_middle_is_caught() -> None:
    transfer = Transfer(unit_bytes=8, first_unit=0, num_units=4, batch=1)
    mixed = transfer.frames()
    mixed[2] = transfer.frames(dataclasses.replace(IDENTITY, pod_uid="pod-2"))[2]
    with pytest.raises(CorruptTransferError, match="pod uid"):
        receive(transfer.reader(), mixed)


@given(transfers(), st.integers(0, 60), st.integers(1, 400))
def test_a_transfer_of_another_size_than_ours_is_caught(
    transfer: Transfer, end_unit: int, unit_bytes: int
) -> None:
    same = (end_unit, unit_bytes) == (transfer.num_units, transfer.unit_bytes)
    nothing_sent = transfer.first_unit == transfer.num_units == end_unit
    if same or nothing_sent:
        return
    reader = FrameReader(
        IDENTITY, unit_bytes=unit_bytes, first_unit=transfer.first_unit, end_unit=end_unit
    )
    with pytest.raises(CorruptTransferError):
        receive(reader, transfer.frames())


def test_an_answer_that_ended_with_its_first_token_may_be_committed_without_its_units() -> None:
    transfer = Transfer(unit_bytes=8, first_unit=0, num_units=4, batch=4)
    writer = FrameWriter(IDENTITY, unit_bytes=8)
    commit = Commit(0, 16, first_token_id=3, finish_reason=FinishReason.STOP)
    reader = transfer.reader()
    assert receive(reader, [writer.commit(commit).to_bytes()]) == b""
    assert reader.commit == commit


@given(st.binary(max_size=400))
def test_bytes_from_anywhere_are_refused(frame: bytes) -> None:
    reader = Transfer(unit_bytes=8, first_unit=0, num_units=4, batch=4).reader()
    with pytest.raises(CorruptTransferError):
        reader.read(frame)


def test_a_frame_of_another_layout_is_refused_for_good() -> None:
    transfer = Transfer(unit_bytes=8, first_unit=0, num_units=4, batch=4)
    other = dataclasses.replace(IDENTITY, fingerprint=b"g" * 16)
    with pytest.raises(IncompatibleError):
        receive(transfer.reader(), transfer.frames(other))


def test_units_lie_where_their_reader_wants_them_however_the_frames_come() -> None:
    transfer = Transfer(unit_bytes=700_000, first_unit=2, num_units=5, batch=3)
    size = len(transfer.data)
    for in_parts, piece_bytes in itertools.product((False, True), (size, 700_000, 300_000)):
        pieces = [bytearray(piece_bytes) for _ in range(size // piece_bytes)]
        reader = transfer.reader(into=DestinationBuffers([memoryview(piece) for piece in pieces]))
        assert receive(reader, transfer.frames(), in_parts=in_parts) == b"", "it is there already"
        assert b"".join(pieces) == transfer.data
        assert reader.assembler.num_bytes == size


def test_units_that_lie_elsewhere_are_followed_where_somebody_wants_to_hear_of_them() -> None:
    transfer = Transfer(unit_bytes=10, first_unit=2, num_units=9, batch=3)
    pieces = [bytearray(10) for _ in range(7)]
    into = DestinationBuffers([memoryview(piece) for piece in pieces], reports_progress=True)
    reader = transfer.reader(into=into)
    told = [reader.read(frame) for frame in transfer.frames()]
    assert [(one.first_unit, one.num_units, one.data.nbytes) for one in told if one] == [
        (2, 3, 0),
        (5, 3, 0),
        (8, 1, 0),
    ]
    assert b"".join(pieces) == transfer.data


def test_units_that_lie_elsewhere_unheard_of_may_not_end_early() -> None:
    """Whoever waits for the end alone believes that all of them are there."""
    transfer = Transfer(unit_bytes=10, first_unit=0, num_units=4, batch=4)
    writer = FrameWriter(IDENTITY, unit_bytes=10, first_unit=0)
    early = writer.commit(Commit(4, 16, finish_reason=FinishReason.STOP)).to_bytes()
    assert transfer.reader().read(early) is None, "an answer may end with its first token"
    with pytest.raises(CorruptTransferError, match="all units are due") as refused:
        transfer.reader(into=DestinationBuffers([memoryview(bytearray(40))])).read(early)
    assert refused.value.refusal is Refusal.COMMIT


def test_no_memory_is_given_for_a_payload_that_is_not_due() -> None:
    transfer = Transfer(unit_bytes=8, first_unit=0, num_units=4, batch=4)
    head = memoryview(transfer.frames()[0])[:HEADER_BYTES]
    for num_bytes in (0, 33, MAX_PAYLOAD_BYTES, MAX_PAYLOAD_BYTES + 1, 1 << 40):
        with pytest.raises(CorruptTransferError):
            transfer.reader().begin(head, num_bytes)
