"""The codecs of log-probabilities: at one position, and of a part of a prompt."""

from __future__ import annotations

from typing import Final

from vlm_worker import annotations as an
from vlm_worker.errors import InvalidRequestError
from vlm_worker.pb import worker_pb2 as pb
from vlm_worker.types import PromptLogprobs, TokenLogprobs
from vlm_worker.wire.codec import Codec


def _decode_logprobs(message: pb.TokenLogprobs, path: str) -> TokenLogprobs:
    ids, values = message.top_token_ids, message.top_logprobs
    if len(ids) != len(values) or len(ids) > an.MAX_LOGPROBS:
        raise InvalidRequestError(
            f"{path}top_logprobs must be those of up to {an.MAX_LOGPROBS} top_token_ids"
        )
    # The logarithm of a probability: not NaN, and at most 0 apart from rounding.
    if not all(value <= 1.0 for value in (message.logprob, *values)):
        raise InvalidRequestError(f"{path}logprob must be the logarithm of a probability")
    return TokenLogprobs(message.logprob, tuple(zip(ids, values, strict=True)))


def _encode_logprobs(logprobs: TokenLogprobs) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        logprob=logprobs.logprob,
        top_token_ids=[token_id for token_id, _ in logprobs.top],
        top_logprobs=[logprob for _, logprob in logprobs.top],
    )


def _check_prompt(prompt: PromptLogprobs) -> None:
    if len(prompt.ranks) != len(prompt.logprobs):
        raise InvalidRequestError("prompt_logprobs.ranks must be one per token")
    if not all(1 <= rank <= an.MAX_TOKEN_ID for rank in prompt.ranks):
        raise InvalidRequestError(f"prompt_logprobs.ranks must be 1 to {an.MAX_TOKEN_ID}")


LOGPROBS: Final = Codec.by_hand(TokenLogprobs, decode=_decode_logprobs, encode=_encode_logprobs)
PROMPT_LOGPROBS: Final = Codec(PromptLogprobs, pb.PromptLogprobs, check=_check_prompt)
