"""The laws of attempts on the event loop (`roles.attempt_registry`): calls, leases, and the end."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_worker.core.leases import Lease, LeaseKind, LeaseTable
from vlm_worker.errors import (
    CancelledError,
    CorruptTransferError,
    DuplicateError,
    GoneError,
    IncompatibleError,
    InvalidRequestError,
    OverloadedError,
    Refusal,
)
from vlm_worker.roles.attempt_registry import (
    MAX_REMEMBERED,
    REMEMBER_SECONDS,
    AttemptHandle,
    AttemptRegistry,
    CallHistory,
    EndReason,
    Incarnation,
)
from vlm_worker.transfer.producer import Producer
from vlm_worker.transfer.transport import ByteStream, Exposure, ExposureAccount
from vlm_worker.types import RequestKey
from vlm_worker.wire.buffers import Regions
from vlm_worker.wire.frames import Commit, join_frames
from vlm_worker.wire.messages import CancelOutcome, FetchCall

INCARNATION = Incarnation(b"b" * 16, "pod")
KEY = RequestKey("r-1", 1)
LAYOUT = b"f" * 16
CONTENT = b"c" * 32


class Table:
    """AttemptRegistry under a clock that the test moves, and an engine that records its calls."""

    def __init__(self) -> None:
        self.now = 0.0
        self.freed: list[str] = []
        self.ended: list[RequestKey] = []
        self.attempts = AttemptRegistry(
            incarnation=INCARNATION,
            free=self._free,
            end_in_engine=self._end,
            clock=lambda: self.now,
            leases=LeaseTable(),
        )

    def _free(self, lease: Lease) -> None:
        self.freed.append(lease.id)

    async def _end(self, key: RequestKey) -> CancelOutcome:
        self.ended.append(key)
        await asyncio.sleep(0)
        return CancelOutcome.CANCELLED_BEFORE_ADVERTISED

    def handle(self, key: RequestKey = KEY) -> AttemptHandle:
        return self.attempts.open(key)

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
        self.handle(key).offer(name, outgoing)
        return outgoing

    def find(self, name: str = "t", key: RequestKey = KEY, layout: bytes = LAYOUT) -> Producer:
        return self.attempts.find(
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
        table.attempts.find(FetchCall("t", b"x" * 16, LAYOUT, KEY), fingerprint=LAYOUT)


def test_a_consumer_in_this_process_gets_what_it_is_made_from_alone() -> None:
    table = Table()
    outgoing = table.offer()
    assert table.attempts.local("t", KEY.request_id, content=CONTENT) is outgoing
    with pytest.raises(CorruptTransferError, match="other tokens") as refused:
        table.attempts.local("t", KEY.request_id, content=b"d" * 32)
    assert refused.value.refusal is Refusal.IDENTITY
    with pytest.raises(GoneError):
        table.attempts.local("t", "r-2", content=CONTENT)


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
    table.attempts.release(b"x" * 16, "t")
    assert table.freed == []
    for _ in range(3):
        table.attempts.release(INCARNATION.boot_id, "t")
    assert table.freed == ["t"]
    with pytest.raises(GoneError):
        table.find()


def test_a_lease_that_is_not_renewed_is_freed_by_the_sweep() -> None:
    table = Table()
    table.offer("kept")
    table.offer("left")
    for table.now in range(0, 30, 2):
        table.attempts.renew(INCARNATION.boot_id, ["kept"])
        table.attempts.sweep()
    assert table.freed == ["left"]
    assert table.attempts.renew(INCARNATION.boot_id, ["kept", "left"]) == ["left"]
    assert table.attempts.renew(b"x" * 16, ["kept"]) == ["kept"]


def test_what_its_maker_keeps_does_not_expire_and_then_has_a_whole_lease() -> None:
    table = Table()
    table.offer()
    with table.attempts.renew_while(["t"]):
        for table.now in range(0, 100, 5):
            table.attempts.sweep()
    assert table.freed == []
    table.now += 9
    table.attempts.sweep()
    assert table.freed == []
    table.now += 2
    table.attempts.sweep()
    assert table.freed == ["t"]


def test_what_two_keep_is_kept_until_both_are_done() -> None:
    """The encoder that makes it, and the prompt in the same process that waits for its turn."""
    table = Table()
    table.offer()
    with table.attempts.renew_while(["t"]):
        with table.attempts.renew_while(["t"]):
            pass
        for _ in range(3):
            table.now += 8.0
            table.attempts.sweep()
        assert table.freed == []
        assert table.attempts.outstanding["leases renewed by their maker"] == 1
    assert table.attempts.outstanding["leases renewed by their maker"] == 0


def test_what_is_claimed_is_not_freed_and_not_claimed_again() -> None:
    table = Table()
    table.handle().offer("reservation", None)
    assert not table.handle(RequestKey("r-2", 1)).take_over("reservation")
    assert table.handle().take_over("reservation")
    assert not table.handle().take_over("reservation")
    table.now = 100.0
    table.attempts.sweep()
    assert table.freed == []


def test_an_expired_reservation_cannot_be_claimed() -> None:
    table = Table()
    table.handle().offer("reservation", None)
    table.now = 11.0
    assert not table.handle().take_over("reservation")


async def test_a_cancel_during_a_read_is_quarantined_until_the_read_ends() -> None:
    table = Table()
    outgoing = table.offer()
    outgoing.advance(1)
    async with aclosing(join_frames(outgoing.frame_batches(KEY, first_unit=0))) as frames:
        await anext(frames)
        assert table.handle().stop_readers(CancelledError("stop"))
        table.attempts.sweep()
        assert len(table.attempts.leases) == 1
        with pytest.raises(CancelledError):
            await anext(frames)
    table.attempts.sweep()
    assert len(table.attempts.leases) == 0
    assert table.freed == [], "the engine has freed it with the request"


async def test_a_lease_does_not_expire_under_a_stream_that_takes_frames() -> None:
    table = Table()
    outgoing = table.offer()
    async with aclosing(join_frames(outgoing.frame_batches(KEY, first_unit=0))) as frames:
        for unit in range(1, 9):
            outgoing.advance(unit)
            await anext(frames)
            table.now += 7
            table.attempts.sweep()
        assert table.freed == [], "56 s without a renewal"
        # a stream that takes nothing any more keeps nothing alive
        table.now += 19
        table.attempts.sweep()
        assert table.freed == ["t"]
        assert table.attempts.leases.num_expired[LeaseKind.HELD] == 1
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

    def write(self, position: int, source: Regions) -> memoryview:
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


@pytest.mark.parametrize("proof", ["release", "take over"])
async def test_exposed_memory_is_free_when_its_reader_is_proven_to_have_stopped(proof: str) -> None:
    table, transport = Table(), Exposing()
    await read_all(table.offer(), transport)
    assert transport.account.used == 64
    if proof == "release":
        table.attempts.release(INCARNATION.boot_id, "t")
    else:
        assert table.handle().take_over("t")
    assert (transport.account.used, transport.account.abandoned) == (0, 0)


@pytest.mark.parametrize("end", ["cancel", "expiry"])
@pytest.mark.parametrize("released", [True, False])
async def test_exposed_memory_of_a_request_that_ended_is_quarantined(
    end: str, released: bool
) -> None:
    table, transport = Table(), Exposing()
    await read_all(table.offer(), transport)
    if end == "cancel":
        assert table.handle().stop_readers(CancelledError("stop"))
    else:
        table.now = 11.0
        table.attempts.sweep()
        assert table.freed == ["t"], "the engine's blocks were copied, and are free"
    for _ in range(5):
        table.now += 10
        table.attempts.sweep()
        assert table.attempts.leases.count(LeaseKind.QUARANTINED) == 1
        assert transport.account.used == 64
    assert table.attempts.renew(INCARNATION.boot_id, ["t"]) == ["t"], "it is not given back to life"
    if released:
        table.attempts.release(INCARNATION.boot_id, "t")
    table.now += 30
    table.attempts.sweep()
    assert len(table.attempts.leases) == 0
    assert (transport.account.used, transport.account.abandoned) == (0, 0 if released else 64)
    assert (transport.account.unhealthy_reason is None) == released, "6 % of the pool are lost"


async def test_a_cancel_without_a_reader_needs_no_quarantine() -> None:
    table = Table()
    outgoing = table.offer()
    assert not table.handle().stop_readers(CancelledError("stop"))
    assert len(table.attempts.leases) == 0
    outgoing.finish(Commit(0, 0))
    with pytest.raises(CancelledError):
        async with asyncio.timeout(60):
            _ = [frame async for frame in join_frames(outgoing.frame_batches(KEY, first_unit=0))]


def test_an_expired_lease_is_told_with_its_id_kind_owner_and_cause(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In the text itself: not every log shows fields."""
    table = Table()
    table.handle().offer("reservation-1", None)
    table.now = 11.0
    table.attempts.sweep()
    (record,) = caplog.records
    for part in ("reservation-1", "reserved", KEY.request_id, "attempt 1", "it was not renewed"):
        assert part in record.getMessage()
    assert "it was not renewed" in record.cause  # type: ignore[attr-defined]


