"""The running sequences as a struct of arrays: one row per sequence, one column per field.

            token_ids                 num_tokens  num_computed  block_table   ...
    row 0   t0 t1 t2 t3 t4 .          5           4             7 9 0 0
    row 1   t0 t1 .                   2           0             3 0 0 0

A step over 256 decoding sequences takes a few numpy calls. Python code runs per sequence only if it
enters or leaves, fills a block, or runs a chunk of its prompt.

    PersistentBatch  row 0 1 2 3 ...      all running sequences, in arbitrary rows
    DecodeColumns    rows 2 0 3           the decoding sequences, oldest first, without gaps

A step reads the columns as inputs. While membership does not change, a step only increments some of
them: it gathers nothing by row. The batch builds new columns when membership changes.
"""

from __future__ import annotations

import bisect
import itertools
import operator

import numpy as np

from vlm_worker.core.block_kinds import BlockKinds
from vlm_worker.core.grammars import Matcher
from vlm_worker.core.kv_cache import NULL_BLOCK
from vlm_worker.core.sequence import Sequence, Status
from vlm_worker.core.step_values import LogitEdits, sampling_columns

NO_TOKEN = -1

_arrival = operator.attrgetter("arrival")


class PersistentBatch:
    """Rows for `num_rows` running sequences. Only the scheduler writes them.

    Attributes (N rows, L = max_model_len, B blocks for L tokens, K stop tokens):
        sequences: by row, None for a free row; running: the same, oldest first
        token_ids: int32 [N, L]
        num_tokens, num_computed, num_prompt, limit, num_entries, position_delta: int64 [N];
            `limit` is the number of tokens at which the answer ends
        num_dropped: int64 [N]; tokens before the answer whose KV was dropped (`pruning`)
        awaiting_pruning: the sequences that await it, in order of entry
        prefilling: bool [N]; True until all known tokens were computed
        block_table: int32 [N, B], padded with the null block; entries of `block_size` tokens,
            which are the blocks themselves if `kinds` has one kind
        stop_ids: int64 [N, K], padded with NO_TOKEN
        sampling: [N], by the name of each parameter of a draw
        num_logprobs: int64 [N]; -1 if the request wants none
        priority: int64 [N]
        logit_edits: by row, for the rows that want any
        matchers: by row, for the rows with a grammar
        scoring: the rows whose prompts are not scored as far as wanted (`prompt_scores`)
    """

    def __init__(
        self,
        num_rows: int,
        *,
        max_model_len: int,
        block_size: int,
        kinds: BlockKinds | None = None,
        eos_token_ids: tuple[int, ...] = (),
    ) -> None:
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.kinds = kinds or BlockKinds(block_size)
        self._text = self.kinds.of_text
        self.eos_token_ids = eos_token_ids
        self.sequences: list[Sequence | None] = [None] * num_rows
        self.running: list[Sequence] = []
        self.token_ids = np.zeros((num_rows, max_model_len), np.int32)
        self.num_tokens = np.zeros(num_rows, np.int64)
        self.num_computed = np.zeros(num_rows, np.int64)
        self.num_prompt = np.zeros(num_rows, np.int64)
        self.limit = np.zeros(num_rows, np.int64)
        self.num_entries = np.zeros(num_rows, np.int64)
        self.position_delta = np.zeros(num_rows, np.int64)
        self.num_dropped = np.zeros(num_rows, np.int64)
        self.awaiting_pruning: dict[Sequence, None] = {}
        self.prefilling = np.zeros(num_rows, np.bool_)
        # the last block may be narrow, and end behind the longest sequence
        width = -(-max_model_len // block_size) + self.kinds.num_parts - 1
        self.block_table = np.full((num_rows, width), NULL_BLOCK, np.int32)
        self.stop_ids = np.full((num_rows, max(1, len(eos_token_ids))), NO_TOKEN, np.int64)
        self.sampling = sampling_columns(num_rows)
        self.num_logprobs = np.full(num_rows, -1, np.int64)
        self.priority = np.zeros(num_rows, np.int64)
        self.logit_edits: dict[int, LogitEdits] = {}
        self.early_edits: dict[int, tuple[int, LogitEdits]] = {}
        self.matchers: dict[int, Matcher] = {}
        self.scoring: set[int] = set()
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self._ordered_rows = np.zeros(num_rows, np.int64)  # rows of `running`, in order
        self._decode_rows: np.ndarray | None = None
        self._prompts: list[Sequence] | None = None
        self._decode_columns: DecodeColumns | None = None

    def __len__(self) -> int:
        return len(self.sequences) - len(self._free_rows)

    @property
    def has_edits(self) -> bool:
        """Whether a row may have logit edits."""
        return bool(self.logit_edits or self.early_edits)

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    def top_priority(self, *, least: int) -> int:
        """The largest priority of the running sequences, at least `least`."""
        return int(self.priority[self._running_rows].max(initial=least))

    @property
    def min_steps_to_finish(self) -> float:
        """Expected steps until the next sequence finishes; 0 if none runs.

        The mean number of remaining tokens, divided by the number of running sequences. It assumes
        that each answer uses its full length.
        """
        rows = self._running_rows
        if not len(rows):
            return 0.0
        return float((self.limit[rows] - self.num_tokens[rows]).mean()) / len(rows)

    @property
    def decode_rows(self) -> np.ndarray:
        """Int64 [D], rows that decode, oldest first. The same array until membership changes."""
        if self._decode_rows is None:
            rows = self._running_rows
            self._decode_rows = rows[~self.prefilling[rows]]
        return self._decode_rows

    @property
    def decode_columns(self) -> DecodeColumns:
        """The columns of `decode_rows`.

        The same object until membership changes, or only some of the rows advance.
        """
        if self._decode_columns is None:
            decode = (~self.prefilling[self._running_rows]).tolist()
            members = list(itertools.compress(self.running, decode))
            self._decode_columns = DecodeColumns(self, self.decode_rows, members)
        return self._decode_columns

    def decode_columns_of(self, rows: np.ndarray) -> DecodeColumns:
        """The columns of `decode_rows`, or of some of these rows."""
        if rows is self._decode_rows:
            return self.decode_columns
        return DecodeColumns(self, rows, self.members(rows))

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
        return [s for row in rows.tolist() if (s := self.sequences[row]) is not None]

    def add(self, sequence: Sequence) -> None:
        """Copy a sequence's fields to a free row, and make it RUNNING."""
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
        self.limit[row] = max_total_tokens(sequence, max_model_len=self.max_model_len)
        entries = self.kinds.of(sequence).entries(sequence.blocks)
        self.num_entries[row] = len(entries)
        self.block_table[row, : len(entries)] = entries
        self.position_delta[row] = sequence.position_delta
        self.num_dropped[row] = sequence.num_dropped
        if sequence.awaits_pruning:
            self.awaiting_pruning[sequence] = None
        self.prefilling[row] = prefilling
        self._set_stop_ids(row, stop_ids(sequence, eos_token_ids=self.eos_token_ids))
        for name, column in self.sampling.items():
            column[row] = getattr(sampling, name)
        self.num_logprobs[row] = -1 if sampling.num_logprobs is None else sampling.num_logprobs
        self.priority[row] = sequence.priority
        self._set_edits(row, sequence)
        if sequence.matcher is not None:
            self.matchers[row] = sequence.matcher
        if not prefilling:
            sequence.num_scored = sequence.num_to_score  # where its prompt was computed
        elif sequence.num_scored < sequence.num_to_score:
            self.scoring.add(row)
        self._members_changed(prefilling=prefilling)

    def remove(self, sequence: Sequence) -> None:
        """Free a sequence's row, and write its tokens and counts back to its fields."""
        row = sequence.row
        assert row is not None
        sequence.token_ids = self.token_ids[row, : self.num_tokens[row]].copy()
        sequence.num_computed_tokens = int(self.num_computed[row])
        self.block_table[row, : self.num_entries[row]] = NULL_BLOCK
        self.logit_edits.pop(row, None)
        self.early_edits.pop(row, None)
        self.matchers.pop(row, None)
        self.scoring.discard(row)
        self.awaiting_pruning.pop(sequence, None)
        self.sequences[row] = None
        at = bisect.bisect_left(self.running, sequence.arrival, key=_arrival)
        del self.running[at]
        self._ordered_rows[at : len(self.running)] = self._ordered_rows[
            at + 1 : len(self.running) + 1
        ]
        sequence.row = None
        self._free_rows.append(row)
        self._members_changed(prefilling=bool(self.prefilling[row]))

    def prune(self, sequence: Sequence) -> None:
        """Take over `num_dropped` and the blocks of a sequence that was pruned."""
        row = sequence.row
        assert row is not None
        del self.awaiting_pruning[sequence]
        self.num_dropped[row] = sequence.num_dropped
        entries = self.kinds.of(sequence).entries(sequence.blocks)
        self.block_table[row, : self.num_entries[row]] = NULL_BLOCK
        self.num_entries[row] = len(entries)
        self.block_table[row, : len(entries)] = entries
        self._members_changed(prefilling=bool(self.prefilling[row]))

    def append_blocks(self, at: np.ndarray, blocks: list[int]) -> None:
        """Append a KV block to each of the `decode_columns` at the indices `at`: they are full.

        Answers are text, so all these blocks are of one kind.
        """
        columns, text = self.decode_columns, self._text
        rows = columns.rows[at]
        count = self.num_entries[rows]
        entries = np.reshape(text.entries(blocks), (len(blocks), -1))
        num_new = entries.shape[1]
        places = count[:, None] + np.arange(num_new)
        self.block_table[rows[:, None], places] = entries
        self.num_entries[rows] = count + num_new
        for place, block in zip(at.tolist(), blocks, strict=True):
            columns.members[place].blocks.append(block)
        width = int(count.max()) + num_new
        if width > columns.block_table.shape[1]:
            columns.block_table = self.block_table[:, :width][columns.rows]
        else:
            columns.block_table[at[:, None], places] = entries
        columns.capacity[at] += text.tail_size
        columns.slots[at] = entries[:, 0].astype(np.int64) * self.block_size

    def advance(
        self, columns: DecodeColumns, token_ids: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Record that all sequences of `columns` computed one token and sampled the next.

        `token_ids` is int64 [D]. Returns as `DecodeColumns.advance`.
        """
        if columns is not self._decode_columns:  # the other decoding rows do not advance
            self._decode_columns = None
        ends = columns.advance(token_ids)
        rows, num_computed = columns.rows, columns.num_computed
        self.token_ids[rows, num_computed] = token_ids
        self.num_computed[rows] = num_computed
        self.num_tokens[rows] = num_computed + 1
        return ends

    def append_tokens(
        self, rows: np.ndarray, token_ids: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Append a sampled token to rows whose prompt this step completed.

        Returns as `DecodeColumns.advance`.
        """
        num_tokens = self.num_tokens[rows]
        self.token_ids[rows, num_tokens] = token_ids
        self.num_tokens[rows] = num_tokens + 1
        stopped = (self.stop_ids[rows] == token_ids[:, None]).any(axis=1)
        return stopped, num_tokens + 1 >= self.limit[rows]

    def record_scored(self, sequence: Sequence, end: int) -> None:
        """Record that the positions of a prompt before `end` are scored."""
        sequence.num_scored = max(sequence.num_scored, min(end, sequence.num_to_score))
        if sequence.num_scored == sequence.num_to_score:
            assert sequence.row is not None
            self.scoring.discard(sequence.row)

    def end_prefill(self, sequence: Sequence) -> None:
        """Let a sequence decode: all its known tokens are computed."""
        self.prefilling[sequence.row] = False
        self._members_changed(prefilling=False)

    def edits_of(self, row: int) -> LogitEdits | None:
        """The edits of the next token of a row; None if its logits stay."""
        num_tokens, early = self.early_edits.get(row, (0, None))
        return early if self.num_tokens[row] < num_tokens else self.logit_edits.get(row)

    def _set_edits(self, row: int, sequence: Sequence) -> None:
        """Set the edits of a row, and those before its answer has `min_tokens`.

        They depend on the known tokens alone, so another worker continues identically.
        """
        request = sequence.request
        sampling, num_prompt = request.sampling, request.num_prompt_tokens
        edits = LogitEdits.of(sampling)
        if edits is not None:
            self.logit_edits[row] = edits
        if sampling.min_tokens:
            banned = stop_ids(sequence, eos_token_ids=self.eos_token_ids)
            early = LogitEdits.of(sampling, banned=banned)
            if early is not None:
                self.early_edits[row] = num_prompt + sampling.min_tokens, early

    def _set_stop_ids(self, row: int, ids: tuple[int, ...]) -> None:
        missing = len(ids) - self.stop_ids.shape[1]
        if missing > 0:
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, missing)), constant_values=NO_TOKEN)
        self.stop_ids[row] = NO_TOKEN
        self.stop_ids[row, : len(ids)] = ids

    def _members_changed(self, *, prefilling: bool) -> None:
        """Invalidate what depends on membership; a prefilling row is not among the decode rows."""
        self._prompts = None
        if not prefilling:
            self._decode_rows = self._decode_columns = None


