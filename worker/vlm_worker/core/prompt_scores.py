"""Decides which positions of prompts a step scores, and gives the results to their sequences. Pure.

The logits of position i have the log-probability of token i + 1. A chunk [s, e) of P prompt tokens:

    position   s     s+1   ...  e-1           at most P - 2: the logits of P - 1 choose the answer
    scores     s+1   s+2   ...  e             at least the first that no earlier step scored

A preempted sequence is computed again, and scored from where it was. So each token is scored once,
in order, however the prompt is cut into chunks.
"""

from __future__ import annotations

import dataclasses
from array import array

import numpy as np

from vlm_worker.core.persistent_batch import PersistentBatch
from vlm_worker.core.sequence import Sequence
from vlm_worker.core.step_values import ScoredRows, Scores, StepPlan
from vlm_worker.types import PromptLogprobs


@dataclasses.dataclass(frozen=True, slots=True)
class ScoredChunk:
    """Positions `[start, end)` of a sequence that a step scores, the first at packed row `at`."""

    sequence: Sequence
    start: int
    end: int
    at: int

    @property
    def num_top(self) -> int:
        return self.sequence.request.sampling.num_prompt_logprobs or 0


def scored_chunks(batch: PersistentBatch, plan: StepPlan) -> list[ScoredChunk]:
    """The positions that a step scores, in the order of its plan, before the step is recorded."""
    if not batch.scoring:
        return []
    chunks, at = [], plan.num_decodes
    rows, counts = plan.rows[at:].tolist(), plan.counts[at:].tolist()
    for row, count in zip(rows, counts, strict=True):
        sequence = batch.sequences[row]
        if row in batch.scoring and sequence is not None:
            computed = int(batch.num_computed[row])
            start = max(computed, sequence.num_scored)
            end = min(computed + count, sequence.num_to_score)
            if start < end:
                chunks.append(ScoredChunk(sequence, start, end, at + start - computed))
        at += count
    return chunks


def scored_rows(chunks: list[ScoredChunk]) -> ScoredRows | None:
    """What a runner computes for these chunks; None if there are none."""
    if not chunks:
        return None
    rows = [np.arange(one.at, one.at + one.end - one.start, dtype=np.int64) for one in chunks]
    token_ids = [one.sequence.request.token_ids[one.start + 1 : one.end + 1] for one in chunks]
    return ScoredRows(
        np.concatenate(rows),
        np.concatenate([np.array(ids, np.int64) for ids in token_ids]),
        max(one.num_top for one in chunks),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkScores:
    """The results of one chunk: those of `ScoredRows` from `first` on."""

    chunk: ScoredChunk
    scores: Scores
    first: int

    @property
    def is_finite(self) -> bool:
        """Whether no logits of the chunk have NaN or infinity."""
        last = self.first + self.chunk.end - self.chunk.start
        return not bool(np.isnan(self.scores.logprobs[self.first : last]).any())

    def logprobs(self, offset: int, count: int) -> PromptLogprobs:
        """The values of `count` tokens from the chunk's token number `offset` on."""
        scores = self.scores
        part = slice(self.first + offset, self.first + offset + count)
        top_ids = scores.top_ids[part, : self.chunk.num_top]
        top_logprobs = scores.top_logprobs[part, : self.chunk.num_top]
        return PromptLogprobs(
            self.chunk.start + 1 + offset,
            array("f", scores.logprobs[part].astype(np.float32).tobytes()),
            array("I", scores.ranks[part].astype(np.uint32).tobytes()),
            top_ids.shape[1],
            array("I", top_ids.astype(np.uint32).tobytes()),
            array("f", top_logprobs.astype(np.float32).tobytes()),
        )

    def parts(self, size: int) -> list[tuple[int, int]]:
        """The chunk as (offset, count) of at most `size` tokens."""
        total = self.chunk.end - self.chunk.start
        return [(offset, min(size, total - offset)) for offset in range(0, total, size)]


def by_chunk(chunks: list[ScoredChunk], scores: Scores | None) -> list[ChunkScores]:
    """The results of each chunk."""
    if not chunks:
        return []
    assert scores is not None, "the runner did not score"
    found, first = [], 0
    for chunk in chunks:
        found.append(ChunkScores(chunk, scores, first))
        first += chunk.end - chunk.start
    return found
