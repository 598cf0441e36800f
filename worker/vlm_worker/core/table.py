"""The running sequences as a struct of arrays: one row each, read and written by whole columns.

            token_ids                 num_tokens  num_computed  block_table   ...
    row 0   t0 t1 t2 t3 t4 .          5           4             7 9 0 0
    row 1   t0 t1 .                   2           0             3 0 0 0

A step over 256 decoding sequences is a handful of numpy calls; Python objects are touched where a
sequence enters or leaves, fills a block, or runs a chunk of its prompt.
"""

from __future__ import annotations

import bisect
import itertools

import numpy as np

from vlm_worker.core.blocks import NULL_BLOCK
from vlm_worker.core.decoding import Decoding
from vlm_worker.core.inputs import LogitEdits
from vlm_worker.core.sequence import Sequence, Status

NO_TOKEN = -1


class SequenceTable:
    """Rows for `num_rows` running sequences. Written by the scheduler alone.

    Attributes (N rows, L = max_model_len, B blocks for L tokens, K stop tokens):
        sequences: by row; running: the same, oldest first
        token_ids: int32 [N, L]
        num_tokens, num_computed, num_prompt, limit, num_blocks, position_delta: int64 [N];
            `limit` is the number of tokens at which the answer ends
        prefilling: bool [N]; True until all known tokens are computed once
        block_table: int32 [N, B], padded with the null block
        stop_ids: int64 [N, K], padded with NO_TOKEN
        temperature, top_p, min_p: float32 [N]; top_k: int32 [N]; seed: uint64 [N]
        num_logprobs: int64 [N]; -1 where none are wanted
        priority: int64 [N]
        logit_edits: of the rows that want any
    """

    def __init__(
        self,
        num_rows: int,
        *,
        max_model_len: int,
        block_size: int,
        eos_token_ids: tuple[int, ...] = (),
    ) -> None:
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.eos_token_ids = eos_token_ids
        self.sequences: list[Sequence | None] = [None] * num_rows
        self.running: list[Sequence] = []
        self.token_ids = np.zeros((num_rows, max_model_len), np.int32)
        self.num_tokens = np.zeros(num_rows, np.int64)
        self.num_computed = np.zeros(num_rows, np.int64)
        self.num_prompt = np.zeros(num_rows, np.int64)
        self.limit = np.zeros(num_rows, np.int64)
        self.num_blocks = np.zeros(num_rows, np.int64)
        self.position_delta = np.zeros(num_rows, np.int64)
        self.prefilling = np.zeros(num_rows, np.bool_)
        self.block_table = np.full(
            (num_rows, -(-max_model_len // block_size)), NULL_BLOCK, np.int32
        )
        self.stop_ids = np.full((num_rows, max(1, len(eos_token_ids))), NO_TOKEN, np.int64)
        self.temperature = np.zeros(num_rows, np.float32)
        self.top_p = np.ones(num_rows, np.float32)
        self.top_k = np.zeros(num_rows, np.int32)
        self.min_p = np.zeros(num_rows, np.float32)
        self.seed = np.zeros(num_rows, np.uint64)
        self.num_logprobs = np.full(num_rows, -1, np.int64)
        self.priority = np.zeros(num_rows, np.int64)
        self.logit_edits: dict[int, LogitEdits] = {}
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self._ordered_rows = np.zeros(num_rows, np.int64)  # of `running`, in its order
        self._decode_rows: np.ndarray | None = None
        self._prompts: list[Sequence] | None = None
        self._decoding: Decoding | None = None

    def __len__(self) -> int:
        """Running sequences."""
        return len(self.sequences) - len(self._free_rows)

    @property
    def num_free_rows(self) -> int:
        """Sequences that can still enter."""
        return len(self._free_rows)

    def top_priority(self, *, least: int) -> int:
        """The largest of those who run, and `least`."""
        return int(self.priority[self._running_rows].max(initial=least))

    @property
    def steps_until_one_ends(self) -> float:
        """Expected steps, if each takes the tokens that it may, one a step; 0 where none runs."""
        rows = self._running_rows
        if not len(rows):
            return 0.0
        return float((self.limit[rows] - self.num_tokens[rows]).mean()) / len(rows)

    @property
    def decode_rows(self) -> np.ndarray:
        """Rows that decode, oldest first, int64. The same array until membership changes."""
        if self._decode_rows is None:
            rows = self._running_rows
            self._decode_rows = rows[~self.prefilling[rows]]
        return self._decode_rows

    @property
    def decoding(self) -> Decoding:
        """The columns of `decode_rows`: the same until membership changes, or some go on alone."""
        if self._decoding is None:
            decode = (~self.prefilling[self._running_rows]).tolist()
            members = list(itertools.compress(self.running, decode))
            self._decoding = self._gather(self.decode_rows, members)
        return self._decoding

    def decoding_of(self, rows: np.ndarray) -> Decoding:
        """The columns of `decode_rows`, or of some of these rows alone."""
        if rows is self._decode_rows:
            return self.decoding
        return self._gather(rows, self.members(rows))

    @property
    def prompts(self) -> list[Sequence]:
        """Sequences with prompt tokens to compute, oldest first."""
        if self._prompts is None:
            rows = self._running_rows
            self._prompts = self.members(rows[self.prefilling[rows]])
        return self._prompts

    @property
    def _running_rows(self) -> np.ndarray:
        return self._ordered_rows[: len(self.running)]

    def members(self, rows: np.ndarray) -> list[Sequence]:
        """The sequences of some rows."""
        return [s for row in rows.tolist() if (s := self.sequences[row]) is not None]

    def enter(self, sequence: Sequence) -> int:
        """Give a sequence a row, from its own fields; it is RUNNING then."""
        row = self._free_rows.pop()
        request, sampling = sequence.request, sequence.request.sampling
        prefilling = sequence.status is Status.WAITING
        sequence.move(Status.RUNNING)
        sequence.row = row
        self.sequences[row] = sequence
        at = bisect.bisect_right(self.running, sequence.arrival, key=_arrival)
        self._ordered_rows[at + 1 : len(self.running) + 1] = self._running_rows[at:]
        self._ordered_rows[at] = row
        self.running.insert(at, sequence)
        self.token_ids[row, : sequence.num_tokens] = sequence.token_ids
        self.num_tokens[row] = sequence.num_tokens
        self.num_computed[row] = sequence.num_computed_tokens
        self.num_prompt[row] = request.num_prompt_tokens
        self.limit[row] = answer_limit(sequence, max_model_len=self.max_model_len)
        self.num_blocks[row] = len(sequence.blocks)
        self.block_table[row, : len(sequence.blocks)] = sequence.blocks
        self.position_delta[row] = sequence.position_delta
        self.prefilling[row] = prefilling
        self._set_stop_ids(row, stop_ids(sequence, eos_token_ids=self.eos_token_ids))
        self.temperature[row] = sampling.temperature
        self.top_p[row] = sampling.top_p
        self.top_k[row] = sampling.top_k
        self.min_p[row] = sampling.min_p
        self.seed[row] = sampling.seed & (2**64 - 1)
        self.num_logprobs[row] = -1 if sampling.num_logprobs is None else sampling.num_logprobs
        self.priority[row] = sequence.priority
        edits = LogitEdits.of(sampling)
        if edits is not None:
            self.logit_edits[row] = edits
        self._members_changed(prefilling=prefilling)
        return row

    def leave(self, sequence: Sequence) -> None:
        """Take the row back; what the table knows goes into the sequence's own fields."""
        row = sequence.row
        assert row is not None
        sequence.token_ids = self.token_ids[row, : self.num_tokens[row]].copy()
        sequence.num_computed_tokens = int(self.num_computed[row])
        self.block_table[row, : self.num_blocks[row]] = NULL_BLOCK
        self.logit_edits.pop(row, None)
        self.sequences[row] = None
        at = bisect.bisect_left(self.running, sequence.arrival, key=_arrival)
        del self.running[at]
        self._ordered_rows[at : len(self.running)] = self._ordered_rows[
            at + 1 : len(self.running) + 1
        ]
        sequence.row = None
        self._free_rows.append(row)
        self._members_changed(prefilling=bool(self.prefilling[row]))

    def append_blocks(self, at: np.ndarray, blocks: list[int]) -> None:
        """One more KV block for each of those at some places of `decoding`: theirs are full."""
        decoding = self.decoding
        rows = decoding.rows[at]
        count = self.num_blocks[rows]
        self.block_table[rows, count] = blocks
        self.num_blocks[rows] = count + 1
        for place, block in zip(at.tolist(), blocks, strict=True):
            decoding.members[place].blocks.append(block)
        table, width = decoding.block_table, int(count.max()) + 1
        if width > table.shape[1]:
            table = self.block_table[:, :width][decoding.rows]
        else:
            table[at, count] = blocks
        decoding.append_blocks(at, blocks, table)

    def advance(self, decoding: Decoding, token_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """All of what `decoding_of` gave computed one token, and have the next.

        Returns:
            See `Decoding.advance`.
        """
        if decoding is not self._decoding:  # others stay behind
            self._decoding = None
        ends = decoding.advance(token_ids)
        rows, num_computed = decoding.rows, decoding.num_computed
        self.token_ids[rows, num_computed] = token_ids
        self.num_computed[rows] = num_computed
        self.num_tokens[rows] = num_computed + 1
        return ends

    def append_tokens(
        self, rows: np.ndarray, token_ids: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Rows that are complete with this step have one token more; returns as `advance` does."""
        num_tokens = self.num_tokens[rows]
        self.token_ids[rows, num_tokens] = token_ids
        self.num_tokens[rows] = num_tokens + 1
        stopped = (self.stop_ids[rows] == token_ids[:, None]).any(axis=1)
        return stopped, num_tokens + 1 >= self.limit[rows]

    def end_prefill(self, row: int) -> None:
        """All known tokens of the row are computed: it decodes from now on."""
        self.prefilling[row] = False
        self._members_changed(prefilling=False)

    def _set_stop_ids(self, row: int, ids: tuple[int, ...]) -> None:
        missing = len(ids) - self.stop_ids.shape[1]
        if missing > 0:
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, missing)), constant_values=NO_TOKEN)
        self.stop_ids[row] = NO_TOKEN
        self.stop_ids[row, : len(ids)] = ids

    def _members_changed(self, *, prefilling: bool) -> None:
        """Somebody came or went; while prefilling, whoever decodes goes on."""
        self._prompts = None
        if not prefilling:
            self._decode_rows = self._decoding = None

    def _gather(self, rows: np.ndarray, members: list[Sequence]) -> Decoding:
        num_computed, num_blocks = self.num_computed.take(rows), self.num_blocks.take(rows)
        width = int(num_blocks.max(initial=1))
        return Decoding(
            rows,
            members,
            token_ids=self.token_ids[rows, num_computed],
            num_computed=num_computed,
            num_prompt=self.num_prompt.take(rows),
            position_delta=self.position_delta.take(rows),
            room=num_blocks * self.block_size,
            block_table=self.block_table[:, :width][rows],
            block_size=self.block_size,
            limit=self.limit.take(rows),
            stop_ids=self.stop_ids.take(rows, axis=0),
        )


def answer_limit(sequence: Sequence, *, max_model_len: int) -> int:
    """Tokens, prompt included, at which the answer ends with LENGTH."""
    request = sequence.request
    return min(request.num_prompt_tokens + request.sampling.max_tokens, max_model_len)


def stop_ids(sequence: Sequence, *, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Tokens that end the answer with STOP."""
    sampling = sequence.request.sampling
    return sampling.stop_token_ids + (() if sampling.ignore_eos else eos_token_ids)


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival
