"""Validates the body of `/v1/completions`. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

from vlm_worker.annotations import MAX_LOGPROBS
from vlm_worker.gateway.api import schema
from vlm_worker.gateway.api.completion_prompts import GivenPrompt, check_echo, parse_prompts
from vlm_worker.gateway.api.errors import invalid, unsupported
from vlm_worker.gateway.api.requests import (
    MAX_CHOICES,
    Options,
    SamplingOptions,
    parse_sampling,
    take_max_tokens,
    take_options,
    take_visual,
)
from vlm_worker.gateway.api.schema import Fields, refuse
from vlm_worker.gateway.echo import Echo

DEFAULT_MAX_TOKENS: Final = 16
"""OpenAI's default."""
MAX_VALUES: Final = 256 * 1024
"""Log-probabilities of prompts in the answers of a request, which are held until they end."""


@dataclasses.dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A completion.

    With `echo`, each answer begins with the text of its prompt, and `logprobs` with those of its
    tokens. `num_prompt_logprobs` are those of the field `prompt_logprobs`; None if it is not
    wanted. With `no_answer`, the workers compute one token that is not shown.
    """

    options: Options
    prompts: tuple[GivenPrompt, ...]
    echo: bool = False
    num_prompt_logprobs: int | None = None
    no_answer: bool = False

    def echo_of(self, text: str) -> Echo:
        """What is shown of one prompt; `text` is "" unless it is echoed."""
        num_logprobs = self.options.sampling.num_logprobs if self.echo else None
        return Echo(text, num_logprobs, self.num_prompt_logprobs, self.no_answer)


def parse_completion(body: dict[str, Any]) -> CompletionRequest:
    """Check a completion request. Raises ApiError that names the invalid part."""
    fields = Fields("", body)
    num_prompt = fields.integer("prompt_logprobs", minimum=0, maximum=MAX_LOGPROBS)
    refuse(fields, schema.COMPLETION)
    refuse(fields, schema.EXTRA)
    prompts = parse_prompts(fields)
    max_tokens, param = take_max_tokens(fields, ("max_tokens",), minimum=0)
    num_logprobs = fields.integer("logprobs", minimum=0, maximum=MAX_LOGPROBS)
    echo = fields.boolean("echo") or False
    sampling = parse_sampling(fields, num_logprobs)
    wanted = [num_prompt, num_logprobs if echo else None]
    sampling = dataclasses.replace(
        sampling, num_prompt_logprobs=max((one for one in wanted if one is not None), default=None)
    )
    if max_tokens == 0:
        _check_no_answer(sampling, echo=echo)
    best_of = fields.integer("best_of", minimum=1, maximum=MAX_CHOICES)
    limit = DEFAULT_MAX_TOKENS if max_tokens is None else max(max_tokens, 1)
    options = take_options(fields, limit, param, sampling)
    if best_of not in (None, options.num_choices):
        raise unsupported("best_of", "'best_of' must equal 'n': every choice is returned.")
    if options.stream and num_prompt is not None:
        raise invalid(
            "'prompt_logprobs' and 'stream' exclude each other: send 'echo': true and 'logprobs' "
            "for a stream that begins with the prompt.",
            param="prompt_logprobs",
        )
    take_visual(fields)
    fields.done()
    return CompletionRequest(options, prompts, echo, num_prompt, no_answer=max_tokens == 0)


def check_shown(request: CompletionRequest, prompts: Sequence[tuple[Echo, int]]) -> None:
    """Raise ApiError (400) if all choices show too much of their prompts.

    `prompts` has what is shown of each, and its tokens.
    """
    num_choices = request.options.num_choices
    check_echo([echo.text for echo, _ in prompts], num_choices)
    num_values = num_choices * sum(echo.num_values(num_tokens) for echo, num_tokens in prompts)
    if num_values > MAX_VALUES:
        param = "prompt_logprobs" if request.num_prompt_logprobs is not None else "logprobs"
        raise invalid(
            f"'{param}' adds {num_values} log-probabilities of prompts to the answers; at most "
            f"{MAX_VALUES} are allowed: send fewer or shorter prompts, or a smaller number.",
            param=param,
        )


def _check_no_answer(sampling: SamplingOptions, *, echo: bool) -> None:
    """Raise ApiError (400) if a completion of 0 tokens has nothing to show, or too much."""
    if not echo:
        raise invalid(
            "'max_tokens' must be 1 or more, or 0 with 'echo': true: the answer is then the prompt "
            "alone.",
            param="max_tokens",
        )
    if sampling.given.get("min_tokens"):
        raise invalid(
            "'min_tokens' must be 0 if 'max_tokens' is 0: the answer has no tokens.",
            param="min_tokens",
        )
