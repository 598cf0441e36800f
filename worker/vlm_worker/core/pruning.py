"""KV pruning: which text of a conversation's history keeps its KV, and where it moves. Pure.

prompt   [first 4] text [image] text ... [last user turn .......... observed]
mass      kept     a   kept     b        kept
dropped            the tokens of a and b that received least attention from the observed rows

After the prompt's last token is computed, the sequence drops a share of the text tokens before the
last user turn. Images, the first tokens (attention sinks, arXiv 2309.17453) and the last turn keep
their KV. Tokens are ranked by the attention that the last rows of the prompt pay to them, summed
over layers and heads (SnapKV, arXiv 2404.14469; here one choice for all heads, because a block has
the rows of all of them).

A token keeps its position. Only its slot changes:

    index     0 1 2 3 4 5 6 7 8 9        token of the sequence, and its position
    slot      0 1 2 3 . . 4 5 . 6        of index 9: 9 - num_dropped
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

import numpy as np

from vlm_worker.types import Request

MIN_HISTORY_TOKENS: Final = 256
"""Text tokens before the last user turn from which on a sequence is pruned."""
NUM_SINKS: Final = 4
MAX_OBSERVED: Final = 32
"""Last rows of the prompt whose attention is summed."""


def kept_permille_of(
    request: Request, permille: int, *, min_history: int = MIN_HISTORY_TOKENS
) -> int:
    """The share of the history's text that a request keeps; 0 if it is not pruned.

    `permille` is the worker's setting: 0 is off, and 1000 keeps everything. A history of fewer text
    tokens than `min_history` is not pruned. A prompt that ends with
    an image is not pruned: no text after its images could be observed.
    """
    if not 0 < permille < 1000 or not observed_rows(request):
        return 0
    end = request.num_history_tokens
    in_items = sum(min(max(end - item.offset, 0), item.num_tokens) for item in request.items)
    if end - in_items < min_history:
        return 0
    num_candidates = len(_candidates(request))
    return permille if num_kept(num_candidates, permille) < num_candidates else 0


def observed_rows(request: Request) -> range:
    """The rows of the prompt whose attention is summed: the last ones, after its last image.

    So their inputs are tokens alone, and are known without an embedding.
    """
    end = request.num_prompt_tokens
    last = request.items[-1].end if request.items else 0
    return range(max(end - MAX_OBSERVED, last), end)


def kept_tokens(request: Request, mass: np.ndarray, permille: int) -> np.ndarray:
    """The tokens of the prompt that keep their KV: int64, increasing.

    `mass` is float32 `[num_prompt_tokens]`. Of equal masses, the earlier token is kept.
    """
    candidates = _candidates(request)
    order = np.argsort(-mass[candidates], kind="stable")
    is_kept = np.ones(request.num_prompt_tokens, np.bool_)
    is_kept[candidates[order[num_kept(len(candidates), permille) :]]] = False
    return is_kept.nonzero()[0]


def num_kept(num_candidates: int, permille: int) -> int:
    """Tokens that are kept of those that may be dropped, rounded up."""
    return -(-num_candidates * permille // 1000)


def _candidates(request: Request) -> np.ndarray:
    """The tokens that may be dropped: int64, increasing."""
    is_candidate = np.zeros(request.num_prompt_tokens, np.bool_)
    is_candidate[NUM_SINKS : request.num_history_tokens] = True
    for item in request.items:
        is_candidate[item.offset : item.end] = False
    return is_candidate.nonzero()[0]


@dataclasses.dataclass(frozen=True, slots=True)
class SlotMoves:
    """Rows to copy within the KV cache, all layers: int64 `[R]` each.

    A move may write a slot that only an earlier or the same move reads, so that copying them in
    order, some at a time, is correct.
    """

    sources: np.ndarray
    targets: np.ndarray


def plan_moves(
    kept: np.ndarray, blocks: Sequence[int], targets: Sequence[int], *, first: int, block_size: int
) -> SlotMoves:
    """Move the rows of kept tokens to the front of the blocks from number `first` on.

    Args:
        kept: int64, increasing: the tokens with KV that remain; none before block `first` is
            dropped.
        first: number of the first block that changes.
        block_size: slots of a block.
        blocks: of the sequence, as the rows are.
        targets: the blocks from number `first` on, as the rows will be. Each is new, or has its
            number in `blocks` too.
    """
    start = first * block_size
    tokens = kept[start:]
    sources = slots_of(blocks, tokens, block_size=block_size)
    return SlotMoves(sources, slots_of(targets, np.arange(len(tokens)), block_size=block_size))


def slots_of(blocks: Sequence[int], rows: np.ndarray, *, block_size: int) -> np.ndarray:
    """The slots of the rows with these numbers in `blocks`: int64."""
    first_slots = np.asarray(blocks, np.int64) * block_size
    slots: np.ndarray = first_slots[rows // block_size] + rows % block_size
    return slots


def first_changed_block(kept: np.ndarray, *, block_size: int) -> int:
    """The number of the first block that loses a token, or has rows of others after the loss."""
    kept_in_place = kept == np.arange(len(kept))
    num_in_place = len(kept) if kept_in_place.all() else int(kept_in_place.argmin())
    return num_in_place // block_size
