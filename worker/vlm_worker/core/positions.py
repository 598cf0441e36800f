"""Positions of tokens: one row with RoPE, three rows (time, height, width) with M-RoPE.

text  text  | image, 2x3 tokens           | text
t: 0   1    | 2  2  2  2  2  2              | 5
h: 0   1    | 2  2  2  3  3  3              | 5      text continues after the longer side
w: 0   1    | 2  3  4  2  3  4              | 5
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from vlm_worker.core.image_geometry import Grid
from vlm_worker.errors import InvalidRequestError
from vlm_worker.types import ImageItem


def rope(num_tokens: int) -> tuple[np.ndarray, int]:
    """Positions `[1, num_tokens]` int64 and delta 0."""
    return np.arange(num_tokens, dtype=np.int64)[None], 0


def mrope(
    num_tokens: int, items: Sequence[ImageItem], *, merge_size: int
) -> tuple[np.ndarray, int]:
    """M-RoPE positions of still images in text, equal to Qwen2.5-VL's `get_rope_index`.

    Args:
        num_tokens: T, placeholders included.
        items: checked by `check_items`.
        merge_size: patches along one side of a visual token.

    Returns:
        `[3, T]` int64, and delta: token i >= T has position i + delta in all rows.
    """
    out = np.empty((3, num_tokens), dtype=np.int64)
    index = position = 0
    for item in items:
        text = item.offset - index
        out[:, index : item.offset] = np.arange(position, position + text)
        position += text
        t, h, w = item.grid_thw[0], item.grid_thw[1] // merge_size, item.grid_thw[2] // merge_size
        out[:, item.offset : item.end] = np.indices((t, h, w)).reshape(3, -1) + position
        position += max(h, w)
        index = item.end
    out[:, index:] = np.arange(position, position + num_tokens - index)
    delta = int(out.max()) + 1 - num_tokens if num_tokens else 0
    return out, delta


def check_items(
    token_ids: np.ndarray,
    items: Sequence[ImageItem],
    *,
    image_token_id: int,
    vocab_size: int,
    num_tokens_of: Callable[[Grid], int | None],
) -> None:
    """Raise InvalidRequestError unless items and tokens are consistent.

    Items must be sorted, disjoint, within the tokens, and cover only placeholders. The gateway
    sends them; the worker does not trust their numbers. The id of any other token must be below
    `vocab_size`: it needs a row of the embedding table. A placeholder needs none, because the rows
    of its image replace it.
    """
    end = 0
    has_row = token_ids < vocab_size
    for number, item in enumerate(items):
        num_tokens = num_tokens_of(item.grid_thw)
        if num_tokens is None:
            raise InvalidRequestError(f"items[{number}].grid_thw {item.grid_thw} is no patch grid")
        if item.num_tokens != num_tokens:
            raise InvalidRequestError(
                f"items[{number}].num_tokens is {item.num_tokens}, its grid {item.grid_thw} has "
                f"{num_tokens}"
            )
        if item.offset < end or item.end > len(token_ids):
            raise InvalidRequestError(
                f"items[{number}] covers tokens {item.offset} to {item.end}; "
                f"free are {end} to {len(token_ids)}"
            )
        if not (token_ids[item.offset : item.end] == image_token_id).all():
            raise InvalidRequestError(
                f"items[{number}] covers tokens {item.offset} to {item.end}, "
                "which are not all image placeholders"
            )
        has_row[item.offset : item.end] = True
        end = item.end
    if not has_row.all():
        index = int(has_row.argmin())
        raise InvalidRequestError(
            f"token_ids[{index}] is {token_ids[index]}; the model has embeddings for ids below "
            f"{vocab_size}",
            param="token_ids",
        )
