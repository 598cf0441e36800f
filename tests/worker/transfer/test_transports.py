"""Every way for bytes keeps the same promises; a way that cannot be had here is skipped, and said.

Two instances of a transport stand for two workers.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

import pytest

from vlm_kernels.cpu import native
from vlm_worker.errors import CorruptTransferError, GoneError
from vlm_worker.serve.worker import make_transport
from vlm_worker.settings import WorkerSettings, parse
from vlm_worker.transfer import nixl
from vlm_worker.transfer.consumer import Pull, checked_units
from vlm_worker.transfer.producer import Producer
from vlm_worker.transfer.shared_memory import SharedMemory
from vlm_worker.transfer.transport import ByteStream, Exposure, Transport
from vlm_worker.types import RequestKey
from vlm_worker.wire.buffers import HostRegions, Regions, host_views
from vlm_worker.wire.frame_reader import FrameReader
from vlm_worker.wire.frames import Commit, TransferId, join_frames

KEY = RequestKey("r-1", 1)
IDENTITY = TransferId(KEY, "t-1", b"b" * 16, b"f" * 16, "pod")
UNIT = 300_000
NUM_UNITS = 9
DATA = secrets.token_bytes(UNIT * NUM_UNITS)
CAPACITY = 2 * len(DATA)
NOTHING = memoryview(b"")

Make = Callable[[], Transport]


@pytest.fixture(params=["stream", "shared-memory", "mapped", "nixl"])
def make(request: pytest.FixtureRequest, directory: Path) -> Make:
    if request.param == "nixl":
        try:
            nixl.nixl_api()
        except ImportError:
            pytest.skip("NIXL is not installed: pip install triptych[nixl]")
    makers: dict[str, Make] = {
        "stream": ByteStream,
        "shared-memory": lambda: shared(directory),
        "mapped": lambda: shared(directory, native_library=native.path()),
        "nixl": lambda: nixl.Nixl(capacity_bytes=CAPACITY),
    }
    return makers[request.param]


def shared(directory: Path, *, native_library: str | None = None) -> SharedMemory:
    return SharedMemory(
        directory, capacity_bytes=CAPACITY, leftover_seconds=60.0, native_library=native_library
    )


class ProducerSide:
    """A transfer of DATA, or of others as long; exported into a transport's buffer, or not."""

    def __init__(
        self, transport: Transport, data: bytes = DATA, *, uses_buffer: bool = False
    ) -> None:
        self.transport = transport
        self.data = data
        self.uses_buffer = uses_buffer
        self.producer = Producer(
            IDENTITY, unit_bytes=UNIT, max_units=NUM_UNITS, export=self._export
        )

    def _export(self, first: int, count: int, buffer: memoryview) -> memoryview:
        units = memoryview(self.data)[first * UNIT : (first + count) * UNIT]
        if not self.uses_buffer:
            return units
        buffer[:] = units
        return buffer

    def pull(self, consumer: Transport, *, first_unit: int = 0) -> Pull:
        reader = FrameReader(
            IDENTITY,
            unit_bytes=UNIT,
            first_unit=first_unit,
            end_unit=NUM_UNITS,
            open_memory=lambda _, opening, size: consumer.view(opening, size),
        )
        frames = join_frames(
            self.producer.frame_batches(
                KEY,
                first_unit=first_unit,
                transport=self.transport,
                invitation=consumer.invitation(),
            )
        )
        return Pull(
            checked_units(frames, reader, peer="peer", no_progress_seconds=10.0),
            reader,
            peer="peer",
        )


async def received(pull: Pull) -> bytes:
    data = bytearray()
    async with aclosing(pull.units()) as stream:
        async for units in stream:
            data += units.data
    return bytes(data)


# ---- promises of all ---------------------------------------------------------------------------


