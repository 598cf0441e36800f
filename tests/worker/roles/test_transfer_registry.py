"""What is held for consumers ends by release, by claim, by cancel, or by its lease; never twice."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from vlm_worker.core.leases import Lease, LeaseKind, LeaseTable
from vlm_worker.errors import (
    CancelledError,
    CorruptTransferError,
    GoneError,
    IncompatibleError,
    InvalidRequestError,
    Refusal,
)
from vlm_worker.roles.transfer_registry import Incarnation, TransferRegistry
from vlm_worker.transfer.producer import Producer
from vlm_worker.transfer.transport import ByteStream, Exposure, ExposureAccount
from vlm_worker.types import RequestKey
from vlm_worker.wire.frames import Commit, join_frames
from vlm_worker.wire.messages import FetchCall

INCARNATION = Incarnation(b"b" * 16, "pod")
KEY = RequestKey("r-1", 1)
LAYOUT = b"f" * 16
CONTENT = b"c" * 32


class Table:
    """TransferRegistry under a clock that the test moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.freed: list[str] = []
        self.transfers = TransferRegistry(
            incarnation=INCARNATION, free=self._free, clock=lambda: self.now, leases=LeaseTable()
        )

    def _free(self, lease: Lease) -> None:
        self.freed.append(lease.id)

    def offer(self, name: str = "t", key: RequestKey = KEY) -> Producer:
        def export(first: int, count: int, _: memoryview) -> memoryview:
            return memoryview(bytes(8 * count))

        outgoing = Producer(
            INCARNATION.transfer_id(key, name, LAYOUT, content=CONTENT),
            unit_bytes=8,
            max_units=8,
            export=export,
            clock=lambda: self.now,
        )
        self.transfers.offer(name, key, outgoing)
        return outgoing

    def find(self, name: str = "t", key: RequestKey = KEY, layout: bytes = LAYOUT) -> Producer:
        return self.transfers.find(
            FetchCall(name, INCARNATION.boot_id, layout, key), fingerprint=LAYOUT
        )


def test_it_is_found_by_its_request_alone() -> None:
    table = Table()
    assert table.offer() is table.find()
    with pytest.raises(GoneError):
        table.find(key=RequestKey("r-2", 1))
    with pytest.raises(IncompatibleError):
        table.find(layout=b"g" * 16)
    with pytest.raises(GoneError, match="another incarnation"):
        table.transfers.find(FetchCall("t", b"x" * 16, LAYOUT, KEY), fingerprint=LAYOUT)


def test_a_consumer_in_this_process_gets_what_it_is_made_from_alone() -> None:
    table = Table()
    outgoing = table.offer()
    assert table.transfers.local("t", KEY.request_id, content=CONTENT) is outgoing
    with pytest.raises(CorruptTransferError, match="other tokens") as refused:
        table.transfers.local("t", KEY.request_id, content=b"d" * 32)
    assert refused.value.refusal is Refusal.IDENTITY
    with pytest.raises(GoneError):
        table.transfers.local("t", "r-2", content=CONTENT)


@pytest.mark.parametrize("key", [KEY, RequestKey("r-2", 1)])
def test_the_name_of_another_transfer_is_refused(key: RequestKey) -> None:
    """Nobody would give back what the first one holds."""
    table = Table()
    table.offer()
    with pytest.raises(InvalidRequestError):
        table.offer(key=key)


def test_a_release_frees_once() -> None:
    table = Table()
    table.offer()
    table.transfers.release(b"x" * 16, "t")
    assert table.freed == []
    for _ in range(3):
        table.transfers.release(INCARNATION.boot_id, "t")
    assert table.freed == ["t"]
    with pytest.raises(GoneError):
        table.find()


def test_a_lease_that_is_not_renewed_is_freed_by_the_sweep() -> None:
    table = Table()
    table.offer("kept")
    table.offer("left")
    for table.now in range(0, 30, 2):
        table.transfers.renew(INCARNATION.boot_id, ["kept"])
        table.transfers.sweep()
    assert table.freed == ["left"]
    assert table.transfers.renew(INCARNATION.boot_id, ["kept", "left"]) == ["left"]
    assert table.transfers.renew(b"x" * 16, ["kept"]) == ["kept"]


def test_what_its_maker_keeps_does_not_expire_and_then_has_a_whole_lease() -> None:
    table = Table()
    table.offer()
    with table.transfers.renew_while(["t"]):
        for table.now in range(0, 100, 5):
            table.transfers.sweep()
    assert table.freed == []
    table.now += 9
    table.transfers.sweep()
    assert table.freed == []
    table.now += 2
    table.transfers.sweep()
    assert table.freed == ["t"]


def test_what_two_keep_is_kept_until_both_are_done() -> None:
    """The encoder that makes it, and the prompt in the same process that waits for its turn."""
    table = Table()
    table.offer()
    with table.transfers.renew_while(["t"]):
        with table.transfers.renew_while(["t"]):
            pass
        for _ in range(3):
            table.now += 8.0
            table.transfers.sweep()
        assert table.freed == []
        assert table.transfers.outstanding["leases renewed by their maker"] == 1
    assert table.transfers.outstanding["leases renewed by their maker"] == 0


def test_what_is_claimed_is_not_freed_and_not_claimed_again() -> None:
    table = Table()
    table.transfers.reserve("room", KEY)
    assert not table.transfers.take_over("room", RequestKey("r-2", 1))
    assert table.transfers.take_over("room", KEY)
    assert not table.transfers.take_over("room", KEY)
    table.now = 100.0
    table.transfers.sweep()
    assert table.freed == []


