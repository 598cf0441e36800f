"""The values that pass between scheduler, batch builder and engine around one step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Seq

import numpy as np

from vlm_worker.core.sequence import Sequence
from vlm_worker.core.table import SequenceTable
from vlm_worker.types import FinishReason


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What one step computes: S sequences, decodes first.

    Attributes:
        rows: int64 [S], rows of the SequenceTable.
        counts: int64 [S], new tokens of each.
        samples: bool [S], whether the last new token's logits are sampled.
        decodes: int64 [D], those of `rows` that decode; the first ones, and the table's own array
            where all of its `decode_rows` are here.
    """

    rows: np.ndarray
    counts: np.ndarray
    samples: np.ndarray
    decodes: np.ndarray

    def __len__(self) -> int:
        """Sequences."""
        return len(self.rows)

    @classmethod
    def of(
        cls, table: SequenceTable, decodes: np.ndarray, chunks: Seq[tuple[Sequence, int]]
    ) -> Plan | None:
        """One token for each of the rows `decodes`, and chunks of prompts; None for nothing."""
        ones = np.ones(len(decodes), np.int64)
        if not chunks:
            samples = np.ones(len(decodes), np.bool_)
            return cls(decodes, ones, samples, decodes) if len(decodes) else None
        chunk_rows = np.array([sequence.row for sequence, _ in chunks], np.int64)
        chunk_counts = np.array([count for _, count in chunks], np.int64)
        rows = np.concatenate([decodes, chunk_rows])
        counts = np.concatenate([ones, chunk_counts])
        samples = table.num_computed[rows] + counts == table.num_tokens[rows]
        return cls(rows, counts, samples, decodes)

    @property
    def num_decodes(self) -> int:
        """How many of the first rows decode."""
        return len(self.decodes)

    @property
    def num_tokens(self) -> int:
        """New tokens."""
        if self.num_decodes == len(self.rows):
            return self.num_decodes
        return int(self.counts.sum())

    @property
    def sampled_rows(self) -> np.ndarray:
        """Rows that are sampled, in order."""
        return self.rows if self.num_decodes == len(self.rows) else self.rows[self.samples]

    def halves(self) -> tuple[Plan, Plan]:
        """The plan as two, to find out which half cannot be computed."""
        middle = len(self) // 2
        return self._slice(slice(0, middle)), self._slice(slice(middle, None))

    def without(self, rows: set[int]) -> Plan:
        """The plan without some rows."""
        keep = np.array([row not in rows for row in self.rows.tolist()], np.bool_)
        return self._slice(keep)

    def _slice(self, index: slice | np.ndarray) -> Plan:
        rows, decodes = self.rows[index], np.arange(len(self)) < self.num_decodes
        num_decodes = int(decodes[index].sum())
        return Plan(rows, self.counts[index], self.samples[index], rows[:num_decodes])


@dataclasses.dataclass(frozen=True, slots=True)
class Schedule:
    """What `schedule` decided.

    Attributes:
        plan: what to compute, or None.
        admitted: sequences that left the queue.
        preempted: sequences that lost their blocks and wait again.
        stalled: sequences that found an embedding missing, and the tokens computed before it; they
            wait until `Sequence.wake`.
        roomless: waiting sequences that found no KV blocks; meanwhile they hold no embeddings (E4).
    """

    plan: Plan | None
    admitted: list[Sequence]
    preempted: list[Sequence]
    stalled: list[tuple[Sequence, int]]
    roomless: list[Sequence]


@dataclasses.dataclass(frozen=True, slots=True)
class Said:
    """Who got a token, its index in the answer, and whose answer ended with it, and why."""

    sequences: list[Sequence]
    indices: list[int]
    finished: list[tuple[Sequence, FinishReason]]

    @classmethod
    def of(
        cls, sequences: list[Sequence], indices: list[int], stopped: np.ndarray, full: np.ndarray
    ) -> Said:
        """Of sequences of which a stop token ended some, and their length others: bool arrays."""
        finished = [
            (sequences[i], FinishReason.STOP if stopped[i] else FinishReason.LENGTH)
            for i in (stopped | full).nonzero()[0].tolist()
        ]
        return cls(sequences, indices, finished)

    def before(self, other: Said) -> Said:
        """Both, this one first."""
        return Said(
            self.sequences + other.sequences,
            self.indices + other.indices,
            self.finished + other.finished,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What a step brought, sequence by sequence.

    Attributes:
        sequences, token_ids, indices: who got which token, and its index in the answer.
        finished: whose answer ended with that token, and why.
        held: who keeps its KV for a peer now.
        prefilled: whose prompt advanced; tokens computed, and blocks written, by now.
        failed: whose logits were not finite; their KV is forgotten.
    """

    sequences: list[Sequence]
    token_ids: list[int]
    indices: list[int]
    finished: list[tuple[Sequence, FinishReason]]
    held: list[Sequence]
    prefilled: list[tuple[Sequence, int, int]]
    failed: list[Sequence]