async def test_the_end_stops_readers_then_the_engine_then_the_calls() -> None:
    table, order = Table(), []

    async def call() -> None:
        try:
            with table.attempts.call("Prefill", KEY) as handle:
                begun.set()
                await asyncio.Event().wait()
        except CancelledError as error:
            order.append(("call", str(error), handle.producers))

    begun, calling = asyncio.Event(), asyncio.create_task(call())
    await begun.wait()
    producer = table.offer()
    outcome = await table.attempts.cancel(KEY.request_id, KEY.attempt)
    assert outcome is CancelOutcome.CANCELLED_BEFORE_ADVERTISED
    assert table.ended == [KEY]
    with pytest.raises(CancelledError):
        _ = [frame async for frame in join_frames(producer.frame_batches(KEY, first_unit=0))]
    await calling
    assert order == [("call", "attempt 1 was cancelled by its caller", {})]
    assert table.attempts.by_key == {}
    with pytest.raises(CancelledError), table.attempts.call("Decode", KEY):
        pass


async def test_attempt_0_cancels_all_attempts_of_a_request_and_no_other() -> None:
    table = Table()
    for name, attempt in (("r-1", 1), ("r-1", 2), ("r-2", 1)):
        table.offer(f"{name}-{attempt}", RequestKey(name, attempt))
    await table.attempts.cancel("r-1", 0)
    assert table.ended == [RequestKey("r-1", 1), RequestKey("r-1", 2)]
    assert list(table.attempts.by_key) == [RequestKey("r-2", 1)]
    assert await table.attempts.cancel("r-3", 0) is CancelOutcome.NOT_FOUND


