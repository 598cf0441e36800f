"""The hash chain of a sequence's KV blocks: equal hash, equal KV.

    h0 = H(salt, adapter)     h1 = H(h0, tokens of block 0, its pictures)     h2 = H(h1, ...)

So the KV of a picture is shared by all whose prompts are equal up to it, and by nobody else: under
causal attention a visual token's KV depends on everything before it. A cache by image hash alone
serves the KV of another context, and gives another answer (tests/worker/identity/test_sharing.py).

Placeholder tokens look alike for all pictures, so each picture that a block touches enters with its
content key (K8), its offset relative to the block, and its own form, which places its tokens and,
where a picture attends to itself in both directions, reaches back into its first blocks. Every
field is framed or of fixed size.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np

from vlm_worker.types import ImageItem, Request


def root(cache_salt: bytes, adapter: bytes = b"") -> bytes:
    """Where the chain of a tenant, with the weights of an adapter, begins."""
    digest = hashlib.sha256(b"triptych/prefix/2")
    for field in (cache_salt, adapter):
        digest.update(len(field).to_bytes(4, "little"))
        digest.update(field)
    return digest.digest()


def extend(
    parent: bytes, token_ids: np.ndarray, items: Sequence[ImageItem], *, start: int
) -> bytes:
    """The hash of one full block.

    Args:
        parent: 32 bytes, the hash of the block before it, or the root.
        token_ids: the block's tokens, int32 `[block_size]`, C-contiguous.
        items: the sequence's pictures, in order; those outside the block are ignored.
        start: index of the block's first token in the sequence.
    """
    digest = hashlib.sha256(parent)
    digest.update(len(token_ids).to_bytes(4, "little"))
    digest.update(token_ids.data)
    end = start + len(token_ids)
    for item in items:
        if item.offset >= end:
            break
        if item.end > start:
            digest.update(len(item.image_key).to_bytes(4, "little"))
            digest.update(item.image_key)
            for number in (item.offset - start, item.num_tokens, *item.grid_thw):
                digest.update(number.to_bytes(8, "little", signed=True))
    return digest.digest()


def extend_chain(
    hashes: list[bytes],
    token_ids: np.ndarray,
    items: Sequence[ImageItem],
    *,
    cache_salt: bytes,
    adapter: bytes = b"",
    block_size: int,
    num_tokens: int,
) -> None:
    """Append to `hashes` until every full block of the first `num_tokens` has one.

    Args:
        hashes: what is known so far, from block 0 on.
        token_ids: int32, at least `num_tokens` of the sequence.
        items: the sequence's pictures.
        cache_salt: separates tenants.
        adapter: separates weights.
        block_size: tokens of a block.
        num_tokens: tokens whose blocks are wanted.
    """
    for index in range(len(hashes), num_tokens // block_size):
        start = index * block_size
        parent = hashes[-1] if hashes else root(cache_salt, adapter)
        block = token_ids[start : start + block_size]
        near = items if items and items[-1].end > start else ()
        hashes.append(extend(parent, block, near, start=start))


def content_of(request: Request) -> bytes:
    """32 bytes that stand for all that the KV of a request is made from, weights aside.

    Tokens, pictures and salt: KV of another prompt or another tenant has another value.
    """
    token_ids = np.array(request.token_ids, np.int32)
    return extend(root(request.cache_salt, request.adapter), token_ids, request.items, start=0)


@dataclasses.dataclass(slots=True)
class PrefixCounts:
    """Tokens that were looked up, and those that a hit covered. The engine is its only writer."""

    queries: int = 0
    hits: int = 0
    visual_queries: int = 0
    visual_hits: int = 0

    def add(self, items: Sequence[ImageItem], *, num_tokens: int, num_cached_tokens: int) -> None:
        """One prompt of `num_tokens`, of which the first `num_cached_tokens` were found."""
        self.queries += num_tokens
        self.hits += num_cached_tokens
        self.visual_queries += num_visual_tokens(items, end=num_tokens)
        self.visual_hits += num_visual_tokens(items, end=num_cached_tokens)


def num_visual_tokens(items: Sequence[ImageItem], *, end: int) -> int:
    """How many of the first `end` tokens are of pictures."""
    return sum(min(max(end - item.offset, 0), item.num_tokens) for item in items)
