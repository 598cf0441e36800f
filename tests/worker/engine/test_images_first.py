"""Steps of an encoder that lends wait for images, and no answer waits without end."""

from __future__ import annotations

from worker.answers import make_image
from worker.engine.by_hand import ByHand, Encoded, Stepped
from worker.engine.talk import text

from vlm_worker.engine.state import MAX_YIELD_SECONDS

IMAGES = [make_image(number, num_tokens=5) for number in range(1, 6)]


def lending(**changes: object) -> ByHand:
    """One image per encoder call, so that five images take five turns."""
    return ByHand(images_first=True, max_encode_tokens=5, max_encode_tokens_decoding=1, **changes)


def kinds(engine: ByHand) -> list[type]:
    return [type(call) for call in engine.calls]


def test_no_step_runs_while_images_are_left() -> None:
    engine = lending()
    engine.submit(text("t"))
    engine.turn()
    assert kinds(engine) == [Stepped]
    engine.encode("i", IMAGES)
    while engine.turn():
        pass
    assert kinds(engine)[1:6] == [Encoded] * 5
    assert set(kinds(engine)[6:]) == {Stepped}


def test_without_lending_a_step_runs_after_each_encoder_call() -> None:
    engine = ByHand(max_encode_tokens=5)
    engine.submit(text("t"))
    engine.encode("i", IMAGES)
    for _ in range(3):
        engine.turn()
    assert kinds(engine) == [Encoded, Stepped] * 3


def test_a_stream_of_images_delays_a_token_by_a_bounded_time() -> None:
    engine = lending()
    engine.submit(text("t", max_tokens=2))
    number = 0
    while len(engine.tokens("t")) < 2:
        engine.encode(f"i{number}", [make_image(100 + number + n, num_tokens=5) for n in range(2)])
        number += 2
        engine.turn()
        engine.now += MAX_YIELD_SECONDS / 4
        assert engine.now <= 3 * MAX_YIELD_SECONDS
    assert kinds(engine).count(Stepped) == 2


def test_lent_answers_are_those_of_a_decode_worker() -> None:
    lent, own = lending(), ByHand()
    for engine in (lent, own):
        for name in "abc":
            engine.submit(text(name, length=6 + ord(name) % 3))
        engine.turn()
        engine.encode("i", IMAGES)
        while engine.turn():
            pass
    assert [lent.tokens(name) for name in "abc"] == [own.tokens(name) for name in "abc"]
    assert all(len(own.tokens(name)) == 6 for name in "abc")


def test_queued_work_counts_images_alone_and_prompts_apart() -> None:
    found = {}
    for name, engine in {"lent": lending(), "own": ByHand(max_encode_tokens=5)}.items():
        engine.state.sequences.work.observe(10, 1.0)
        engine.submit(text("t"))
        engine.encode("i", IMAGES[:2])
        found[name] = engine.state.snapshot()
    lent, own = found["lent"], found["own"]
    assert lent.num_unencoded_images == own.num_unencoded_images == 2
    assert lent.lent_queued_seconds > 0 == own.lent_queued_seconds
    total = lent.work_queued_seconds + lent.lent_queued_seconds
    assert total == own.work_queued_seconds > lent.work_queued_seconds