async def test_an_attempt_that_was_given_up_or_refused_as_overloaded_may_call_again() -> None:
    table = Table()
    for _ in range(2):
        with pytest.raises(OverloadedError), table.attempts.call("Reserve", KEY):
            raise OverloadedError("no free KV block", retry_after_seconds=1)
        await table.handle().end(EndReason.GIVEN_UP)
        assert table.attempts.by_key == {}
    with table.attempts.call("Reserve", KEY):
        pass
    with pytest.raises(DuplicateError), table.attempts.call("Reserve", KEY):
        pass


# ---- calls -------------------------------------------------------------------------------------

keys = st.builds(RequestKey, st.sampled_from("abc"), st.integers(1, 3))


@given(st.lists(st.tuples(st.sampled_from(["Prefill", "Decode"]), keys), max_size=30))
def test_only_the_first_call_of_an_attempt_is_new(calls: list[tuple[str, RequestKey]]) -> None:
    history, seen = CallHistory(), set()
    for now, (name, key) in enumerate(calls):
        assert history.begin(name, key, now=float(now)) == ((name, key) not in seen)
        seen.add((name, key))


@given(keys, keys)
def test_a_cancel_is_of_one_attempt(cancelled: RequestKey, other: RequestKey) -> None:
    history = CallHistory()
    history.cancel(cancelled, now=0.0)
    assert history.was_cancelled(other, now=1.0) == (other == cancelled)


def test_a_refused_call_may_come_again() -> None:
    history, key = CallHistory(), RequestKey("a", 1)
    assert history.begin("Reserve", key, now=0.0)
    history.forget("Reserve", key)
    assert history.begin("Reserve", key, now=1.0)


def test_what_is_old_is_forgotten() -> None:
    history, key = CallHistory(), RequestKey("a", 1)
    history.begin("Prefill", key, now=0.0)
    history.cancel(key, now=0.0)
    assert history.was_cancelled(key, now=REMEMBER_SECONDS - 1)
    assert not history.was_cancelled(key, now=REMEMBER_SECONDS)
    assert history.begin("Prefill", key, now=REMEMBER_SECONDS)


def test_the_number_remembered_is_bounded() -> None:
    history = CallHistory()
    for number in range(MAX_REMEMBERED + 10):
        history.cancel(RequestKey(str(number), 1), now=0.0)
    assert len(history) <= MAX_REMEMBERED
    assert history.was_cancelled(RequestKey(str(MAX_REMEMBERED + 9), 1), now=0.0)