@pytest.mark.parametrize("first_unit", [0, 1, NUM_UNITS])
async def test_sent_units_arrive_and_everything_is_freed(make: Make, first_unit: int) -> None:
    ours, theirs = make(), make()
    producer = ProducerSide(ours)
    producer.producer.finish(Commit(NUM_UNITS, 4 * NUM_UNITS, 5))
    assert await received(producer.pull(theirs, first_unit=first_unit)) == DATA[first_unit * UNIT :]
    producer.producer.close()  # the consumer's release
    assert (ours.account.used, ours.account.num_exposed) == (0, 0)
    for transport in (ours, theirs):
        transport.close()


@pytest.mark.parametrize("uses_buffer", [False, True])
async def test_transfers_through_memory_that_was_used_before_arrive_as_well(
    make: Make, uses_buffer: bool
) -> None:
    ours, theirs = make(), make()
    for first_unit in (1, 1, 0, 3):
        producer = ProducerSide(ours, secrets.token_bytes(len(DATA)), uses_buffer=uses_buffer)
        producer.producer.finish(Commit(NUM_UNITS, 4 * NUM_UNITS, 5))
        pull = producer.pull(theirs, first_unit=first_unit)
        assert await received(pull) == producer.data[first_unit * UNIT :]
        producer.producer.close()
    for transport in (ours, theirs):
        transport.close()


async def test_units_are_read_while_later_ones_are_made(make: Make) -> None:
    ours, theirs = make(), make()
    producer = ProducerSide(ours)
    pull = producer.pull(theirs)
    async with aclosing(pull.units()) as stream:
        for number in range(NUM_UNITS):
            producer.producer.advance(number + 1)
            units = await anext(stream)
            assert (units.first_unit, units.num_units) == (number, 1)
            assert units.data == DATA[number * UNIT : (number + 1) * UNIT]
        producer.producer.finish(Commit(NUM_UNITS, 4 * NUM_UNITS, 5))
        assert await anext(stream, None) is None
    producer.producer.close()


async def test_a_consumer_that_closes_its_stream_frees_what_was_exposed_to_it(make: Make) -> None:
    ours, theirs = make(), make()
    producer = ProducerSide(ours)
    producer.producer.advance(2)
    pull = producer.pull(theirs)
    async with aclosing(pull.units()) as stream:
        await anext(stream)
        assert bool(producer.producer.exposed_bytes) == bool(theirs.invitation())
    assert producer.producer.exposed_bytes == 0
    assert producer.producer.num_readers == 0
    assert ours.account.used == 0


async def test_what_a_failed_transfer_exposed_stays_until_its_reader_is_done(make: Make) -> None:
    ours, theirs = make(), make()
    producer = ProducerSide(ours)
    producer.producer.advance(1)
    pull = producer.pull(theirs)
    async with aclosing(pull.units()) as stream:
        await anext(stream)
        producer.producer.fail(GoneError("given up"))
        with pytest.raises(GoneError):
            await anext(stream)
    exposed = bool(theirs.invitation())
    assert bool(producer.producer.exposed_bytes) == exposed, "nobody has said that he stopped"
    producer.producer.abandon()
    assert (ours.account.used, bool(ours.account.abandoned)) == (0, exposed)


async def test_without_room_all_bytes_travel_in_the_frames(make: Make) -> None:
    ours, theirs = make(), make()
    invitation = theirs.invitation()
    others: list[Exposure | None] = [ours.expose(invitation, len(DATA)) for _ in range(3)]
    assert others[2] is None
    producer = ProducerSide(ours)
    producer.producer.finish(Commit(NUM_UNITS, 4 * NUM_UNITS, 5))
    assert await received(producer.pull(theirs)) == DATA
    assert producer.producer.exposed_bytes == 0
    for other in others:
        if other is not None:
            other.close()


async def test_a_consumer_of_another_kind_is_served_in_the_frames(make: Make) -> None:
    producer = ProducerSide(make())
    producer.producer.finish(Commit(NUM_UNITS, 4 * NUM_UNITS, 5))
    assert await received(producer.pull(ByteStream())) == DATA