def test_an_expired_reservation_cannot_be_claimed() -> None:
    table = Table()
    table.transfers.reserve("room", KEY)
    table.now = 11.0
    assert not table.transfers.take_over("room", KEY)


async def test_a_cancel_while_somebody_reads_is_quarantined_until_he_stops() -> None:
    table = Table()
    outgoing = table.offer()
    outgoing.advance(1)
    async with aclosing(join_frames(outgoing.frame_batches(KEY, first_unit=0))) as frames:
        await anext(frames)
        assert table.transfers.cancel(KEY, CancelledError("stop"))
        table.transfers.sweep()
        assert len(table.transfers.leases) == 1
        with pytest.raises(CancelledError):
            await anext(frames)
    table.transfers.sweep()
    assert len(table.transfers.leases) == 0
    assert table.freed == [], "the engine has freed it with the request"


async def test_a_lease_does_not_expire_under_a_stream_that_takes_frames() -> None:
    table = Table()
    outgoing = table.offer()
    async with aclosing(join_frames(outgoing.frame_batches(KEY, first_unit=0))) as frames:
        for unit in range(1, 9):
            outgoing.advance(unit)
            await anext(frames)
            table.now += 7
            table.transfers.sweep()
        assert table.freed == [], "56 s without a renewal"
        # a stream that takes nothing any more keeps nothing alive
        table.now += 19
        table.transfers.sweep()
        assert table.freed == ["t"]
        assert table.transfers.leases.num_expired[LeaseKind.HELD] == 1
        with pytest.raises(GoneError, match="expired"):
            await anext(frames)


class Exposing(ByteStream):
    """A transport of which only the books are real."""

    def __init__(self) -> None:
        self.account = ExposureAccount(1000)

    def expose(self, invitation: bytes, num_bytes: int) -> Exposure:  # type: ignore[override]
        return Exposed(self.account, num_bytes)


class Exposed:
    opening = b"here"

    def __init__(self, account: ExposureAccount, num_bytes: int) -> None:
        assert account.take(num_bytes)
        self.account, self.num_bytes = account, num_bytes

    def buffer(self, position: int, num_bytes: int) -> None:
        return None

    def write(self, position: int, data: memoryview) -> memoryview:
        return memoryview(b"")

    def close(self) -> None:
        self.account.release(self.num_bytes)

    def abandon(self) -> None:
        self.account.abandon(self.num_bytes)


async def read_all(outgoing: Producer, transport: Exposing) -> None:
    """As a consumer that has every frame, and may be reading on."""
    outgoing.finish(Commit(8, 32, 5))
    frames = join_frames(outgoing.frame_batches(KEY, first_unit=0, transport=transport))
    assert len([frame async for frame in frames]) == 3, "where, what, and the end"


@pytest.mark.parametrize("proof", ["release", "claim"])
async def test_exposed_memory_is_free_when_its_reader_is_proven_to_have_stopped(proof: str) -> None:
    table, transport = Table(), Exposing()
    await read_all(table.offer(), transport)
    assert transport.account.used == 64
    if proof == "release":
        table.transfers.release(INCARNATION.boot_id, "t")
    else:
        assert table.transfers.take_over("t", KEY)
    assert (transport.account.used, transport.account.abandoned) == (0, 0)


@pytest.mark.parametrize("end", ["cancel", "expiry"])
@pytest.mark.parametrize("released", [True, False])
async def test_exposed_memory_of_a_request_that_ended_is_quarantined(
    end: str, released: bool
) -> None:
    table, transport = Table(), Exposing()
    await read_all(table.offer(), transport)
    if end == "cancel":
        assert table.transfers.cancel(KEY, CancelledError("stop"))
    else:
        table.now = 11.0
        table.transfers.sweep()
        assert table.freed == ["t"], "the engine's blocks were copied, and are free"
    for _ in range(5):
        table.now += 10
        table.transfers.sweep()
        assert table.transfers.leases.count(LeaseKind.QUARANTINED) == 1
        assert transport.account.used == 64
    assert table.transfers.renew(INCARNATION.boot_id, ["t"]) == ["t"], (
        "it is not given back to life"
    )
    if released:
        table.transfers.release(INCARNATION.boot_id, "t")
    table.now += 30
    table.transfers.sweep()
    assert len(table.transfers.leases) == 0
    assert (transport.account.used, transport.account.abandoned) == (0, 0 if released else 64)
    assert (transport.account.unhealthy_reason is None) == released, "6 % of the pool are lost"


async def test_a_cancel_that_nobody_sees_needs_no_quarantine() -> None:
    table = Table()
    outgoing = table.offer()
    assert not table.transfers.cancel(KEY, CancelledError("stop"))
    assert len(table.transfers.leases) == 0
    outgoing.finish(Commit(0, 0))
    with pytest.raises(CancelledError):
        async with asyncio.timeout(60):
            _ = [frame async for frame in join_frames(outgoing.frame_batches(KEY, first_unit=0))]


def test_an_expired_lease_is_told_with_its_id_kind_owner_and_cause(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In the text itself: not every log shows fields."""
    table = Table()
    table.transfers.reserve("room-1", KEY)
    table.now = 11.0
    table.transfers.sweep()
    (record,) = caplog.records
    for part in ("room-1", "reserved", KEY.request_id, "attempt 1", "nobody renewed it"):
        assert part in record.getMessage()
    assert "nobody renewed it" in record.cause  # type: ignore[attr-defined]
