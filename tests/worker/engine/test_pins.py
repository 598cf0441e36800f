"""Prompts pin embeddings only with blocks, or a soft reservation of some: E4, full pools."""

from __future__ import annotations

import pytest
from worker.answers import answer_alone
from worker.engine.by_hand import ByHand
from worker.engine.test_pipeline import NUM_TOKENS, prepared_image, prompt, run_out

from vlm_worker.core.admission import MAX_CANDIDATES
from vlm_worker.core.sequence import Status
from vlm_worker.testing import IMAGE_TOKEN
from vlm_worker.types import ImageItem, PreparedImage, Request, RequestKey, SamplingParams


def held(engine: ByHand) -> dict[str, int]:
    """Embeddings on hand, by waiting sequence that holds some."""
    live = engine.state.attempts.sequences()
    return {
        sequence.request.key.request_id: len(sequence.output.prompt_pins)
        + sum(embedding is not None for embedding in sequence.embeddings)
        for sequence in live
        if sequence.status is Status.WAITING
        and (sequence.output.prompt_pins or any(e is not None for e in sequence.embeddings))
    }


@pytest.mark.parametrize("num_waiting", [3, 3 * MAX_CANDIDATES])
def test_a_request_that_waits_for_blocks_pins_no_embedding(num_waiting: int) -> None:
    engine = ByHand(17, embedding_cache_bytes=100, max_image_tokens=NUM_TOKENS)
    engine.submit(prompt("holder", [], first=9), for_peer=True)
    engine.state.sequences.reserve(RequestKey("holder 2", 0), 60)  # nothing is left
    todo = {}
    for number in range(num_waiting):
        images = [prepared_image(10 * number), prepared_image(10 * number + 1)]
        request = prompt(str(number), images, first=20 + number)
        todo[str(number)] = request, images
        engine.submit(request, images)
        engine.answer()
        engine.turn()
        engine.answer()
        engine.turn()
        assert held(engine) == {}, "somebody holds embeddings without blocks"
        assert engine.num_prompt_pins == 0
    assert not any(engine.told[name] for name in todo), "somebody asked without blocks"
    cache = engine.state.encode_requests.cache
    assert cache.hot.num_bytes <= 100
    for name in ("holder", "holder 2"):
        engine.state.sequences.release(RequestKey(name, 0))
    run_out(engine)
    for name, (request, images) in todo.items():
        assert engine.tokens(name) == answer_alone(request, images)
    assert cache.num_evictions > 0
    assert cache.num_pins == 0
    assert engine.state.violations() == []


def begins_with_image(name: str, image: PreparedImage) -> Request:
    """9 tokens, 3 blocks; nothing of it can run before the image is here."""
    token_ids = (*[IMAGE_TOKEN] * NUM_TOKENS, 2, 3, 4, 5)
    item = ImageItem(image.image_key, 0, NUM_TOKENS, image.grid_thw)
    sampling = SamplingParams(max_tokens=3, ignore_eos=True)
    return Request(RequestKey(name, 0), token_ids, len(token_ids), sampling, (item,))


@pytest.mark.parametrize("for_peer", [False, True])
def test_a_burst_pins_no_more_images_than_could_run_at_once(for_peer: bool) -> None:
    engine = ByHand(17, max_num_seqs=64, max_num_batched_tokens=256)
    todo = {}
    for number in range(40):
        image = prepared_image(number)
        todo[str(number)] = begins_with_image(str(number), image), [image]
        engine.submit(*todo[str(number)], for_peer=for_peer)
    most = 0
    for _ in range(2_000):
        busy = engine.turn()
        live = engine.state.attempts.sequences()
        most = max(most, sum(bool(s.output.prompt_pins or s.output.requested_items) for s in live))
        assert engine.num_prompt_pins <= 5, "16 blocks for_peer 5 such prompts"
        for name in list(todo) if for_peer else []:  # its reader is done with it
            attempt = engine.state.attempts.get(RequestKey(name, 0))
            sequence = attempt.sequence if attempt is not None else None
            if sequence is not None and sequence.status is Status.HELD:
                engine.state.sequences.release(sequence.request.key)
        if not busy and not any(engine.asked.values()) and not live:
            break
        engine.answer()
    assert most == 5
    for name, (request, images) in todo.items():
        whole = answer_alone(request, images)
        assert engine.tokens(name) == (whole[:1] if for_peer else whole)
    assert engine.state.violations() == []
