"""The values of one step: plan, model inputs and outputs, results. Plain numpy.

A packed batch: the new tokens of all sequences are concatenated on one axis of length T.

      sequence 0 (decode)   sequence 1 (a chunk of prefill)     sequence 2 (decode)
      |t0|                  |t1 t2 t3 t4 t5|                     |t6|
      query_start = [0, 1, 6, 7]

The arrays may be views of buffers that the next step reuses: a runner copies what it keeps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import numpy as np

from vlm_worker.core.grammars import Matcher
from vlm_worker.core.sequence import Sequence
from vlm_worker.types import PARAMETERS, FinishReason, SamplingParams, TokenLogprobs


@dataclasses.dataclass(frozen=True, slots=True)
class ImageRows:
    """Rows of one encoder output that replace token embeddings in this step.

    `num_rows` rows from `src_start` on go to the packed positions from `dst_start` on. `places` is
    int16 `[rows of the embedding, 2]` if the image is reduced: row and column of each one's cell.
    """

    embedding: Any
    src_start: int
    dst_start: int
    num_rows: int
    places: np.ndarray | None = None


BANNED = -1e9
"""A bias that no logit outweighs. It is finite: an infinite logit is an error of the model."""

_NO_PENALTIES = {field.name: field.default for field, one in PARAMETERS if one.is_penalty}


@dataclasses.dataclass(frozen=True, slots=True)
class LogitEdits:
    """Changes to a request's logits before sampling; `SamplingParams` defines the penalties.

    `penalties` has all of them by name. `bias_ids` is int64 [B], `bias_values` float32 [B].
    """

    penalties: Mapping[str, float]
    bias_ids: np.ndarray
    bias_values: np.ndarray

    @classmethod
    def of(cls, sampling: SamplingParams, *, banned: Iterable[int] = ()) -> LogitEdits | None:
        """The edits of a request that may not get `banned` tokens; None if it changes no logits."""
        penalties = {name: getattr(sampling, name) for name in _NO_PENALTIES}
        biases = dict(sampling.logit_bias) | dict.fromkeys(banned, BANNED)
        if penalties == _NO_PENALTIES and not biases:
            return None
        ids, values = list(biases), list(biases.values())
        return cls(penalties, np.array(ids, np.int64), np.array(values, np.float32))


@dataclasses.dataclass(frozen=True, slots=True)
class EditedRow:
    """One of the R rows whose logits are edited.

    `token_ids` is an int32 view: the `num_prompt` tokens of the prompt, then the answer so far,
    tokens of earlier attempts included.
    """

    row: int
    edits: LogitEdits
    token_ids: np.ndarray
    num_prompt: int


@dataclasses.dataclass(frozen=True, slots=True)
class ConstrainedRow:
    """One of the R rows whose token must follow a grammar.

    `answer` is an int32 view: the tokens of the answer so far, of earlier attempts too.
    """

    row: int
    matcher: Matcher
    answer: np.ndarray


class Masks(Protocol):
    """The tokens that rows may get (`vlm_kernels.sampling.Masks`)."""

    @property
    def rows(self) -> np.ndarray:
        """int32 [R], the mask of each row; -1 if it has none."""

    def words(self) -> np.ndarray:
        """uint32 [M, ceil(V / 32)]; the first call may wait until they are filled."""


@dataclasses.dataclass(frozen=True, slots=True)
class SampleParams:
    """Sampling of the rows in `StepInputs.sample_rows`; arrays of the same length R.

    `greedy` is True if every row is greedy, the fast path. `columns` has the parameters of a draw
    by name. `index` is the index of the token in its answer: the generator of a row is a function
    of (seed, index). `num_logprobs` is None if no row wants any, and -1 for rows that want none.
    `constrained` are the rows with a grammar; the engine fills their `masks` during the step.
    """

    greedy: bool
    columns: Mapping[str, np.ndarray]  # [R], `Parameter.dtype`
    index: np.ndarray  # [R] int64
    num_logprobs: np.ndarray | None = None  # [R] int64
    edited: tuple[EditedRow, ...] = ()
    constrained: tuple[ConstrainedRow, ...] = ()
    masks: Masks | None = None

    @classmethod
    def all_greedy(cls, num_rows: int) -> SampleParams:
        """Parameters of `num_rows` greedy rows, each the first token of its answer."""
        return cls(True, sampling_columns(num_rows), np.zeros(num_rows, np.int64))


def sampling_columns(num_rows: int) -> dict[str, np.ndarray]:
    """An array for each parameter of a draw, with its default."""
    return {
        field.name: np.full(num_rows, field.default, parameter.dtype)
        for field, parameter in PARAMETERS
        if parameter.dtype is not None
    }


@dataclasses.dataclass(frozen=True, slots=True)
class ScoredRows:
    """Q packed positions of prompts whose logits give the log-probability of the next token.

    Attributes:
        rows: [Q] int64; packed positions.
        token_ids: [Q] int64; the prompt's token behind each.
        num_top: the largest number of likeliest tokens that a sequence wants.
    """

    rows: np.ndarray
    token_ids: np.ndarray
    num_top: int


@dataclasses.dataclass(frozen=True, slots=True)
class StepInputs:
    """One step. T new tokens of S sequences; R of them are sampled.

    Attributes:
        token_ids: [T] int64; placeholders included (a runner masks ids beyond its vocabulary).
        positions: [P, T] int64; P is 1, or 3 for M-RoPE.
        slot_mapping: [T] int64; `entry * block_size + offset` where each new token's KV goes; an
            entry is a block, or a part of one (`block_kinds`).
        query_start: [S + 1] int32; s owns packed tokens query_start[s] : query_start[s + 1].
        context_lens: [S] int32; tokens of s whose KV was written by earlier steps.
        block_table: [S, B] int32; the blocks of s, padded with the null block 0.
        spans: per sequence, the [start, end) token ranges of its images, absolute in the sequence,
            for families with bidirectional attention within an image; empty for all others.
        image_rows: embedding rows that this step reads.
        sample_rows: [R] int64; packed positions whose logits are sampled.
        sampling: parameters of these R rows.
        scored: rows whose prompt tokens get log-probabilities; None if no sequence wants them.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    slot_mapping: np.ndarray
    query_start: np.ndarray
    context_lens: np.ndarray
    block_table: np.ndarray
    spans: tuple[tuple[tuple[int, int], ...], ...]
    image_rows: tuple[ImageRows, ...]
    sample_rows: np.ndarray
    sampling: SampleParams
    scored: ScoredRows | None = None


