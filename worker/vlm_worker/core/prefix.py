"""The hash chain of a sequence's KV blocks: equal hash, equal KV.

    h0 = H(salt)     h1 = H(h0, tokens of block 0, its pictures)     h2 = H(h1, ...)

Placeholder tokens look alike for all pictures, so each picture that a block touches enters with its
content key and its offset relative to the block (K9). Every field is framed or of fixed size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from vlm_worker.types import ImageItem


def root(cache_salt: bytes) -> bytes:
    """Where the chain of a tenant begins."""
    return hashlib.sha256(b"triptych/prefix/1" + cache_salt).digest()


def extend(
    parent: bytes, token_ids: np.ndarray, items: Sequence[ImageItem], *, start: int
) -> bytes:
    """The hash of one full block.

    Args:
        parent: hash of the block before it, or the root.
        token_ids: the block's tokens, int32 `[block_size]`, C-contiguous.
        items: the sequence's pictures, in order; those outside the block are ignored.
        start: index of the block's first token in the sequence.
    """
    digest = hashlib.sha256(parent)
    digest.update(token_ids.data)
    end = start + len(token_ids)
    for item in items:
        if item.offset >= end:
            break
        if item.end > start:
            digest.update(len(item.image_key).to_bytes(4, "little"))
            digest.update(item.image_key)
            digest.update((item.offset - start).to_bytes(8, "little", signed=True))
    return digest.digest()


def extend_chain(
    hashes: list[bytes],
    token_ids: np.ndarray,
    items: Sequence[ImageItem],
    *,
    cache_salt: bytes,
    block_size: int,
    num_tokens: int,
) -> None:
    """Append to `hashes` until every full block of the first `num_tokens` has one.

    Args:
        hashes: what is known so far, from block 0 on.
        token_ids: int32, at least `num_tokens` of the sequence.
        items: the sequence's pictures.
        cache_salt: separates tenants.
        block_size: tokens of a block.
        num_tokens: tokens whose blocks are wanted.
    """
    for index in range(len(hashes), num_tokens // block_size):
        start = index * block_size
        parent = hashes[-1] if hashes else root(cache_salt)
        block = token_ids[start : start + block_size]
        near = items if items and items[-1].end > start else ()
        hashes.append(extend(parent, block, near, start=start))
