"""KV in a device's memory arrives without a copy over the host, or staged, with one digest."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worker.transfer.device import Arena, DeviceTransport, Fabric
from worker.transfer.rows import IDENTITY, KEY, UNIT, shared

from vlm_worker.errors import CorruptTransferError, GoneError, Refusal
from vlm_worker.transfer.consumer import checked_units
from vlm_worker.transfer.producer import Producer
from vlm_worker.transfer.transport import ByteStream, Transport
from vlm_worker.wire.buffers import DestinationBuffers, LiveRegions
from vlm_worker.wire.frame_reader import FrameReader, View
from vlm_worker.wire.frames import Commit, join_frames

NUM_UNITS = 3
DATA = secrets.token_bytes(UNIT * NUM_UNITS)


class Loans:
    """Loans of units; the device overwrites what is not lent."""

    def __init__(self, error: GoneError | None = None) -> None:
        self.lent: list[tuple[int, int]] = []
        self.num_returned = 0
        self.error = error

    async def lend(self, first_unit: int, end_unit: int) -> Callable[[], None]:
        if self.error is not None:
            raise self.error
        self.lent.append((first_unit, end_unit))
        return self._return

    def _return(self) -> None:
        self.num_returned += 1


class Devices:
    """A producer and a consumer, each with memory of its own device."""

    def __init__(
        self,
        ours: Transport,
        theirs: Transport,
        *,
        loans: Loans | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.source, self.target = Arena(DATA), Arena(bytes(len(DATA)))
        self.ours, self.theirs = ours, theirs

        def export(first: int, count: int, _: memoryview) -> LiveRegions:
            return LiveRegions(self.source.regions(first * UNIT, count * UNIT), check)

        self.producer = Producer(
            IDENTITY,
            unit_bytes=UNIT,
            max_units=NUM_UNITS,
            export=export,
            lend=None if loans is None else loans.lend,
        )
        self.producer.finish(Commit(NUM_UNITS, 4 * NUM_UNITS, 5))

    async def fetch(self) -> bytes:
        """What the consumer's device has after the transfer."""
        reader = FrameReader(
            IDENTITY,
            unit_bytes=UNIT,
            first_unit=0,
            end_unit=NUM_UNITS,
            open_memory=lambda _, opening, size: self.theirs.view(opening, size),
            into=DestinationBuffers(self.target.regions(0, len(DATA)), reports_progress=True),
        )
        frames = join_frames(
            self.producer.frame_batches(
                KEY, first_unit=0, transport=self.ours, invitation=self.theirs.invitation()
            )
        )
        units = checked_units(frames, reader, peer="peer", no_progress_seconds=10.0)
        async with aclosing(units) as received:
            num_units = sum([some.num_units async for some in received])
        assert (num_units, reader.commit) == (NUM_UNITS, Commit(NUM_UNITS, 4 * NUM_UNITS, 5))
        return self.target.bytes_of(self.target.regions(0, len(DATA)).ranges)


def fabric_pair(capacity_bytes: int = len(DATA)) -> tuple[DeviceTransport, DeviceTransport]:
    fabric = Fabric()
    ours, theirs = (DeviceTransport(fabric, capacity_bytes=capacity_bytes) for _ in range(2))
    return ours, theirs


async def test_a_transport_for_device_memory_copies_nothing_over_the_host() -> None:
    loans = Loans()
    devices = Devices(*fabric_pair(), loans=loans)
    assert await devices.fetch() == DATA
    assert (devices.source.num_copies, devices.target.num_copies) == (0, 0)
    assert loans.lent == [(0, NUM_UNITS)]


@pytest.mark.parametrize("name", ["stream", "shared-memory", "no capacity", "no loan"])
async def test_the_same_bytes_arrive_staged_over_the_host(name: str, directory: Path) -> None:
    pairs: dict[str, Callable[[], tuple[Transport, Transport]]] = {
        "stream": lambda: (ByteStream(), ByteStream()),
        "shared-memory": lambda: (shared(directory), shared(directory)),
        "no capacity": lambda: fabric_pair(0),
        "no loan": fabric_pair,
    }
    loans = None if name == "no loan" else Loans()
    devices = Devices(*pairs[name](), loans=loans)
    assert await devices.fetch() == DATA
    assert devices.source.num_copies > 0
    assert loans is None or not loans.lent
    devices.producer.close()
    for transport in (devices.ours, devices.theirs):
        transport.close()