NOT_FINITE = -1
"""The token id of a row whose logits have NaN or infinity, or whose grammar allows no token."""


@dataclasses.dataclass(frozen=True, slots=True)
class Scores:
    """Log-probabilities of the Q tokens of `ScoredRows`, of the model's own distribution.

    Attributes:
        logprobs: [Q] float32; NaN in a row whose logits have NaN or infinity.
        ranks: [Q] int64; 1 if no other token is likelier.
        top_ids, top_logprobs: [Q, K] int64 and float32, most likely first.
    """

    logprobs: np.ndarray
    ranks: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray

    def has_shape(self, num_rows: int) -> bool:
        """Whether there are results for `num_rows` rows."""
        has_rows = self.logprobs.shape == self.ranks.shape == (num_rows,)
        return has_rows and len(self.top_ids) == num_rows == len(self.top_logprobs)


@dataclasses.dataclass(frozen=True, slots=True)
class StepOutput:
    """The results of the R sampled rows of a step, and those of its scored rows.

    Attributes:
        token_ids: [R] int64; `NOT_FINITE` fails only the sequence of that row.
        logprobs: [R] float32, of these tokens; None if no row wants any.
        top_ids, top_logprobs: [R, K] int64 and float32, most likely first; K is the largest number
            that a row wants.
        scores: of the rows in `StepInputs.scored`; None without any.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray | None = None
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    scores: Scores | None = None

    @property
    def _arrays(self) -> tuple[np.ndarray | None, ...]:
        return self.token_ids, self.logprobs, self.top_ids, self.top_logprobs

    def has_shape(self, num_rows: int, scored: ScoredRows | None) -> bool:
        """Whether every array has `num_rows` rows, and the scores those of `scored`."""
        if scored is not None and not (self.scores and self.scores.has_shape(len(scored.rows))):
            return False
        has_rows = all(array is None or len(array) == num_rows for array in self._arrays)
        return has_rows and self.token_ids.ndim == 1

    def failing(self, is_failed: np.ndarray) -> StepOutput:
        """The output with `NOT_FINITE` in the sampled rows of bool [R] `is_failed`."""
        token_ids = np.where(is_failed, NOT_FINITE, self.token_ids)
        return dataclasses.replace(self, token_ids=token_ids)

    @property
    def finite(self) -> StepOutput:
        """The sampled rows of the output without those of `NOT_FINITE`."""
        kept = self.token_ids != NOT_FINITE
        return StepOutput(
            self.token_ids[kept],
            *(None if array is None else array[kept] for array in self._arrays[1:]),
        )

    def logprobs_of(self, row: int, num_top: int) -> TokenLogprobs:
        """The logprobs of a row and of its `num_top` likeliest tokens; the step must have them."""
        assert self.logprobs is not None
        assert self.top_ids is not None
        assert self.top_logprobs is not None
        ids, values = self.top_ids[row, :num_top], self.top_logprobs[row, :num_top]
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
        return TokenLogprobs(float(self.logprobs[row]), top)


@dataclasses.dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step computes: S sequences, decodes first.

    Attributes:
        rows: int64 [S], rows of the PersistentBatch.
        counts: int64 [S], new tokens of each.
        samples: bool [S], whether the last new token's logits are sampled.
        decodes: int64 [D], those of `rows` that decode: the first D. It is the batch's own array
            `decode_rows` if all of these are in the plan.
    """

    rows: np.ndarray
    counts: np.ndarray
    samples: np.ndarray
    decodes: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def num_decodes(self) -> int:
        return len(self.decodes)

    @property
    def num_tokens(self) -> int:
        """New tokens of all sequences."""
        if self.num_decodes == len(self.rows):
            return self.num_decodes
        return int(self.counts.sum())

    @property
    def sampled_rows(self) -> np.ndarray:
        """Rows that are sampled, in order."""
        return self.rows if self.num_decodes == len(self.rows) else self.rows[self.samples]

    def halves(self) -> tuple[StepPlan, StepPlan]:
        """The plan as two, to find the half that fails."""
        middle = len(self) // 2
        return self._slice(slice(0, middle)), self._slice(slice(middle, None))

    def without(self, rows: set[int]) -> StepPlan:
        keep = np.array([row not in rows for row in self.rows.tolist()], np.bool_)
        return self._slice(keep)

    def _slice(self, index: slice | np.ndarray) -> StepPlan:
        rows, decodes = self.rows[index], np.arange(len(self)) < self.num_decodes
        num_decodes = int(decodes[index].sum())
        return StepPlan(rows, self.counts[index], self.samples[index], rows[:num_decodes])


