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
        num_decodes: how many of the first rows decode.
    """

    rows: np.ndarray
    counts: np.ndarray
    samples: np.ndarray
    num_decodes: int

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
            return cls(decodes, ones, samples, len(decodes)) if len(decodes) else None
        chunk_rows = np.array([sequence.row for sequence, _ in chunks], np.int64)
        chunk_counts = np.array([count for _, count in chunks], np.int64)
        rows = np.concatenate([decodes, chunk_rows])
        counts = np.concatenate([ones, chunk_counts])
        samples = table.num_computed[rows] + counts == table.num_tokens[rows]
        return cls(rows, counts, samples, len(decodes))

    @property
    def num_tokens(self) -> int:
        """New tokens."""
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
        decodes = np.arange(len(self)) < self.num_decodes
        return Plan(
            self.rows[index],
            self.counts[index],
            self.samples[index],
            int(decodes[index].sum()),
        )


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
