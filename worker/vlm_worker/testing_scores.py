"""Log-probabilities of prompts that `ChecksumRunner` gives: functions of the context alone."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import numpy as np

from vlm_worker.core.step_values import ScoredRows, Scores


def prompt_logprob(context: np.ndarray, token_id: int) -> float:
    """The log-probability of a token after a context of numbers; exact in float32."""
    number = zlib.crc32(context.astype(np.int64).tobytes() + token_id.to_bytes(4))
    return -(number % 64 + 1) / 8


def checksum_scores(contexts: Sequence[np.ndarray | None], scored: ScoredRows) -> Scores:
    """The scores of tokens after contexts; None is a context with poison.

    The token is the best one, the ids below it follow, and the rank is made from its value.
    """
    pairs = zip(contexts, scored.token_ids.tolist(), strict=True)
    values = [math.nan if one is None else prompt_logprob(one, token) for one, token in pairs]
    logprobs = np.array(values, np.float32)
    below = np.arange(scored.num_top)
    ranks = np.nan_to_num(-logprobs * 8, nan=1.0).astype(np.int64)
    top_ids = np.abs(scored.token_ids[:, None] - below)
    return Scores(logprobs, ranks, top_ids, logprobs[:, None] - below.astype(np.float32))