@dataclasses.dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """What `schedule` decided: the plan if there is work, and the sequences that it changed.

    Attributes:
        preempted: they lost their blocks and wait again.
        blocked_on_embedding: they lack an embedding after that many computed tokens, and wait until
            `Sequence.unblock`.
        blocked_on_kv: they wait for KV blocks, and hold no embeddings (E4).
    """

    plan: StepPlan | None
    admitted: list[Sequence]
    preempted: list[Sequence]
    blocked_on_embedding: list[tuple[Sequence, int]]
    blocked_on_kv: list[Sequence]


@dataclasses.dataclass(slots=True)
class StepOutcome:
    """The results of a step by sequence. `Scheduler.update` is its only writer.

    Attributes:
        sequences, token_ids, indices: each new token, and its index in the answer.
        finished: the answers that ended with that token, and why.
        held: they keep their KV for a peer now.
        prefilled: prompts that advanced; tokens computed and blocks written so far.
        failed: their logits were not finite, or their grammar allows no token; their KV is
            invalidated.
    """

    sequences: list[Sequence] = dataclasses.field(default_factory=list)
    token_ids: list[int] = dataclasses.field(default_factory=list)
    indices: list[int] = dataclasses.field(default_factory=list)
    finished: list[tuple[Sequence, FinishReason]] = dataclasses.field(default_factory=list)
    held: list[Sequence] = dataclasses.field(default_factory=list)
    prefilled: list[tuple[Sequence, int, int]] = dataclasses.field(default_factory=list)
    failed: list[Sequence] = dataclasses.field(default_factory=list)