async def test_a_changed_byte_in_exposed_memory_is_caught(make: Make) -> None:
    ours, theirs = make(), make()
    exposure = ours.expose(theirs.invitation(), len(DATA))
    if exposure is None:
        return  # bytes of a stream: test_integrity changes those
    producer = ProducerSide(Tampering(ours))
    exposure.close()
    producer.producer.finish(Commit(NUM_UNITS, 4 * NUM_UNITS, 5))
    with pytest.raises(CorruptTransferError, match="digest"):
        await received(producer.pull(theirs))
    producer.producer.close()


async def test_what_an_earlier_transfer_left_is_never_taken_for_the_next(make: Make) -> None:
    ours, theirs = make(), make()
    if ours.expose(theirs.invitation(), 1) is None:
        return
    for transport, data in ((ours, DATA), (Tampering(ours, change=lambda _: b""), DATA[::-1])):
        producer = ProducerSide(transport, data)
        producer.producer.finish(Commit(NUM_UNITS, 4 * NUM_UNITS, 5))
        pull = producer.pull(theirs)
        if transport is ours:
            assert await received(pull) == DATA
        else:
            with pytest.raises(CorruptTransferError, match="digest"):
                await received(pull)
        producer.producer.close()


def with_one_bit_changed(data: memoryview) -> bytes:
    changed = bytearray(data)
    changed[len(changed) // 2] ^= 1
    return bytes(changed)


class Tampering(ByteStream):
    """A transport whose exposed bytes differ from those that the digest was made of."""

    def __init__(
        self, inner: Transport, change: Callable[[memoryview], bytes] = with_one_bit_changed
    ) -> None:
        self.change = change
        self.inner = inner
        self.name = inner.name
        self.accepts = inner.accepts
        self.account = inner.account

    def expose(self, invitation: bytes, num_bytes: int) -> Exposure | None:  # type: ignore[override]
        exposure = self.inner.expose(invitation, num_bytes)
        assert exposure is not None
        place = exposure.write

        def tampered(position: int, source: Regions) -> memoryview:
            [data] = host_views(source)
            return place(position, HostRegions([memoryview(self.change(data))]))

        exposure.write = tampered  # type: ignore[method-assign]
        exposure.buffer = lambda *_: None  # type: ignore[method-assign]  # where nothing is placed
        return exposure


@pytest.mark.parametrize(
    "opening", [b"", b"x", b"y" * 16, b"z" * 600, b"../../../etc/pw", b"\0" * 16]
)
def test_an_opening_that_leads_nowhere_is_corrupt(make: Make, opening: bytes) -> None:
    transport = make()
    with pytest.raises(CorruptTransferError):
        transport.view(opening, 100)


# ---- the settings ------------------------------------------------------------------------------


def settings_of(*flags: str) -> WorkerSettings:
    found = parse(["decode", "--model=m", "--served-name=s", *flags], {})
    assert isinstance(found, WorkerSettings)
    return found


def test_bytes_travel_in_the_stream_unless_told_otherwise(directory: Path) -> None:
    assert isinstance(make_transport(settings_of()), ByteStream)
    flags = ("--transport=shared-memory", f"--shared-memory-dir={directory}")
    assert isinstance(make_transport(settings_of(*flags)), SharedMemory)


def test_a_transport_that_cannot_work_names_the_flag_and_the_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("--transport=shared-memory", f"--shared-memory-dir={tmp_path}/none")
    with pytest.raises(ValueError, match=r"--shared-memory-dir=.*/none: No such file"):
        make_transport(settings_of(*flags))
    monkeypatch.setattr(nixl, "_MODULES", ("no_such_module",))
    with pytest.raises(ValueError, match=r"--transport=nixl needs NIXL.*triptych\[nixl\]"):
        make_transport(settings_of("--transport=nixl"))
