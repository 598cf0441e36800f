"""Encoder and prompts take turns: nobody waits for a batch to fill, for all images, or too long.

turn      encoder call                    step
  1       image 1                       decodes, and the prompt up to image 2
  2       image 2                       decodes, and the prompt up to image 3
"""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st
from worker.answers import answer_alone, make_image
from worker.engine.by_hand import ByHand, Encoded, Stepped

from vlm_worker.engine.events import ItemFailed, ItemReady, NeedItems
from vlm_worker.testing import IMAGE_TOKEN
from vlm_worker.types import (
    BlocksReady,
    FailedEvent,
    ImageItem,
    PreparedImage,
    Request,
    RequestKey,
    SamplingParams,
)

NUM_TOKENS = 5  # of an image


def prepared_image(number: int) -> PreparedImage:
    return make_image(number, num_tokens=NUM_TOKENS)


def prompt(
    name: str, images: list[PreparedImage], *, max_tokens: int = 4, first: int = 1
) -> Request:
    """Text, and the images, each with text after it."""
    token_ids: list[int] = [first, 2]
    items = []
    for image in images:
        place = ImageItem(image.image_key, len(token_ids), image.num_tokens, image.grid_thw)
        items.append(place)
        token_ids += [IMAGE_TOKEN] * image.num_tokens + [3, 4]
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Request(RequestKey(name, 0), tuple(token_ids), len(token_ids), sampling, tuple(items))


def step_reading(engine: ByHand, image: PreparedImage) -> int:
    """The number of the first step that reads an image's rows."""
    steps = [call for call in engine.calls if isinstance(call, Stepped)]
    return next(n for n, step in enumerate(steps) if image.image_key in step.images)


def run_out(engine: ByHand) -> None:
    while engine.turn():
        engine.answer()


# ---- one request with several images ----------------------------------------------------------


def test_prefill_of_an_image_starts_before_the_next_one_is_encoded() -> None:
    engine = ByHand(max_encode_tokens=NUM_TOKENS)
    images = [prepared_image(number) for number in range(3)]
    engine.encode("a", images)
    request = prompt("a", images)
    engine.submit(request, for_peer=True)
    blocks_told: list[int] = []
    for image in images:
        assert engine.turn()
        assert isinstance(engine.calls[-2], Encoded)
        assert engine.calls[-2].images == (image.image_key,)
        assert isinstance(engine.calls[-1], Stepped)
        assert image.image_key in engine.calls[-1].images
        ready = [event for event in engine.told["a"] if isinstance(event, BlocksReady)]
        blocks_told.append(max(event.num_blocks for event in ready))
    # each turn ends with more KV to fetch: 7 of 9, 14 of 16 and all 23 tokens, in blocks of 4
    assert blocks_told == [2, 4, 6]
    run_out(engine)
    engine.state.cancel(request.key)
    engine.state.cancel(RequestKey("a", 0))


def test_a_prompt_fetched_from_elsewhere_starts_with_its_first_image() -> None:
    engine = ByHand()
    images = [prepared_image(number) for number in range(3)]
    request = prompt("a", images)
    engine.submit(request, images)
    engine.turn()
    assert engine.asked["a"] == [0, 1, 2], "all are asked for at once"
    for number, image in enumerate(images):
        engine.asked["a"] = [number]
        engine.answer()
        engine.turn()
        assert step_reading(engine, image) == 1 + number, "after the text before the first"
    run_out(engine)
    assert engine.tokens("a") == answer_alone(request, images)


# ---- several requests ----------------------------------------------------------------------------


def test_a_lone_image_is_encoded_in_the_turn_in_which_it_comes() -> None:
    engine = ByHand()
    engine.encode("a", [prepared_image(0)])
    engine.turn()
    assert [type(event) for event in engine.told["a"]] == [ItemReady]
    engine.state.cancel(RequestKey("a", 0))


def test_images_of_all_waiting_requests_go_in_one_call() -> None:
    engine = ByHand()
    for name in "abc":
        engine.encode(name, [prepared_image(ord(name)), prepared_image(0)])
    engine.turn()
    (call,) = engine.calls
    assert isinstance(call, Encoded)
    assert len(call.images) == 4, "image 0 is there once"
    stats = engine.state.snapshot().encoder_cache
    assert (stats.misses, stats.joins) == (4, 2)
    for name in "abc":
        engine.state.cancel(RequestKey(name, 0))


def test_a_large_call_takes_one_image_of_each_request() -> None:
    engine = ByHand(max_model_len=4096, num_blocks=2000)
    sizes = {"a": [300, 300, 10], "b": [100, 100, 100], "c": [300]}
    for name, tokens in sizes.items():
        images = [
            make_image(ord(name) + number, num_tokens=count) for number, count in enumerate(tokens)
        ]
        engine.encode(name, images)
    while engine.turn():
        pass
    sizes_of_calls = [call.num_tokens for call in engine.calls if isinstance(call, Encoded)]
    # a first one of each; small ones go together until there are enough
    assert sizes_of_calls == [300 + 100 + 300, 300 + 100, 10 + 100]
    for name in sizes:
        assert [event.item for event in engine.told[name]] == list(range(len(sizes[name])))
        engine.state.cancel(RequestKey(name, 0))


