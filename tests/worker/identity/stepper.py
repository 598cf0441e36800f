"""Packed steps by hand: a runner driven without scheduler or engine, so that a test decides what
shares a step, where a chunk is cut, and what is sampled."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from worker.identity.questions import Question

from vlm_worker.attends import Attends
from vlm_worker.core.block_kinds import BlockKinds
from vlm_worker.core.step_values import ImageRows, SampleParams, StepInputs
from vlm_worker.model.runner import ModelRunner


@dataclasses.dataclass(eq=False)
class StepSequence:
    """A prompt and what follows it; `blocks` are its entries of the block table."""

    token_ids: list[int]
    positions: np.ndarray
    delta: int
    items: tuple[Any, ...]
    embeddings: list[Any]
    blocks: np.ndarray
    num_prompt: int
    num_computed: int = 0

    @property
    def answer(self) -> list[int]:
        """Tokens after the prompt."""
        return self.token_ids[self.num_prompt :]

    def positions_of(self, index: np.ndarray) -> np.ndarray:
        """`[P, len(index)]`: the prompt's own, then index + delta."""
        known = self.positions[:, index[index < self.positions.shape[1]]]
        rest = index[index >= self.positions.shape[1]] + self.delta
        return np.concatenate([known, np.tile(rest, (len(known), 1))], axis=1)


class Stepper:
    """Gives blocks in a scattered order and never takes them back."""

    def __init__(self, runner: ModelRunner, *, seed: int = 0) -> None:
        assert runner.kv_layout is not None
        self._runner, self._block_size = runner, runner.kv_layout.block_size
        self._kinds = BlockKinds.of_layout(runner.kv_layout)
        attends = runner.family.spec.attends
        self.bidirectional = attends.keeps_images_whole
        self._whole_prompts = attends is Attends.PREFIX
        order = np.random.default_rng(seed).permutation(np.arange(1, runner.num_blocks))
        self._free = order.astype(np.int32).tolist()

    def start(
        self,
        question: Question,
        delivered: Sequence[int],
        *,
        max_tokens: int,
        embeddings: Sequence[Any] | None = None,
    ) -> StepSequence:
        """A sequence with KV blocks for the answer; its images are encoded in one call."""
        if embeddings is None:
            embeddings = self._runner.encode(question.prepared_images)
        errors = [e for e in embeddings if isinstance(e, Exception)]
        assert not errors, errors
        positions, delta = self._runner.family.positions(question.token_ids, question.items)
        capacity = len(question.token_ids) + max_tokens
        shape = self._kinds.of_items(question.items)
        blocks = [self._free.pop() for _ in range(shape.num_blocks(capacity))]
        return StepSequence(
            token_ids=[*question.token_ids, *delivered],
            positions=positions,
            delta=delta,
            items=question.items,
            embeddings=list(embeddings),
            blocks=np.array(shape.entries(blocks), np.int32),
            num_prompt=len(question.token_ids),
        )

    def inputs(
        self, work: Sequence[tuple[StepSequence, int]], sampled: Sequence[Sequence[int]]
    ) -> StepInputs:
        """One step: `count` new tokens of each sequence; `sampled` are offsets into each chunk."""
        ids, positions, slots, rows, sample_rows = [], [], [], [], []
        table = np.zeros((len(work), max(len(s.blocks) for s, _ in work)), np.int32)
        at = 0
        for i, (sequence, count) in enumerate(work):
            index = np.arange(sequence.num_computed, sequence.num_computed + count)
            ids += [sequence.token_ids[j] for j in index]
            positions.append(sequence.positions_of(index))
            block = sequence.blocks[index // self._block_size].astype(np.int64)
            slots.append(block * self._block_size + index % self._block_size)
            table[i, : len(sequence.blocks)] = sequence.blocks
            for item, embedding in zip(sequence.items, sequence.embeddings, strict=True):
                first, last = max(index[0], item.offset), min(index[-1] + 1, item.end)
                if first < last:
                    src, dst = first - item.offset, at + first - index[0]
                    rows.append(ImageRows(embedding, int(src), int(dst), int(last - first)))
            sample_rows += [at + offset for offset in sampled[i]]
            at += count
        counts = [count for _, count in work]
        return StepInputs(
            token_ids=np.array(ids, np.int64),
            positions=np.concatenate(positions, axis=1),
            slot_mapping=np.concatenate(slots),
            query_start=np.cumsum([0, *counts]).astype(np.int32),
            context_lens=np.array([s.num_computed for s, _ in work], np.int32),
            block_table=table,
            spans=tuple(self._spans(sequence) for sequence, _ in work),
            image_rows=tuple(rows),
            sample_rows=np.array(sample_rows, np.int64),
            sampling=SampleParams.all_greedy(len(sample_rows)),
        )

    def generate(
        self, sequences: Sequence[StepSequence], *, max_tokens: int, chunk: int, eos: int | None
    ) -> None:
        """Greedy answers of all sequences together, prompts in chunks of at most `chunk` tokens."""
        live = list(sequences)
        while live:
            work = [(s, self._count(s, chunk)) for s in live]
            done = [s.num_computed + count == len(s.token_ids) for s, count in work]
            sampled = [[count - 1] if d else [] for (_, count), d in zip(work, done, strict=True)]
            tokens = iter(self._runner.execute(self.inputs(work, sampled)).token_ids.tolist())
            for (sequence, count), complete in zip(work, done, strict=True):
                sequence.num_computed += count
                if complete:
                    sequence.token_ids.append(next(tokens))
            live = [
                s for s in live
                if len(s.answer) < max_tokens and not (s.answer and s.answer[-1] == eos)
            ]  # fmt: skip

    def forced_logits(
        self, sequences: Sequence[StepSequence], answers: Sequence[Sequence[int]], *, chunk: int
    ) -> list[np.ndarray]:
        """Logits of every answer position while the given answers are fed, all together."""
        for sequence, tokens in zip(sequences, answers, strict=True):
            sequence.token_ids += tokens[:-1]
        logits: list[list[np.ndarray]] = [[] for _ in sequences]
        while any(s.num_computed < len(s.token_ids) for s in sequences):
            live = [i for i, s in enumerate(sequences) if s.num_computed < len(s.token_ids)]
            work = [(s, self._count(s, chunk)) for s in map(sequences.__getitem__, live)]
            sampled = [
                [j for j in range(count) if s.num_computed + j >= s.num_prompt - 1]
                for s, count in work
            ]
            rows = iter(self._runner.logits(self.inputs(work, sampled)).cpu().numpy())
            for i, (sequence, count), wanted in zip(live, work, sampled, strict=True):
                sequence.num_computed += count
                logits[i] += [next(rows) for _ in wanted]
        return [np.stack(rows) for rows in logits]

    def _spans(self, sequence: StepSequence) -> tuple[tuple[int, int], ...]:
        """Images, or the prompt, whose tokens see each other in both directions."""
        if self._whole_prompts:
            return ((0, sequence.num_prompt),)
        items = sequence.items if self.bidirectional else ()
        return tuple((item.offset, item.end) for item in items)

    def _count(self, sequence: StepSequence, chunk: int) -> int:
        """The next chunk, as long as it must be to leave such an image, or block, whole."""
        end = min(sequence.num_computed + chunk, len(sequence.token_ids))
        for first, last in self._spans(sequence):
            if first < end < last:
                end = last
        if self._kinds.min_chunk > 1:
            shape = self._kinds.of_items(sequence.items)
            whole = shape.whole_end(end)
            end = whole if whole > sequence.num_computed else whole + self._kinds.min_chunk
        return end - sequence.num_computed
