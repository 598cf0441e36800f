"""Sampling of a request: what the client asks for, over the defaults of the model."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from vlm_worker.gateway.api.errors import invalid
from vlm_worker.gateway.api.requests import SamplingOptions
from vlm_worker.types import SamplingParams


def check_sampling(options: SamplingOptions, *, vocab_size: int, any_priority: bool) -> None:
    """Raise ApiError (400) for tokens that the model lacks, or a priority above the default."""
    named = {
        "logit_bias": [token_id for token_id, _ in options.logit_bias],
        "stop_token_ids": options.stop_token_ids,
    }
    for param, ids in named.items():
        if max(ids, default=0) >= vocab_size:
            raise invalid(
                f"'{param}' names a token that the model does not have; its ids are below "
                f"{vocab_size}.",
                param=param,
            )
    if options.priority > 0 and not any_priority:
        raise invalid(
            "'priority' must be 0 or more: on this service a client may let others go first, "
            "not go before them.",
            param="priority",
        )


def check_min_tokens(options: SamplingOptions, max_tokens: int) -> None:
    """Raise ApiError (400) if the answer cannot have its least number of tokens."""
    num_tokens = options.given.get("min_tokens", 0)
    if num_tokens > max_tokens:
        raise invalid(
            f"'min_tokens' is {num_tokens}, and the answer may have {max_tokens} tokens: send a "
            "smaller number, or a larger limit if the context has more.",
            param="min_tokens",
        )


def sampling_of(
    options: SamplingOptions, defaults: Mapping[str, float], max_tokens: int
) -> SamplingParams:
    """The sampling of an answer; a request without seed gets a random one."""
    chosen: dict[str, Any] = {**defaults, **options.given}
    if chosen.get("top_p") == 0:  # a nucleus of 0 contains only the most likely token
        chosen |= {"top_p": 1.0, "temperature": 0.0}
    seed = chosen.pop("seed", None)
    return SamplingParams(
        max_tokens=max_tokens,
        seed=secrets.randbits(63) if seed is None else seed % 2**64,
        logit_bias=options.logit_bias,
        num_logprobs=options.num_logprobs,
        num_prompt_logprobs=options.num_prompt_logprobs,
        stop_token_ids=options.stop_token_ids,
        grammar=b"" if options.grammar is None else options.grammar.text.encode(),
        **chosen,
    )
