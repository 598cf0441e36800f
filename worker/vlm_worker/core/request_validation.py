"""Checks that a request can run on this worker, before it is queued."""

from __future__ import annotations

from vlm_worker.errors import ContextTooLongError, InvalidRequestError
from vlm_worker.types import Request, SamplingParams

MAX_TOKEN_ID = 2**31 - 1


def validate_request(
    request: Request,
    *,
    max_model_len: int,
    max_image_tokens: int | None,
    vocab_size: int,
    max_prompt_tokens: int | None = None,
) -> None:
    """Raise if a request could never run or would violate an invariant of the scheduler.

    `max_image_tokens` is the size of the largest image if an image must fit in one chunk, and
    `max_prompt_tokens` that of the longest prompt if a prompt must.

    Raises:
        ContextTooLongError: the prompt leaves no token for an answer, or an image exceeds a chunk;
            the message has the numbers.
        InvalidRequestError: tokens, items or sampling are inconsistent; `param` names the field.
    """
    num_tokens = len(request.token_ids)
    if not 1 <= request.num_prompt_tokens <= num_tokens:
        raise InvalidRequestError(
            f"num_prompt_tokens is {request.num_prompt_tokens}; it must be between 1 and the "
            f"{num_tokens} token_ids",
            param="num_prompt_tokens",
        )
    if request.num_history_tokens > request.num_prompt_tokens:
        raise InvalidRequestError(
            f"num_history_tokens is {request.num_history_tokens}; it must be at most the "
            f"{request.num_prompt_tokens} tokens of the prompt",
            param="num_history_tokens",
        )
    if num_tokens >= max_model_len:
        visual = sum(item.num_tokens for item in request.items)
        parts = f", {visual} of them for {len(request.items)} image(s)" if request.items else ""
        raise ContextTooLongError(
            f"the prompt has {num_tokens} tokens{parts}; with at least one token of answer "
            f"that exceeds the model's {max_model_len}"
        )
    if max_prompt_tokens is not None and request.num_prompt_tokens > max_prompt_tokens:
        raise ContextTooLongError(
            f"the prompt has {request.num_prompt_tokens} tokens; this model computes a prompt in "
            f"one step, which holds {max_prompt_tokens}"
        )
    if not 0 <= min(request.token_ids) <= max(request.token_ids) <= MAX_TOKEN_ID:
        raise InvalidRequestError("token_ids must be between 0 and 2^31 - 1", param="token_ids")
    if request.sampling.max_tokens <= request.num_delivered_tokens:
        raise InvalidRequestError(
            f"max_tokens is {request.sampling.max_tokens}, and {request.num_delivered_tokens} "
            "tokens of the answer are delivered already",
            param="max_tokens",
        )
    if any(token_id >= vocab_size for token_id, _ in request.sampling.logit_bias):
        raise InvalidRequestError(
            f"logit_bias names a token beyond the model's {vocab_size}", param="logit_bias"
        )
    if request.sampling.grammar and request.sampling.ignore_eos:
        raise InvalidRequestError(
            "ignore_eos does not let a constrained answer go on: its grammar says where it ends",
            param="ignore_eos",
        )
    if request.sampling.num_prompt_logprobs is not None and request.items:
        raise InvalidRequestError(
            "prompt_logprobs are of text; the prompt has images", param="prompt_logprobs"
        )
    _check_min_tokens(request.sampling)
    _check_items(request, max_image_tokens=max_image_tokens)


def _check_min_tokens(sampling: SamplingParams) -> None:
    if sampling.min_tokens > sampling.max_tokens:
        raise InvalidRequestError(
            f"min_tokens is {sampling.min_tokens}; max_tokens is only {sampling.max_tokens}",
            param="min_tokens",
        )
    if sampling.grammar and sampling.min_tokens:
        raise InvalidRequestError(
            "min_tokens does not let a constrained answer go on: its grammar says where it ends",
            param="min_tokens",
        )


def validate_reservation(num_tokens: int, *, max_model_len: int) -> None:
    """Raise ContextTooLongError if a reservation exceeds the longest sequence."""
    if num_tokens > max_model_len:
        raise ContextTooLongError(
            f"{num_tokens} tokens were to be reserved; max_model_len is {max_model_len}"
        )


def _check_items(request: Request, *, max_image_tokens: int | None) -> None:
    end = 0
    for number, item in enumerate(request.items):
        if item.offset < end or item.num_tokens < 1 or item.end > request.num_prompt_tokens:
            raise InvalidRequestError(
                f"items[{number}] covers tokens {item.offset} to {item.end}: outside the prompt, "
                "empty, or overlapping the item before it",
                param=f"items[{number}]",
            )
        if max_image_tokens is not None and item.num_tokens > max_image_tokens:
            raise ContextTooLongError(
                f"items[{number}] has {item.num_tokens} visual tokens; this model computes an "
                f"image in one step, which holds {max_image_tokens}",
                param=f"items[{number}]",
            )
        end = item.end
