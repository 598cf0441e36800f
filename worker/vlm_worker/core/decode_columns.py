"""The decoding sequences as dense arrays, in the order of their step.

    PersistentBatch  row 0 1 2 3 ...      all running sequences, in arbitrary rows
    DecodeColumns    rows 2 0 3           the decoding sequences, oldest first, without gaps

A step reads these arrays as inputs. While membership does not change, a step only increments some
of them: it gathers nothing by row. The batch builds new columns when membership changes.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from vlm_worker.core.sequence import Sequence


class DecodeColumns:
    """The columns of D sequences that decode. Only the PersistentBatch writes them.

    Each sequence has one known token that is not computed yet.

    Attributes:
        rows: int64 [D], rows of the PersistentBatch.
        members: the sequences; always the same list object.
        token_ids: int64 [D], the token that is not computed yet.
        context_lens: int32 [D], tokens that have KV; `num_kv_tokens` is their sum.
        capacity: int64 [D], tokens that the blocks hold.
        block_table: int32 [D, B] for the B blocks of the longest; replaced when B grows.
    """

    def __init__(
        self,
        rows: np.ndarray,
        members: list[Sequence],
        *,
        token_ids: np.ndarray,
        num_computed: np.ndarray,
        num_prompt: np.ndarray,
        position_delta: np.ndarray,
        capacity: np.ndarray,
        block_table: np.ndarray,
        block_size: int,
        limit: np.ndarray,
        stop_ids: np.ndarray,
    ) -> None:
        self.rows, self.members = rows, members
        self.token_ids = token_ids.astype(np.int64)
        self.context_lens = num_computed.astype(np.int32)
        self.num_kv_tokens = int(num_computed.sum())
        self.capacity = capacity
        self.block_table = block_table
        self._block_size = block_size
        self._ends_at = limit - 1  # the last token of an answer is never computed
        self._stop_ids = np.ascontiguousarray(stop_ids.T)
        index, offset = np.divmod(num_computed, block_size)
        np.minimum(index, block_table.shape[1] - 1, out=index)  # if the next block is missing
        blocks = block_table[np.arange(len(rows)), index].astype(np.int64)
        num_axes = members[0].positions.shape[0] if members else 1
        self._counts = np.empty((3 + num_axes, len(rows)), np.int64)  # incremented by each step
        self.num_computed[:] = num_computed
        np.subtract(num_computed + 1, num_prompt, out=self.indices)
        np.add(blocks * block_size, offset, out=self.slots)
        np.add(num_computed, position_delta, out=self.positions)

    @property
    def num_computed(self) -> np.ndarray:
        """Int64 [D], tokens that have KV; `context_lens` is the same in int32."""
        column: np.ndarray = self._counts[0]
        return column

    @property
    def indices(self) -> np.ndarray:
        """Int64 [D], index of the next token in its answer."""
        column: np.ndarray = self._counts[1]
        return column

    @property
    def slots(self) -> np.ndarray:
        """Int64 [D], slot of the next token's KV; undefined while its block is missing."""
        column: np.ndarray = self._counts[2]
        return column

    @property
    def positions(self) -> np.ndarray:
        """Int64 [P, D], positions of the token that is not computed yet."""
        return self._counts[3:]

    def append_blocks(self, at: np.ndarray, blocks: Seq[int], block_table: np.ndarray) -> None:
        """Append one block to each sequence at `at`, whose blocks are all full.

        Args:
            at: int64, indices into the columns.
            blocks: one block for each of them.
            block_table: int32 [D, B], the new table with these blocks.
        """
        self.block_table = block_table
        self.capacity[at] += self._block_size
        self.slots[at] = np.array(blocks, np.int64) * self._block_size

    def advance(self, token_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Record that each sequence computed its token and sampled the next: int64 [D].

        Returns:
            Two bool [D]: whether a stop token ends the answer, and whether its length does.
        """
        self.token_ids[:] = token_ids
        self.num_kv_tokens += len(self.rows)
        self._counts += 1
        self.context_lens += 1
        hits = self._stop_ids == token_ids
        stopped = hits[0] if len(hits) == 1 else hits.any(axis=0)
        return stopped, self.num_computed >= self._ends_at