def max_total_tokens(sequence: Sequence, *, max_model_len: int) -> int:
    """Tokens, prompt included, at which the answer ends with LENGTH."""
    request = sequence.request
    return min(request.num_prompt_tokens + request.sampling.max_tokens, max_model_len)


def stop_ids(sequence: Sequence, *, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Tokens that end the answer with STOP; one with a grammar ends by those of its vocabulary."""
    sampling = sequence.request.sampling
    if sequence.matcher is not None:
        return sampling.stop_token_ids + sequence.matcher.eos_token_ids
    return sampling.stop_token_ids + (() if sampling.ignore_eos else eos_token_ids)


class DecodeColumns:
    """The columns of D sequences that decode. Only the PersistentBatch writes them.

    Each sequence has one known token that is not computed yet.

    Attributes:
        rows: int64 [D], rows of the PersistentBatch.
        members: the sequences; always the same list object.
        token_ids: int64 [D], the token that is not computed yet.
        num_computed: int64 [D], tokens that are computed. `context_lens` are those that have KV, in
            int32, and `num_kv_tokens` is their sum.
        indices: int64 [D], index of the next token in its answer.
        slots: int64 [D], slot of the next token's KV; undefined while its block is missing.
        positions: int64 [P, D], positions of the token that is not computed yet.
        capacity: int64 [D], tokens that the blocks hold, and those that were dropped.
        block_table: int32 [D, B] for the B blocks of the longest; replaced when B grows.
    """

    def __init__(self, batch: PersistentBatch, rows: np.ndarray, members: list[Sequence]) -> None:
        self.rows, self.members = rows, members
        num_computed, num_entries = batch.num_computed.take(rows), batch.num_entries.take(rows)
        self.token_ids = batch.token_ids[rows, num_computed].astype(np.int64)
        num_dropped = batch.num_dropped.take(rows)
        num_kept = num_computed - num_dropped
        self.context_lens = num_kept.astype(np.int32)
        self.num_kv_tokens = int(num_kept.sum())
        self.capacity = num_entries * batch.block_size + num_dropped
        self.block_table = batch.block_table[:, : int(num_entries.max(initial=1))][rows]
        self._ends_at = batch.limit.take(rows) - 1  # the last token of an answer is never computed
        self._stop_ids = np.ascontiguousarray(batch.stop_ids.take(rows, axis=0).T)
        num_axes = members[0].positions.shape[0] if members else 1
        self._counts = np.empty((3 + num_axes, len(rows)), np.int64)  # incremented by each step
        self.num_computed: np.ndarray = self._counts[0]
        self.indices: np.ndarray = self._counts[1]
        self.slots: np.ndarray = self._counts[2]
        self.positions = self._counts[3:]
        self.num_computed[:] = num_computed
        np.subtract(num_computed + 1, batch.num_prompt.take(rows), out=self.indices)
        np.add(num_computed, batch.position_delta.take(rows), out=self.positions)
        index, offset = np.divmod(num_kept, batch.block_size)
        np.minimum(index, self.block_table.shape[1] - 1, out=index)  # if the next block is missing
        blocks = self.block_table[np.arange(len(rows)), index].astype(np.int64)
        np.add(blocks * batch.block_size, offset, out=self.slots)

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
