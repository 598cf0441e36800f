"""Images of a conversation stay in the encoder cache of an engine, in memory and on the disk."""

from __future__ import annotations

from typing import Any

import pytest
from worker.answers import make_image
from worker.engine.by_hand import ByHand, Encoded
from worker.engine.disk_tier import SIZE, Tier
from worker.engine.encode_helpers import events, key, prepared_image

from vlm_worker.core.embedding_file import HEAD_BYTES
from vlm_worker.engine.events import EventStream, ItemReady
from vlm_worker.types import RequestKey

MINE = make_image(1, num_tokens=5)
OTHERS = [make_image(10 + number, num_tokens=5) for number in range(8)]


def ask(engine: ByHand, name: str, image: Any, *, session: bool = False) -> None:
    """Encode an image for a peer that takes it at once."""
    stream: EventStream[Any] = EventStream(RequestKey(name, 0))
    requests = engine.state.encode_requests
    requests.encode(stream.key, (image,), stream, pins_session=session)
    while engine.turn():
        pass
    requests.release(stream.key, 0)
    while engine.turn():
        pass
    engine.state.check_idle()


def num_encoded(engine: ByHand) -> int:
    return sum(isinstance(call, Encoded) for call in engine.calls)


def conversation(engine: ByHand, *, session: bool) -> int:
    """Calls of the encoder for the second turn, after many images of others."""
    ask(engine, "first turn", MINE, session=session)
    for number, other in enumerate(OTHERS):
        engine.now += 1
        ask(engine, f"other {number}", other)
    before = num_encoded(engine)
    ask(engine, "second turn", MINE, session=session)
    return num_encoded(engine) - before


def small(**changes: Any) -> ByHand:
    """Memory for four images; two of them may have session pins."""
    return ByHand(embedding_cache_bytes=4 * SIZE, max_image_tokens=5, **changes)


def test_the_image_of_a_conversation_is_not_encoded_again() -> None:
    assert conversation(small(session_pin_seconds=60), session=True) == 0
    assert conversation(small(session_pin_seconds=60), session=False) == 1
    assert conversation(small(), session=True) == 1, "off by default"


def test_without_the_setting_no_call_changes_anything() -> None:
    off, asked = small(), small()
    conversation(off, session=False)
    conversation(asked, session=True)
    assert asked.calls == off.calls
    assert asked.state.snapshot() == off.state.snapshot()
    assert asked.state.snapshot().session_pins is None


def test_pins_of_many_conversations_leave_half_of_the_bytes_to_others() -> None:
    engine = small(session_pin_seconds=60)
    for number, image in enumerate(OTHERS):
        ask(engine, f"s {number}", image, session=True)
    pins = engine.state.snapshot().session_pins
    assert pins is not None
    assert pins.entries == {"memory": 2, "disk": 0}
    assert pins.bytes["memory"] == 2 * SIZE
    assert pins.dropped["bound"] == len(OTHERS) - 2
    engine.now += 60
    ask(engine, "last", MINE, session=True)
    pins = engine.state.snapshot().session_pins
    assert pins is not None
    assert (pins.entries["memory"], pins.dropped["expired"]) == (1, 2)


def test_a_pin_that_is_longer_than_the_ttl_is_refused_at_start() -> None:
    with pytest.raises(ValueError, match="--session-pin-seconds"):
        small(session_pin_seconds=60, embedding_ttl_seconds=59.0)


async def disk_after_pressure(one: Tier, *, session: bool) -> bool:
    """Whether an image is found after its eviction to a disk that others fill."""
    image = prepared_image(1)
    (ready,) = await events(one.engine.encode(key("first"), [image], pins_session=session))
    assert isinstance(ready, ItemReady)
    await one.engine.cancel(key("first"))
    held = [prepared_image(2), prepared_image(3)]
    await events(one.engine.encode(key("held"), held))  # they need all of the memory
    await one.until(lambda: one.disk.writes == 1)
    await one.engine.cancel(key("held"))
    for number in range(4, 9):
        await one.encode(prepared_image(number))
        await one.until(lambda: one.disk.writes == number - 2)  # noqa: B023  awaited here
    return (await one.encode(image, "second")).cache_hit


@pytest.mark.parametrize("session", [True, False])
async def test_the_pin_goes_with_the_image_to_the_disk(tier: Any, session: bool) -> None:
    """The disk holds three files of up to HEAD bytes more; two others are newer."""
    one: Tier = tier(
        session_pin_seconds=600,
        embedding_cache_bytes=2 * SIZE,
        embedding_disk_bytes=3 * (SIZE + HEAD_BYTES),
    )
    assert await disk_after_pressure(one, session=session) is session
    pins = one.engine.stats().session_pins
    assert pins is not None
    assert pins.dropped["evicted"] == session
    await one.engine.stop()


async def test_a_pin_is_not_lost_while_the_file_is_written(tier: Any) -> None:
    """The image leaves memory twice: without a pin, and with one while its file is written."""
    one: Tier = tier(
        session_pin_seconds=600,
        embedding_cache_bytes=2 * SIZE,
        embedding_disk_bytes=3 * (SIZE + HEAD_BYTES),
    )
    one.directory.gate.clear()
    for number in range(1, 4):
        await one.encode(prepared_image(number))
    stream = one.engine.encode(key("turn"), [prepared_image(1)], pins_session=True)
    (ready,) = await events(stream)
    assert isinstance(ready, ItemReady)
    assert not ready.cache_hit, "the image did not leave memory"
    await one.engine.cancel(key("turn"))
    held = [prepared_image(4), prepared_image(5)]
    await events(one.engine.encode(key("held"), held))  # they need all of the memory
    assert one.disk.dropped_writes == 1, "the file was not being written"
    pins = one.engine.stats().session_pins
    assert pins is not None
    assert pins.entries == {"memory": 0, "disk": 1}
    one.directory.gate.set()
    await one.until(lambda: one.disk.writes == 3)
    await one.engine.cancel(key("held"))
    for number in range(6, 11):
        await one.encode(prepared_image(number))
        await one.until(lambda: one.disk.writes == number - 2)  # noqa: B023  awaited here
    assert (await one.encode(prepared_image(1), "second")).cache_hit
    await one.engine.stop()


async def test_an_idle_engine_counts_no_pin_that_has_ended(tier: Any) -> None:
    one: Tier = tier(
        session_pin_seconds=1,
        embedding_cache_bytes=2 * SIZE,
        embedding_disk_bytes=4 * (SIZE + HEAD_BYTES),
    )
    for number in range(1, 4):
        stream = one.engine.encode(key("a"), [prepared_image(number)], pins_session=True)
        assert isinstance((await events(stream))[0], ItemReady)
        await one.engine.cancel(key("a"))
    await one.until(lambda: one.disk.writes >= 1)

    def counts() -> tuple[int, ...]:
        pins = one.engine.stats().session_pins
        assert pins is not None
        return *pins.entries.values(), *pins.bytes.values()

    await one.until(lambda: counts() == (0, 0, 0, 0))
    pins = one.engine.stats().session_pins
    assert pins is not None
    assert pins.dropped["expired"] > 0
    await one.engine.stop()
