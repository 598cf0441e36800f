"""What can never run is answered at once, with the field and the numbers."""

from __future__ import annotations

import dataclasses

import pytest

from vlm_worker.core.request_validation import validate_request, validate_reservation
from vlm_worker.errors import ContextTooLongError, InvalidRequestError
from vlm_worker.types import ImageItem, Request, RequestKey, SamplingParams

GOOD = Request(
    RequestKey("r", 0),
    (1, 7, 7, 7, 2, 5),
    5,
    SamplingParams(max_tokens=4),
    (ImageItem(b"k", 1, 3, (1, 2, 6)),),
)


def check(request: Request, *, max_model_len: int = 16, max_image_tokens: int | None = 3) -> None:
    validate_request(
        request, max_model_len=max_model_len, max_image_tokens=max_image_tokens, vocab_size=10
    )


def test_a_request_that_fits_passes() -> None:
    check(GOOD)
    check(GOOD, max_model_len=7)


def test_a_prompt_without_room_for_an_answer_says_the_numbers() -> None:
    with pytest.raises(ContextTooLongError, match=r"6 tokens, 3 of them for 1 image.*model's 6"):
        check(GOOD, max_model_len=6)


def test_a_bias_of_a_token_that_has_no_logit_is_refused() -> None:
    check(dataclasses.replace(GOOD, sampling=SamplingParams(4, logit_bias=((9, 1.0),))))
    with pytest.raises(InvalidRequestError, match="beyond the model's 10") as refused:
        check(dataclasses.replace(GOOD, sampling=SamplingParams(4, logit_bias=((10, 1.0),))))
    assert refused.value.param == "logit_bias"


def item(offset: int, num_tokens: int) -> ImageItem:
    return ImageItem(b"k", offset, num_tokens, (1, 1, 1))


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        pytest.param({"token_ids": (), "num_prompt_tokens": 0}, "num_prompt_tokens", id="empty"),
        pytest.param({"num_prompt_tokens": 7}, "num_prompt_tokens", id="prompt beyond the tokens"),
        pytest.param({"num_history_tokens": 7}, "num_history_tokens", id="history beyond it"),
        pytest.param({"token_ids": (1, 7, 7, 7, -2, 5)}, "token_ids", id="negative token"),
        pytest.param({"token_ids": (1, 7, 7, 7, 2**31, 5)}, "token_ids", id="huge token"),
        pytest.param({"sampling": SamplingParams(max_tokens=1)}, "max_tokens", id="all delivered"),
        pytest.param({"items": (item(3, 3),)}, "items[0]", id="item beyond the prompt"),
        pytest.param({"items": (item(1, 0),)}, "items[0]", id="empty item"),
        pytest.param({"items": (item(1, 2), item(2, 2))}, "items[1]", id="overlapping items"),
    ],
)
def test_contradictions_name_their_field(changes: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check(dataclasses.replace(GOOD, **changes))  # type: ignore[arg-type]
    assert caught.value.param == param


def test_an_image_that_never_fits_in_one_step_says_the_numbers() -> None:
    with pytest.raises(ContextTooLongError, match=r"3 visual tokens.*holds 2"):
        check(GOOD, max_image_tokens=2)
    check(GOOD, max_image_tokens=None)


def test_a_reservation_beyond_the_model_is_refused() -> None:
    validate_reservation(16, max_model_len=16)
    with pytest.raises(ContextTooLongError, match="17 tokens"):
        validate_reservation(17, max_model_len=16)
