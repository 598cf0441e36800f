"""The codecs of log-probabilities: at one position, and of a part of a prompt."""

from __future__ import annotations

import itertools
from array import array
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


def _decode_prompt(message: pb.PromptLogprobs, path: str) -> PromptLogprobs:
    rows, ranks = message.logprobs, array("I", message.ranks)
    if not 1 <= message.first_index <= an.MAX_TOKENS:
        raise InvalidRequestError(f"{path}first_index must be 1 to {an.MAX_TOKENS}")
    if not 1 <= len(rows) <= an.MAX_PROMPT_LOGPROBS:
        raise InvalidRequestError(f"{path}logprobs must have 1 to {an.MAX_PROMPT_LOGPROBS} items")
    if len(ranks) != len(rows) or not all(1 <= rank <= an.MAX_TOKEN_ID for rank in ranks):
        raise InvalidRequestError(f"{path}ranks must be one per token, 1 to {an.MAX_TOKEN_ID}")
    num_top = len(rows[0].top_token_ids)
    has_top = (len(row.top_token_ids) == len(row.top_logprobs) == num_top for row in rows)
    if num_top > an.MAX_LOGPROBS or not all(has_top):
        raise InvalidRequestError(
            f"{path}logprobs must have equally many top_logprobs, up to {an.MAX_LOGPROBS}, "
            "and as many top_token_ids"
        )
    logprobs, top_ids, top_logprobs = array("f"), array("I"), array("f")
    logprobs.fromlist([row.logprob for row in rows])
    for row in rows:
        top_ids.fromlist(list(row.top_token_ids))
        top_logprobs.fromlist(list(row.top_logprobs))
    # The logarithm of a probability: not NaN, and at most 0 apart from rounding.
    if not all(value <= 1.0 for value in itertools.chain(logprobs, top_logprobs)):
        raise InvalidRequestError(f"{path}logprob must be the logarithm of a probability")
    return PromptLogprobs(message.first_index, logprobs, ranks, num_top, top_ids, top_logprobs)


def _encode_prompt(prompt: PromptLogprobs) -> pb.PromptLogprobs:
    rows = [
        pb.TokenLogprobs(
            logprob=logprob,
            top_token_ids=prompt.top_ids[at : at + prompt.num_top].tolist(),
            top_logprobs=prompt.top_logprobs[at : at + prompt.num_top].tolist(),
        )
        for logprob, at in zip(prompt.logprobs, itertools.count(0, prompt.num_top), strict=False)
    ]
    ranks = prompt.ranks.tolist()
    return pb.PromptLogprobs(first_index=prompt.first_index, logprobs=rows, ranks=ranks)


LOGPROBS: Final = Codec.by_hand(TokenLogprobs, decode=_decode_logprobs, encode=_encode_logprobs)
PROMPT_LOGPROBS: Final = Codec.by_hand(PromptLogprobs, decode=_decode_prompt, encode=_encode_prompt)
