"""KV of an image is shared where all before it is equal; shared by image alone, answers are wrong.

first    [text 1][image 1][question]        its image's KV was computed after text 1
second   [text 2][image 2][question]        leaves text 2 in the cache
third    [text 2][image 1][question]        what may it find?
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from worker.identity.engines import Stages, make_runner, running
from worker.identity.questions import IMAGE_TOKEN_ID, Question, questions
from worker.identity.reference import answer, load_reference

from vlm_worker.core import kv_cache as prefix
from vlm_worker.types import ImageItem, PreparedImage

BLOCK_SIZE = 4
TEXTS = (tuple(range(20, 32)), tuple(range(50, 62)))
ASKED = tuple(range(80, 86))
NUM_TOKENS = 16


def about(text: Sequence[int], image: PreparedImage, asked: Sequence[int] = ASKED) -> Question:
    """A prompt of text, an image and a question."""
    place = ImageItem(image.image_key, len(text), image.num_tokens, image.grid_thw)
    token_ids = (*text, *[IMAGE_TOKEN_ID] * image.num_tokens, *asked)
    return Question("sharing", (), token_ids, (place,), (image,))


@pytest.fixture(scope="module")
def images() -> tuple[PreparedImage, PreparedImage]:
    """Two unlike images of one size, of more tokens than a block has."""
    found = [q.prepared_images[0] for q in questions() if len(q.prepared_images) == 1]
    one = found[0]
    other = next(p for p in found if p.grid_thw == one.grid_thw and p.image_key != one.image_key)
    assert one.num_tokens > 2 * BLOCK_SIZE
    return one, other


def by_image_alone(
    parent: bytes, token_ids: np.ndarray, items: Sequence[ImageItem], *, start: int
) -> bytes:
    """A block hash that finds an image's KV by the image, whatever stood before it."""
    end = start + len(token_ids)
    for item in items:
        if item.offset <= start and end <= item.end:
            return hashlib.sha256(item.image_key + bytes([start - item.offset])).digest()
    return EXTEND(parent, token_ids, items, start=start)


EXTEND = prefix.hash_block


@pytest.mark.parametrize("soundly", [True, False], ids=["as built", "by the image hash alone"])
async def test_an_images_kv_is_shared_only_where_its_whole_prefix_is_equal(
    random_model_dir: Path,
    images: tuple[PreparedImage, PreparedImage],
    soundly: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not soundly:
        monkeypatch.setattr(prefix, "hash_block", by_image_alone)
    first, second = about(TEXTS[0], images[0]), about(TEXTS[1], images[1])
    third = about(TEXTS[1], images[0])
    reference = load_reference(random_model_dir)
    want = answer(reference, third, max_tokens=NUM_TOKENS, ignore_eos=True)
    async with running(make_runner(random_model_dir, block_size=BLOCK_SIZE)) as engine:
        asker = Stages.colocated(engine, max_tokens=NUM_TOKENS, ignore_eos=True)
        await asker.ask(first)
        await asker.ask(second)
        before = engine.stats()
        got = tuple(await asker.ask(third))
        after = engine.stats()
    hits, earlier = (stats.counters["prefix_cache_hits"] for stats in (after, before))
    visual = hits["visual"] - earlier["visual"]
    assert hits["text"] - earlier["text"] >= len(TEXTS[1]), (
        "the text before the image was not found"
    )
    assert (visual > 0) is not soundly, "the image's KV was found, or not, against the plan"
    assert (got == want.token_ids) is soundly
    at = next((i for i, (a, b) in enumerate(zip(got, want.token_ids, strict=True)) if a != b), None)
    print(f"{visual} visual tokens shared; first unlike token: {at}")


async def test_questions_about_one_image_compute_it_once(
    random_model_dir: Path, images: tuple[PreparedImage, PreparedImage]
) -> None:
    text = TEXTS[0][:10]  # the image begins and ends inside a block
    asked = [tuple(range(80 + 10 * n, 85 + 10 * n)) for n in range(3)]
    todo = [about(text, images[0], question) for question in asked]
    reference = load_reference(random_model_dir)
    async with running(make_runner(random_model_dir, block_size=BLOCK_SIZE)) as engine:
        asker = Stages.colocated(engine, max_tokens=NUM_TOKENS, ignore_eos=True)
        for number, question in enumerate(todo):
            before = engine.stats()
            got = tuple(await asker.ask(question))
            want = answer(reference, question, max_tokens=NUM_TOKENS, ignore_eos=True)
            assert got == want.token_ids
            after = engine.stats()
            hits = after.count("prefix_cache_hits") - before.count("prefix_cache_hits")
            if number:
                place = question.items[0]
                assert place.offset < hits < place.end, "the hit does not end inside the image"
        assert after.count("images") == 1
        assert after.encoder_cache.hits == len(todo) - 1
