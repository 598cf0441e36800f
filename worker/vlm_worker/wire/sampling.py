"""Converts sampling parameters and log-probabilities between protobuf and values.

The wire's value for unset (0) becomes the value that means unset here. Every number is checked
against its bounds; NaN fails all checks.
"""

from __future__ import annotations

from vlm_worker.errors import InvalidRequestError
from vlm_worker.pb import worker_pb2 as pb
from vlm_worker.types import SamplingParams, TokenLogprobs
from vlm_worker.wire import checks

MAX_STOP_TOKENS = 256
MAX_TEMPERATURE = 100.0


def sampling_of(message: pb.Sampling) -> SamplingParams:
    """Sampling parameters; InvalidRequestError names the one that is out of bounds."""
    checks.bounded_int(message.max_tokens, "sampling.max_tokens", 1, checks.MAX_TOKENS)
    checks.bounded_int(message.top_k, "sampling.top_k", 0, checks.MAX_TOKEN_ID)
    stops = checks.token_ids(message.stop_token_ids, "sampling.stop_token_ids", 0, MAX_STOP_TOKENS)
    checks.bounded_int(message.num_logprobs, "sampling.num_logprobs", 0, checks.MAX_LOGPROBS + 1)
    _number(message, "temperature", 0.0, MAX_TEMPERATURE)
    _number(message, "top_p", 0.0, 1.0)
    _number(message, "min_p", 0.0, 1.0)
    _number(message, "frequency_penalty", -checks.MAX_PENALTY, checks.MAX_PENALTY)
    _number(message, "presence_penalty", -checks.MAX_PENALTY, checks.MAX_PENALTY)
    _number(message, "repetition_penalty", 0.0, checks.MAX_REPETITION_PENALTY)
    return SamplingParams(
        max_tokens=message.max_tokens,
        temperature=message.temperature,
        top_p=message.top_p or 1.0,
        top_k=message.top_k,
        seed=message.seed,
        stop_token_ids=stops,
        ignore_eos=message.ignore_eos,
        min_p=message.min_p,
        frequency_penalty=message.frequency_penalty,
        presence_penalty=message.presence_penalty,
        repetition_penalty=message.repetition_penalty or 1.0,
        logit_bias=_logit_bias_of(message),
        num_logprobs=message.num_logprobs - 1 if message.num_logprobs else None,
    )


def sampling_to(sampling: SamplingParams) -> pb.Sampling:
    """The message of sampling parameters."""
    return pb.Sampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        min_p=sampling.min_p,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=dict(sampling.logit_bias),
        num_logprobs=0 if sampling.num_logprobs is None else sampling.num_logprobs + 1,
    )


def logprobs_to(logprobs: TokenLogprobs) -> pb.TokenLogprobs:
    """The message of one position's log-probabilities."""
    return pb.TokenLogprobs(
        logprob=logprobs.logprob,
        top_token_ids=[token_id for token_id, _ in logprobs.top],
        top_logprobs=[logprob for _, logprob in logprobs.top],
    )


def logprobs_of(message: pb.TokenLogprobs) -> TokenLogprobs:
    """One position's log-probabilities."""
    ids, values = message.top_token_ids, message.top_logprobs
    if len(ids) != len(values) or len(ids) > checks.MAX_LOGPROBS:
        raise InvalidRequestError(
            f"logprobs must name up to {checks.MAX_LOGPROBS} tokens, each with its value"
        )
    # The logarithm of a probability: not NaN, and at most 0 apart from rounding.
    if not all(value <= 1.0 for value in (message.logprob, *values)):
        raise InvalidRequestError("logprobs must be logarithms of probabilities")
    return TokenLogprobs(message.logprob, tuple(zip(ids, values, strict=True)))


def _number(message: pb.Sampling, name: str, minimum: float, maximum: float) -> None:
    if not minimum <= getattr(message, name) <= maximum:
        raise InvalidRequestError(f"sampling.{name} must be {minimum:g} to {maximum:g}", param=name)


def _logit_bias_of(message: pb.Sampling) -> tuple[tuple[int, float], ...]:
    checks.bounded_int(len(message.logit_bias), "sampling.logit_bias", 0, checks.MAX_LOGIT_BIASES)
    if not all(
        -checks.MAX_LOGIT_BIAS <= bias <= checks.MAX_LOGIT_BIAS
        for bias in message.logit_bias.values()
    ):
        raise InvalidRequestError(
            f"sampling.logit_bias must be {-checks.MAX_LOGIT_BIAS:g} to {checks.MAX_LOGIT_BIAS:g}",
            param="logit_bias",
        )
    return tuple(sorted(message.logit_bias.items()))
