"""Prompts that show how a model computes, and the packed steps that compute them. Pure.

    text [6 visual] text [4 visual] text | answer     chunks of both share steps,
    text | answer                                     cut where the assumed mask allows it

Logits at every position tell masks apart; those of the last one alone do not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from vlm_worker.attends import Attends
from vlm_worker.core.families import Family
from vlm_worker.core.image_geometry import Grid
from vlm_worker.core.step_values import ImageRows, SampleParams, StepInputs
from vlm_worker.types import ImageItem

NUM_ANSWER = 2
"""Tokens behind a prompt, computed as those of an answer."""
_SIDES = ((2, 3), (2, 2))


@dataclasses.dataclass(frozen=True, slots=True)
class Verification:
    """What a start has shown of the model of an unlisted family (`model.verify`).

    Attributes:
        attends: the mask whose logits are transformers'.
        difference: the worst row's root mean square, relative to the deviation of all logits.
        seconds: that it took.
    """

    attends: Attends
    difference: float
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Probe:
    """A prompt with an answer.

    Attributes:
        token_ids: int64 `[T]`, the answer's included.
        items: its images.
        positions: `[P, T]`.
        num_prompt: tokens before the answer.
    """

    token_ids: np.ndarray
    items: tuple[ImageItem, ...]
    positions: np.ndarray
    num_prompt: int

    @property
    def grids(self) -> list[Grid]:
        return [item.grid_thw for item in self.items]

    def spans(self, attends: Attends) -> tuple[tuple[int, int], ...]:
        """Ranges of tokens that see each other both ways."""
        if attends is Attends.PREFIX:
            return ((0, self.num_prompt),)
        if attends is Attends.CAUSAL:
            return ()
        return tuple((item.offset, item.end) for item in self.items)

    def chunk_end(self, start: int, size: int, attends: Attends) -> int:
        """The end of the chunk at `start` of about `size` tokens, which cuts no span."""
        end = min(start + size, len(self.token_ids))
        for first, last in self.spans(attends):
            if first < end < last:
                end = last
        return end


def make_probes(family: Family, *, avoid: Collection[int]) -> tuple[Probe, Probe]:
    """A prompt with two small images and one without, of random text without the ids `avoid`."""
    merge = family.processor.merge_size
    grids = [(1, height * merge, width * merge) for height, width in _SIDES]
    counts = [height * width for height, width in _SIDES]
    rng = np.random.default_rng(0)
    images = make_probe(family, rng, counts=counts, grids=grids, avoid=avoid)
    return images, make_probe(family, rng, counts=(), grids=(), avoid=avoid)


def make_probe(
    family: Family,
    rng: np.random.Generator,
    *,
    counts: Sequence[int],
    grids: Sequence[Grid],
    avoid: Collection[int],
) -> Probe:
    """A prompt of random text around images of these visual tokens and grids."""
    forbidden = {family.image_token_id, *avoid}
    usable = [i for i in range(3, min(family.vocab_size, 4096)) if i not in forbidden]
    ids: list[int] = rng.choice(usable, 5).tolist()
    items = []
    for count, grid in zip(counts, grids, strict=True):
        items.append(ImageItem(bytes(32), len(ids), count, grid))
        ids += [family.image_token_id] * count + rng.choice(usable, 3).tolist()
    ids += rng.choice(usable, 4 + NUM_ANSWER).tolist()
    positions, _ = family.positions_of(len(ids), items)
    return Probe(np.array(ids, np.int64), tuple(items), positions, len(ids) - NUM_ANSWER)


def num_blocks(probes: Sequence[Probe], block_size: int) -> int:
    """KV blocks that the steps need, the null block included."""
    return 1 + sum(-(-len(probe.token_ids) // block_size) for probe in probes)


def steps(
    probes: Sequence[Probe],
    embeddings: Sequence[Sequence[Any]],
    attends: Attends,
    *,
    block_size: int,
    chunk: int,
    first_sampled: int = 0,
) -> Iterator[tuple[StepInputs, list[int]]]:
    """The steps that compute all probes together, and the probe of each sampled row.

    `embeddings` are those of each probe's images. The tokens from `first_sampled` on are sampled: a
    row of a large vocabulary takes 1 MiB. A chunk has about `chunk` tokens; the answer is computed
    token by token.
    """
    done = [0] * len(probes)
    ends = np.cumsum([num_blocks([probe], block_size) - 1 for probe in probes]).tolist()
    blocks = [
        np.arange(end, begin, -1)  # in no order that memory has
        for begin, end in zip([0, *ends], ends, strict=False)
    ]
    while True:
        work: list[tuple[int, int, int]] = []
        for number, probe in enumerate(probes):
            start = done[number]
            if start < len(probe.token_ids):
                size = chunk if start < probe.num_prompt else 1
                end = probe.chunk_end(start, size, attends)
                if start < probe.num_prompt:
                    end = min(end, probe.num_prompt)
                work.append((number, start, end))
                done[number] = end
        if not work:
            return
        sampled = [max(start, first_sampled) for _, start, _ in work]
        owners = [
            number
            for (number, _, end), first in zip(work, sampled, strict=True)
            for _ in range(first, end)
        ]
        yield _inputs(probes, embeddings, blocks, work, sampled, attends, block_size), owners


def _inputs(
    probes: Sequence[Probe],
    embeddings: Sequence[Sequence[Any]],
    blocks: Sequence[np.ndarray],
    work: Sequence[tuple[int, int, int]],
    sampled: Sequence[int],
    attends: Attends,
    block_size: int,
) -> StepInputs:
    """One step of chunks (probe, start, end), each sampled from a position on."""
    table = np.zeros((len(work), max(len(blocks[number]) for number, _, _ in work)), np.int32)
    ids, positions, slots, rows, samples = [], [], [], [], []
    at = 0
    for row, (number, start, end) in enumerate(work):
        probe, index = probes[number], np.arange(start, end)
        ids.append(probe.token_ids[start:end])
        positions.append(probe.positions[:, start:end])
        slots.append(blocks[number][index // block_size] * block_size + index % block_size)
        table[row, : len(blocks[number])] = blocks[number]
        for item, embedding in zip(probe.items, embeddings[number], strict=True):
            first, last = max(start, item.offset), min(end, item.end)
            if first < last:
                offset = first - item.offset
                rows.append(ImageRows(embedding, offset, at + first - start, last - first))
        samples.append(np.arange(at + sampled[row] - start, at + end - start))
        at += end - start
    counts = [end - start for _, start, end in work]
    return StepInputs(
        token_ids=np.concatenate(ids),
        positions=np.concatenate(positions, axis=1),
        slot_mapping=np.concatenate(slots).astype(np.int64),
        query_start=np.cumsum([0, *counts]).astype(np.int32),
        context_lens=np.array([start for _, start, _ in work], np.int32),
        block_table=table,
        spans=tuple(probes[number].spans(attends) for number, _, _ in work),
        image_rows=tuple(rows),
        sample_rows=np.concatenate(samples),
        sampling=SampleParams.all_greedy(sum(map(len, samples))),
    )
