"""Log-probabilities as messages: two columns there, pairs here."""

from __future__ import annotations

from vlm_worker import annotations as an
from vlm_worker.errors import InvalidRequestError
from vlm_worker.pb import worker_pb2 as pb
from vlm_worker.types import TokenLogprobs


def decode_logprobs(message: pb.TokenLogprobs, path: str) -> TokenLogprobs:
    """Raises InvalidRequestError that names the invalid field below `path`."""
    ids, values = message.top_token_ids, message.top_logprobs
    if len(ids) != len(values) or len(ids) > an.MAX_LOGPROBS:
        raise InvalidRequestError(
            f"{path}top_logprobs must be those of up to {an.MAX_LOGPROBS} top_token_ids"
        )
    # The logarithm of a probability: not NaN, and at most 0 apart from rounding.
    if not all(value <= 1.0 for value in (message.logprob, *values)):
        raise InvalidRequestError(f"{path}logprob must be the logarithm of a probability")
    return TokenLogprobs(message.logprob, tuple(zip(ids, values, strict=True)))


def encode_logprobs(logprobs: TokenLogprobs) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        logprob=logprobs.logprob,
        top_token_ids=[token_id for token_id, _ in logprobs.top],
        top_logprobs=[logprob for _, logprob in logprobs.top],
    )