def test_a_flood_of_images_does_not_go_before_an_image_of_another_tenant() -> None:
    engine = ByHand(max_encode_tokens=NUM_TOKENS)
    for number in range(10):
        engine.encode(str(number), [prepared_image(number)], tenant=b"flood", weighted_seconds=1.0)
    engine.turn()
    engine.now += 2 * engine.state.sequences.settings.admission.ageing_seconds
    engine.encode("late", [prepared_image(20)], tenant=b"other", weighted_seconds=1.0)
    engine.turn()
    engine.turn()
    assert {name for name in engine.told if engine.told[name]} == {"0", "1", "late"}
    while engine.turn():
        pass


def test_images_of_important_requests_go_first_and_no_request_waits_for_ever() -> None:
    engine = ByHand(max_encode_tokens=NUM_TOKENS)
    for number, priority in enumerate((-1, 0, 1)):
        engine.encode(str(number), [prepared_image(number)], priority=priority)
    engine.turn()
    assert [name for name in "012" if engine.told[name]] == ["2"]
    engine.now += engine.state.sequences.settings.admission.ageing_seconds
    engine.encode("late", [prepared_image(9)], priority=5)
    engine.turn()
    assert [name for name in ("0", "1", "late") if engine.told[name]] == ["0"]
    while engine.turn():
        pass
    for name in ("0", "1", "2", "late"):
        engine.state.cancel(RequestKey(name, 0))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=8), st.integers(5, 20))
def test_a_long_queue_of_images_never_keeps_a_decoding_sequence_from_its_next_token(
    sizes: list[int], budget: int
) -> None:
    engine = ByHand(max_encode_tokens=1000, max_encode_tokens_decoding=budget)
    engine.submit(prompt("talker", [], max_tokens=60))
    engine.turn()
    numbers = itertools.count()
    for name, size in enumerate(sizes):
        engine.encode(str(name), [prepared_image(next(numbers)) for _ in range(size)])
    before = len(engine.calls)
    while len(engine.state.encode_requests.queue):
        num_told = len(engine.tokens("talker"))
        engine.turn()
        assert len(engine.tokens("talker")) == num_told + 1, "an encoder call took its turn"
    calls = engine.calls[before:]
    encoded = [call for call in calls if isinstance(call, Encoded)]
    assert [type(call) for call in calls] == [Encoded, Stepped] * len(encoded)
    assert all(call.num_tokens <= budget for call in encoded)
    assert sum(call.num_tokens for call in encoded) == sum(sizes) * NUM_TOKENS
    most = budget // NUM_TOKENS
    assert len(encoded) == -(-sum(sizes) // most), "a call was not filled"
    for name in range(len(sizes)):
        engine.state.cancel(RequestKey(str(name), 0))


def test_without_decoding_requests_the_encoder_uses_its_whole_budget() -> None:
    engine = ByHand(max_encode_tokens=30, max_encode_tokens_decoding=5)
    engine.encode("a", [prepared_image(number) for number in range(6)])
    engine.turn()
    (call,) = engine.calls
    assert isinstance(call, Encoded)
    assert call.num_tokens == 30
    engine.state.cancel(RequestKey("a", 0))


# ---- failures ------------------------------------------------------------------------------------


@given(
    st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=4), min_size=1, max_size=5),
    st.sets(st.integers(0, 6)),
    st.sets(st.integers(0, 6)),
    st.sets(st.integers(0, 6)),
    st.integers(5, 30),
)
def test_each_image_has_its_own_verdict_and_no_failure_is_cached(
    calls: list[list[int]], bad: set[int], crashing: set[int], lost: set[int], budget: int
) -> None:
    engine = ByHand(max_encode_tokens=budget)
    faults = engine.runner.faults
    faults.bad_images = {prepared_image(number).image_key for number in bad}
    faults.crash_images = {prepared_image(number).image_key for number in crashing}
    faults.lost_images = {prepared_image(number).image_key for number in lost}
    for name, numbers in enumerate(calls):
        engine.encode(str(name), [prepared_image(number) for number in numbers])
    while engine.turn():
        pass
    cache = engine.state.encode_requests.cache
    failing = bad | crashing | lost
    for name, numbers in enumerate(calls):
        verdicts = {event.item: type(event) for event in engine.told[str(name)]}
        assert len(engine.told[str(name)]) == len(numbers), "an item got no last word, or two"
        assert verdicts == {
            item: ItemFailed if number in failing else ItemReady
            for item, number in enumerate(numbers)
        }
        for number in numbers:
            known = cache.find(prepared_image(number).image_key, num_tokens=NUM_TOKENS, now=0.0)
            assert (known is None) == (number in failing), "E7"
        engine.state.cancel(RequestKey(str(name), 0))
    assert cache.num_pins == 0
    cache.check()


def test_an_embedding_of_another_length_is_replaced_and_never_served() -> None:
    engine = ByHand()
    image = prepared_image(1)
    engine.encode("a", [image])
    engine.turn()
    shorter = PreparedImage(image.image_key, (1, 2, 8), 4, image.patches)
    request = prompt("b", [shorter])
    engine.submit(request, [shorter])
    run_out(engine)
    assert engine.told["b"][0] == NeedItems((0,))
    assert not any(isinstance(event, FailedEvent) for event in engine.told["b"])
    assert engine.tokens("b") == answer_alone(request, [shorter])
    engine.state.cancel(RequestKey("a", 0))
