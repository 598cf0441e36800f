"""The decoding sequences as columns in the order of their step: what it reads and writes, as it is.

    table      row 0 1 2 3 ...      every running sequence, wherever it has a row
    Decoding   rows 2 0 3           those that decode, oldest first, side by side

Its arrays are inputs of a step, and a step in which nobody comes or goes adds one to some of them:
nothing is looked up by row. The table makes another when membership changes.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from vlm_worker.core.sequence import Sequence


class Decoding:
    """Of D sequences, each with one known token that is not computed. Written by the table alone.

    Attributes:
        rows: int64 [D], of the SequenceTable.
        members: the sequences themselves, never another list.
        token_ids: int64 [D], the token that is not computed.
        context_lens: int32 [D], tokens that have KV; `num_kv_tokens` is their sum.
        room: int64 [D], tokens that its blocks hold.
        block_table: int32 [D, B] for the B blocks of the longest; another array when B grows.
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
        room: np.ndarray,
        block_table: np.ndarray,
        block_size: int,
        limit: np.ndarray,
        stop_ids: np.ndarray,
    ) -> None:
        self.rows, self.members = rows, members
        self.token_ids = token_ids.astype(np.int64)
        self.context_lens = num_computed.astype(np.int32)
        self.num_kv_tokens = int(num_computed.sum())
        self.room = room
        self.block_table = block_table
        self._block_size = block_size
        self._ends_at = limit - 1  # the token that is then not computed is the last one
        self._stop_ids = np.ascontiguousarray(stop_ids.T)
        index, offset = np.divmod(num_computed, block_size)
        np.minimum(index, block_table.shape[1] - 1, out=index)  # where the next block lacks
        blocks = block_table[np.arange(len(rows)), index].astype(np.int64)
        num_axes = members[0].positions.shape[0] if members else 1
        self._counts = np.empty((3 + num_axes, len(rows)), np.int64)  # all that grow by one
        self.num_computed[:] = num_computed
        np.subtract(num_computed + 1, num_prompt, out=self.indices)
        np.add(blocks * block_size, offset, out=self.slots)
        np.add(num_computed, position_delta, out=self.positions)

    @property
    def num_computed(self) -> np.ndarray:
        """Int64 [D], tokens of each that have KV; `context_lens` is the same in int32."""
        column: np.ndarray = self._counts[0]
        return column

    @property
    def indices(self) -> np.ndarray:
        """Int64 [D], of the next token in its answer."""
        column: np.ndarray = self._counts[1]
        return column

    @property
    def slots(self) -> np.ndarray:
        """Int64 [D], where the next KV goes; of no meaning while there is no block for it."""
        column: np.ndarray = self._counts[2]
        return column

    @property
    def positions(self) -> np.ndarray:
        """Int64 [P, D], of the token that is not computed."""
        return self._counts[3:]

    def append_blocks(self, at: np.ndarray, blocks: Seq[int], block_table: np.ndarray) -> None:
        """One more block for those at some places, whose blocks are all full.

        `block_table` is as this one, with these blocks.
        """
        self.block_table = block_table
        self.room[at] += self._block_size
        self.slots[at] = np.array(blocks, np.int64) * self._block_size

    def advance(self, token_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Each has computed its token, and has the next one of int64 `token_ids` [D].

        Returns:
            Bool [D]: whose answer a stop token ends, and whose its length.
        """
        self.token_ids[:] = token_ids
        self.num_kv_tokens += len(self.rows)
        self._counts += 1
        self.context_lens += 1
        hits = self._stop_ids == token_ids
        stopped = hits[0] if len(hits) == 1 else hits.any(axis=0)
        return stopped, self.num_computed >= self._ends_at
