"""How the client wants tokens chosen and told: OpenAI's parameters, and vLLM's beyond them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from vlm_worker.gateway.api.errors import ApiError, invalid
from vlm_worker.gateway.api.fields import Fields
from vlm_worker.wire.checks import (
    MAX_LOGIT_BIAS,
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    MAX_PENALTY,
    MAX_PRIORITY,
    MAX_REPETITION_PENALTY,
)

MAX_TOP_K = 2**31 - 1
_MIN_REPETITION_PENALTY = 0.01
# Unset, as vLLM writes it.
_ALL_TOKENS = -1


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingOptions:
    """None = the client did not say, and the model's own default holds.

    `logit_bias` holds (token id, bias) pairs in the order of their ids. `num_logprobs` counts the
    likeliest tokens to name beside the chosen one; None asks for no log-probabilities. A larger
    `priority` goes first.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    ignore_eos: bool = False
    num_logprobs: int | None = None
    priority: int = 0


def parse_sampling(fields: Fields, num_logprobs: int | None) -> SamplingOptions:
    """Take the parameters that both endpoints share; raises ApiError naming the one at fault."""

    def penalty(name: str) -> float:
        return fields.number(name, minimum=-MAX_PENALTY, maximum=MAX_PENALTY) or 0.0

    top_k = fields.integer("top_k", minimum=_ALL_TOKENS, maximum=MAX_TOP_K)
    priority = fields.integer("priority", minimum=-MAX_PRIORITY, maximum=MAX_PRIORITY)
    return SamplingOptions(
        temperature=fields.number("temperature", minimum=0, maximum=2),
        top_p=fields.number("top_p", minimum=0, maximum=1),
        top_k=0 if top_k == _ALL_TOKENS else top_k,
        min_p=fields.number("min_p", minimum=0, maximum=1),
        seed=fields.integer("seed", minimum=-(2**63), maximum=2**63 - 1),
        frequency_penalty=penalty("frequency_penalty"),
        presence_penalty=penalty("presence_penalty"),
        repetition_penalty=fields.number(
            "repetition_penalty", minimum=_MIN_REPETITION_PENALTY, maximum=MAX_REPETITION_PENALTY
        ),
        logit_bias=_logit_bias(fields),
        ignore_eos=fields.boolean("ignore_eos") or False,
        num_logprobs=num_logprobs,
        # vLLM's clients say it the other way round: a smaller one goes first.
        priority=-(priority or 0),
    )


def chat_logprobs(fields: Fields) -> int | None:
    """`logprobs` and `top_logprobs` of a chat."""
    wanted = fields.boolean("logprobs") or False
    num_top = fields.integer("top_logprobs", minimum=0, maximum=MAX_LOGPROBS)
    if num_top is not None and not wanted:
        raise invalid(
            "'top_logprobs' needs 'logprobs': true.", param="top_logprobs", code="invalid_value"
        )
    return (num_top or 0) if wanted else None


def completion_logprobs(fields: Fields) -> int | None:
    """`logprobs` of a completion: a number."""
    return fields.integer("logprobs", minimum=0, maximum=MAX_LOGPROBS)


def _logit_bias(fields: Fields) -> tuple[tuple[int, float], ...]:
    biases = fields.child("logit_bias")
    if biases is None:
        return ()
    names = list(biases.names())
    if len(names) > MAX_LOGIT_BIASES:
        raise _wrong(f"'logit_bias' may have up to {MAX_LOGIT_BIASES} pairs, it has {len(names)}.")
    pairs = {}
    for name in names:
        if not (name.isascii() and name.isdecimal() and len(name) <= 10):
            raise _wrong("'logit_bias' must have token ids as its keys.")
        pairs[int(name)] = _bias(biases.take(name))
    if len(pairs) < len(names):
        raise _wrong("'logit_bias' names a token twice.")
    return tuple(sorted(pairs.items()))


def _bias(value: Any) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not (math.isfinite(value) and abs(value) <= MAX_LOGIT_BIAS):
        raise _wrong(
            f"'logit_bias' must map token ids to numbers between {-MAX_LOGIT_BIAS:g} and "
            f"{MAX_LOGIT_BIAS:g}."
        )
    return float(value)


def _wrong(message: str) -> ApiError:
    return invalid(message, param="logit_bias", code="invalid_value")