@pytest.mark.parametrize("is_confirmed", [True, False])
async def test_lent_memory_is_held_until_the_reader_ends_or_its_quarantine_does(
    *, is_confirmed: bool
) -> None:
    loans = Loans()
    devices = Devices(*fabric_pair(), loans=loans)
    await devices.fetch()
    devices.producer.fail(GoneError("the lease expired"))  # from here on in quarantine
    assert (loans.num_returned, devices.producer.exposed_bytes) == (0, len(DATA))
    if is_confirmed:
        devices.producer.close()
    else:
        devices.producer.abandon()
    assert loans.num_returned == len(loans.lent) == 1
    assert devices.ours.account.abandoned == (0 if is_confirmed else len(DATA))


async def test_a_loan_that_comes_after_the_end_of_the_transfer_is_returned() -> None:
    loans = Loans()
    devices = Devices(*fabric_pair(), loans=loans)
    lend = loans.lend

    async def close_first(first_unit: int, end_unit: int) -> Callable[[], None]:
        devices.producer.close()
        return await lend(first_unit, end_unit)

    devices.producer._lend = close_first
    with pytest.raises(GoneError):
        await devices.fetch()
    assert loans.num_returned == len(loans.lent) == 1


async def test_blocks_that_are_gone_are_not_exposed() -> None:
    with pytest.raises(GoneError, match="preempted"):
        await Devices(*fabric_pair(), loans=Loans(GoneError("preempted"))).fetch()


async def test_blocks_that_are_gone_by_the_end_of_their_digest_are_in_no_frame() -> None:
    def check() -> None:
        raise GoneError("they are another's")

    with pytest.raises(GoneError, match="another's"):
        await Devices(*fabric_pair(), loans=Loans(), check=check).fetch()


async def test_memory_that_changes_under_a_reader_is_refused() -> None:
    devices = Devices(*fabric_pair(), loans=Loans())

    def changed(opening: bytes, num_bytes: int) -> View:
        devices.source.overwrite()
        return devices.theirs.view(opening, num_bytes)

    frames = [
        frame
        async for frame in join_frames(
            devices.producer.frame_batches(
                KEY, first_unit=0, transport=devices.ours, invitation=b"fabric"
            )
        )
    ]
    reader = FrameReader(
        IDENTITY,
        unit_bytes=UNIT,
        first_unit=0,
        end_unit=NUM_UNITS,
        open_memory=lambda _, opening, size: changed(opening, size),
        into=DestinationBuffers(devices.target.regions(0, len(DATA))),
    )
    with pytest.raises(CorruptTransferError) as refused:
        _ = [reader.read(frame) for frame in frames]
    assert refused.value.refusal is Refusal.DIGEST


@pytest.mark.parametrize("num_bytes", [0, len(DATA) - 1, len(DATA) + 1, 1 << 62])
def test_memory_of_another_size_is_refused(num_bytes: int) -> None:
    ours, theirs = fabric_pair(1 << 62)
    exposure = ours.expose(theirs.invitation(), len(DATA))
    assert exposure is not None
    with pytest.raises(CorruptTransferError):
        theirs.view(exposure.opening, num_bytes)


def test_a_device_without_a_digest_has_no_regions() -> None:
    with pytest.raises(ValueError, match="computes no digest"):
        Arena(DATA, has_digest=False).regions(0, len(DATA))


@given(st.integers(-10, len(DATA) + 10), st.integers(-10, len(DATA) + 10))
def test_a_slice_is_of_its_bytes_or_refused(start: int, num_bytes: int) -> None:
    regions = Arena(DATA).regions(0, len(DATA))
    if start < 0 or num_bytes < 0 or start + num_bytes > len(DATA):
        with pytest.raises(ValueError, match="not within"):
            regions.slice(start, num_bytes)
        return
    found = regions.slice(start, num_bytes)
    assert found.num_bytes == num_bytes
    assert Arena(DATA).bytes_of(found.ranges) == DATA[start : start + num_bytes]
