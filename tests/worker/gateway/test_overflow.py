"""A request that exceeds the context is refused, or its oldest images are reduced or dropped."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worker.gateway.image_files import ask, png
from worker.gateway.stack import BLOCK_SIZE, MODEL

from vlm_worker.gateway.api.errors import ApiError
from vlm_worker.gateway.api.requests import parse_chat
from vlm_worker.gateway.config import Config, Limits, Salts
from vlm_worker.gateway.images import RequestImage, read_images
from vlm_worker.gateway.orchestrate.prepared_request import PreparedRequest
from vlm_worker.gateway.overflow import EIGHTH, fit
from vlm_worker.gateway.prompts import PromptBuilder
from vlm_worker.gateway.request_preparation import Preparer
from vlm_worker.gateway.turns import at_once
from vlm_worker.gateway.visual import Choice, VisualLimits, VisualPolicy, Why

CONTEXT = 288
BUILDER = PromptBuilder(MODEL)
FAMILY = BUILDER.family
TURNS = (
    ask(png((1, 1, 1), (224, 224)), "one"),
    ask("yes", role="assistant"),
    ask(png((2, 2, 2), (224, 224)), "two"),
    ask("no", role="assistant"),
    ask(png((3, 3, 3), (224, 224)), png((4, 4, 4), (224, 224)), "three and four"),
)
"""Four images of 64 visual tokens, two of them in the last message; 256 without text."""


async def prepared(policy: str, *messages: Any, **changes: Any) -> PreparedRequest:
    """Reads and prepares a chat as a gateway does."""
    limits = VisualLimits(policy="Detail", on_context_exceeded=policy)  # type: ignore[arg-type]
    config = Config(limits=Limits(visual=limits))
    body = {"model": "m", "messages": list(messages or TURNS), "max_tokens": 8, **changes}
    request = at_once(parse_chat(body))
    visual = VisualPolicy(limits, FAMILY, tenant="t", visual=None, messages=request.messages)
    images = at_once(read_images(request.images, config, FAMILY, visual=visual))
    preparer = Preparer(BUILDER, "m", CONTEXT, BLOCK_SIZE, Salts("m", lambda: None))
    return await preparer.chat(request, images, config, request_id="r", tenant="t")


def counts(request: PreparedRequest) -> list[int]:
    prompt = request.prompt_without(frozenset())
    assert list(prompt.counts) == [image.num_tokens for image in request.images]
    assert len(prompt.token_ids) + 8 <= CONTEXT
    return list(prompt.counts)


async def test_a_request_that_exceeds_the_context_is_refused_by_default() -> None:
    with pytest.raises(ApiError) as refused:
        await prepared("Refuse")
    assert refused.value.code == "context_length_exceeded"


async def test_the_oldest_image_keeps_an_eighth_of_its_tokens() -> None:
    request = await prepared("ReduceOldest")
    assert counts(request) == [8, 64, 64, 64]
    assert request.images[0].choice == Choice(0, EIGHTH, "oldest", Why.CONTEXT)
    assert all(image.reduction is None for image in request.images[1:])


async def test_the_oldest_image_leaves_the_prompt() -> None:
    request = await prepared("DropOldest")
    assert counts(request) == [64, 64, 64]
    text = BUILDER.tokenizer.decode(list(request.prompt_without(frozenset()).token_ids))
    assert "one" in text, "the text of the message stays"


async def test_a_long_answer_is_part_of_what_must_fit() -> None:
    assert counts(await prepared("ReduceOldest", max_tokens=100))[:2] == [8, 8]


@pytest.mark.parametrize("policy", ["Refuse", "ReduceOldest", "DropOldest"])
async def test_a_request_that_fits_is_unchanged(policy: str) -> None:
    request = await prepared(policy, *TURNS[2:])
    assert counts(request) == [64, 64, 64]
    assert all(image.reduction is None for image in request.images)


async def test_images_of_the_last_message_are_not_dropped() -> None:
    with pytest.raises(ApiError) as refused:
        await prepared("DropOldest", *TURNS, max_tokens=200)
    assert refused.value.code == "context_length_exceeded"


async def test_an_image_of_high_detail_is_not_reduced() -> None:
    first = ask(png((1, 1, 1), (224, 224)), "one")
    first["content"][0]["image_url"]["detail"] = "high"  # type: ignore[index]
    assert counts(await prepared("ReduceOldest", first, *TURNS[1:]))[:2] == [64, 8]


def image(num_tokens: int) -> RequestImage:
    side = 28 * num_tokens
    return RequestImage(b"", "PNG", side, 28, num_tokens, 0, b"", "here", Choice())


@given(st.lists(st.integers(2, 40), max_size=6), st.integers(-5, 200), st.integers(0, 6))
def test_what_is_changed_is_the_oldest_and_no_more_than_needed(
    sizes: list[int], num_excess: int, num_last: int
) -> None:
    images, num_last = [image(size) for size in sizes], min(num_last, len(sizes))
    reduced = fit(images, num_excess, "ReduceOldest", FAMILY, num_last=num_last)
    saved = [a.num_tokens - b.num_tokens for a, b in zip(images, reduced.images, strict=True)]
    for index, one in enumerate(saved):
        assert (one > 0) == (sum(saved[:index]) < num_excess)
    dropped = fit(images, num_excess, "DropOldest", FAMILY, num_last=num_last).dropped
    assert dropped == frozenset(range(len(dropped)))
    assert len(dropped) <= len(images) - num_last
    assert sum(sizes[: max(0, len(dropped) - 1)]) < max(num_excess, 1)
