"""Which tokens each KV block of a sequence holds, if a modality is stored in few bits. Pure.

All blocks have the same number of bytes. A narrow block stores one modality in int8 or 4 bits, and
holds R * P tokens; a wide one holds P tokens of any kind (`vlm_kernels.mixed_blocks`):

    tokens   t t t t t [image: 20 tokens ......................] t t t t t t
    P = 4    |wide   |wide   |narrow, R = 2  |narrow        |wide   |wide   |

A block is narrow if the next R * P tokens are all of the narrow modality, else wide. In 4 bits,
they are of one image, too: a step writes such a block whole, and needs one embedding for it. All
tokens behind the last image are text. So the blocks follow from the images of a request alone,
before anything is computed, and equally on every worker:

    M1  without a narrow modality, block i holds the tokens [i * P, (i + 1) * P)
    M2  the blocks of a sequence do not depend on its length, its chunks, or what is cached
    M3  a narrow block holds tokens of the narrow modality alone
    M4  a block's hash covers its number of tokens: blocks of different kinds never have one hash
    M5  in 4 bits, a chunk never ends inside a narrow block (`chunks`)
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import numpy as np

from vlm_worker.types import ImageItem, KVLayout, Narrow

if TYPE_CHECKING:
    from vlm_worker.core.sequence import Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class BlockKinds:
    """The kinds of blocks of one KV cache.

    Attributes:
        block_size: P, the tokens of a wide block.
        narrow: what is stored in few bits, or None.
        num_parts: R; 1 if nothing is narrow.
    """

    block_size: int
    narrow: Narrow | None = None
    num_parts: int = 1

    @classmethod
    def of_layout(cls, layout: KVLayout) -> BlockKinds:
        return cls(layout.block_size, layout.narrow, layout.num_parts)

    @property
    def entries_per_block(self) -> int:
        """The block-table entries that belong to one block of the pool."""
        return 1 if self.narrow is None else 2 * self.num_parts

    @property
    def min_chunk(self) -> int:
        """Prompt tokens that must fit into a step, so that every chunk can be computed."""
        is_grouped = self.narrow is not None and self.narrow.is_grouped
        return self.num_parts * self.block_size if is_grouped else 1

    def check_chunks(self, max_chunk: int) -> None:
        """Raise ValueError if not every chunk fits into a step of `max_chunk` prompt tokens."""
        if 1 < self.min_chunk > max_chunk:  # without groups, a step may have no prompt tokens
            raise ValueError(
                f"KV blocks of {self.min_chunk} visual tokens are computed whole, but "
                f"max_num_batched_tokens less max_num_seqs is {max_chunk}"
            )

    @property
    def of_text(self) -> BlockShape:
        """The blocks of a sequence without images."""
        is_narrow = self.narrow is Narrow.TEXT
        return BlockShape(self, (), (), is_narrow)

    def of(self, sequence: Sequence) -> BlockShape:
        """The blocks of a sequence; computed once."""
        if sequence.block_shape is None:
            sequence.block_shape = self.of_items(sequence.items)
        return sequence.block_shape

    def of_items(self, items: Seq[ImageItem]) -> BlockShape:
        """The blocks of a request with these images, in order."""
        plain = self.of_text
        if self.narrow is None or not items:
            return plain
        end = items[-1].end
        narrow_tokens = self.num_parts * self.block_size
        number = np.zeros(end + narrow_tokens, np.int64)  # of a token's image, from 1 on
        for index, item in enumerate(items, 1):
            number[item.offset : item.end] = index
        is_visual = number > 0
        num_visual = np.concatenate([[0], np.cumsum(is_visual)])
        wanted = 0 if self.narrow is Narrow.TEXT else narrow_tokens
        ends: list[int] = []
        kinds: list[bool] = []
        at = 0
        while at < end:
            behind = at + narrow_tokens
            is_narrow = bool(num_visual[behind] - num_visual[at] == wanted)
            if self.narrow.is_grouped:
                is_narrow &= bool(number[at] == number[behind - 1])
            at = behind if is_narrow else at + self.block_size
            ends.append(at)
            kinds.append(is_narrow)
        return BlockShape(self, tuple(ends), tuple(kinds), plain.tail_is_narrow)


@dataclasses.dataclass(frozen=True, slots=True)
class BlockShape:
    """The tokens of each block of one sequence.

    Attributes:
        kinds: of the cache.
        ends: the token at which each block ends, up to the one that holds the last visual token.
        is_narrow: the kind of each of these blocks.
        tail_is_narrow: the kind of all later blocks.
    """

    kinds: BlockKinds
    ends: tuple[int, ...]
    is_narrow: tuple[bool, ...]
    tail_is_narrow: bool

    @property
    def tail_size(self) -> int:
        """Tokens of a block behind the last image."""
        return self.kinds.block_size * (self.kinds.num_parts if self.tail_is_narrow else 1)

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that the first `num_tokens` need."""
        return self._count(num_tokens, partial=True)

    def num_full(self, num_tokens: int) -> int:
        """Blocks that the first `num_tokens` fill."""
        return self._count(num_tokens, partial=False)

    def num_tokens(self, num_blocks: int) -> int:
        """Tokens that the first `num_blocks` hold."""
        head = len(self.ends)
        if num_blocks <= head:
            return self.ends[num_blocks - 1] if num_blocks else 0
        return (self.ends[-1] if head else 0) + (num_blocks - head) * self.tail_size

    def whole_end(self, end: int) -> int:
        """The last token up to `end` where a chunk may end, if narrow blocks are whole (M5)."""
        index = self.num_full(end)
        is_inside = index < len(self.is_narrow) and self.is_narrow[index]
        return self.num_tokens(index) if is_inside else end

    def entries(self, blocks: Seq[int]) -> Seq[int] | np.ndarray:
        """The block-table entries of the first blocks of the sequence, P tokens each."""
        if self.kinds.narrow is None:
            return blocks
        kinds = itertools.chain(self.is_narrow, itertools.repeat(self.tail_is_narrow))
        per_block = [
            entries_of(block, is_narrow=is_narrow, num_parts=self.kinds.num_parts)
            for block, is_narrow in zip(blocks, kinds, strict=False)
        ]
        return np.fromiter(itertools.chain.from_iterable(per_block), np.int32)

    def _count(self, num_tokens: int, *, partial: bool) -> int:
        head = self.ends[-1] if self.ends else 0
        if num_tokens < head:
            if partial:
                return bisect.bisect_left(self.ends, num_tokens) + 1 if num_tokens else 0
            return bisect.bisect_right(self.ends, num_tokens)
        count, rest = divmod(num_tokens - head, self.tail_size)
        return len(self.ends) + count + (partial and rest > 0)


def entries_of(block: int, *, is_narrow: bool, num_parts: int) -> range:
    """The entries of a block, adjacent; their numbers are those of `vlm_kernels.mixed_blocks`."""
    first = (2 * block + is_narrow) * num_parts
    return range(first, first + (num_parts if is_narrow else 1))
