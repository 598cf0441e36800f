"""Training batches, drawn in a process of their own.

Questions about one picture share its visual prefix: each is a branch with its own mask and
restarted positions, which gives the same result as separate prompts for a fraction of the cost.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from shapes_vlm import conversations, drawing, questions, scenes
from shapes_vlm.style import Trained

NO_LOSS = -100
SHARED_BRANCH, PADDING_BRANCH = -2, -1
MAX_BRANCH_TOKENS = 120  # of all branches of one picture
MAX_TURNS, MAX_CONVERSATION_TOKENS = 6, 170
_KINDS = {"shapes": 64, "text": 24, "grid": 9, "chart": 11}

Branch = tuple[list[int], list[int]]  # token ids, labels


@dataclasses.dataclass
class Pictures:
    """Pixels uint8 [n, H, W, 3] and patch labels [n, cells, 4, labels]."""

    pixels: np.ndarray
    labels: np.ndarray


@dataclasses.dataclass
class Questions:
    """Rows of branches behind one shared prefix; arrays [rows, T], padded to one length."""

    image_token: int
    prefix: np.ndarray  # [P]
    prefix_positions: np.ndarray  # [3, P]
    ids: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    branches: np.ndarray
    weights: np.ndarray


@dataclasses.dataclass
class Batch:
    """What one optimiser step sees; `questions` is None while the vision tower trains alone."""

    pictures: Pictures
    questions: Questions | None = None
    clutter: Pictures | None = None
    text: Questions | None = None


class Prompts:
    """Turns conversations into tokens exactly as the chat template does."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        token = tokenizer.convert_tokens_to_ids
        self._encode = lambda text: tokenizer.encode(text, add_special_tokens=False)
        self.end, self.image = token("<|im_end|>"), token("<|image_pad|>")
        self._vision_start, self._vision_end = token("<|vision_start|>"), token("<|vision_end|>")
        start = token("<|im_start|>")
        self._newline = self._encode("\n")
        self.user = [start, *self._encode("user"), *self._newline]
        self._assistant = [start, *self._encode("assistant"), *self._newline]
        self._words: dict[str, list[int]] = {}

    def words(self, text: str) -> list[int]:
        """Token ids of a text; texts repeat a lot, so they are remembered."""
        if text not in self._words:
            if len(self._words) > 20_000:
                self._words.clear()
            self._words[text] = self._encode(text)
        return self._words[text]

    def branch(self, turns: Sequence[tuple[str, str]]) -> Branch:
        """What follows the pictures of the first turn, and its labels."""
        ids: list[int] = []
        labels: list[int] = []
        for number, (question, answer) in enumerate(turns):
            opening = [*self._newline, *self.user] if number else []
            head = [*opening, *self.words(question), self.end, *self._newline, *self._assistant]
            tail = [*self.words(answer), self.end]
            ids += head + tail
            labels += [NO_LOSS] * len(head) + tail
        return ids, labels

    def prefix(self, grids: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray, int]:
        """Ids and M-RoPE positions up to the last picture, and the next position.

        `grids` holds (rows, columns) of visual tokens per picture.
        """
        ids = list(self.user)
        positions = [(i, i, i) for i in range(len(ids))]
        p = len(ids)
        for rows, columns in grids:
            cells = [(p + 1, p + 1 + j, p + 1 + i) for j in range(rows) for i in range(columns)]
            after = p + 1 + max(rows, columns)
            ids += [self._vision_start, *[self.image] * len(cells), self._vision_end]
            positions += [(p, p, p), *cells, (after, after, after)]
            p = after + 1
        return np.array(ids), np.array(positions).T, p


@dataclasses.dataclass(frozen=True)
class Mix:
    """What training shows: styles, and the share of images with a conversation."""

    styles: Trained = dataclasses.field(default_factory=Trained)
    share_conversations: float = 0.0


def draw(prompts: Prompts, rng: random.Random, progress: float, num_cells: int, mix: Mix) -> Batch:
    """Questions about pictures of one size, one in ten batches about two pictures each."""
    two = rng.random() < 0.1
    width, height = _size(rng, progress)
    if two and width * height > 224 * 224:
        width, height = 168, 168
    num_images = 2 if two else 1
    count = max(4, min(32, int(num_cells / (width * height / 784 * num_images))))
    kinds = rng.choices(list(_KINDS), list(_KINDS.values()), k=64)
    drawn: list[dict[str, Any]] = []
    rows: list[list[Branch]] = []
    while len(rows) < count:
        if two:
            look = mix.styles.draw(rng)
            new = [scenes.scene_shapes(rng, width, height, 4, style=look) for _ in range(2)]
            asked = conversations.two_image_questions(*new, rng, 4)
        else:
            look = mix.styles.draw(rng)
            new = [scenes.make_scene(rng, width, height, rng.choice(kinds), look)]
            most = {"text": 3, "grid": 5, "chart": 5}.get(new[0]["kind"], 10)
            asked = questions.questions(new[0], rng, most)
        if rng.random() < mix.share_conversations:
            row = _conversation(prompts, [turn for _, turns in asked for turn in turns], rng)
        else:
            row = _fit([prompts.branch(turns) for _, turns in asked])
        if row:
            rows.append(row)
            drawn += new
    ids, positions, start = prompts.prefix([(height // 28, width // 28)] * num_images)
    return Batch(_pictures(drawn, rng), _pack(prompts, rows, ids, positions, start))


def _conversation(
    prompts: Prompts, turns: list[tuple[str, str]], rng: random.Random
) -> list[Branch]:
    """One branch: two to six turns that follow each other."""
    turns = turns[: rng.randint(2, MAX_TURNS)]
    while turns and len(prompts.branch(turns)[0]) > MAX_CONVERSATION_TOKENS:
        turns.pop()
    return [prompts.branch(turns)] if turns else []


def draw_clutter(rng: random.Random, progress: float, num_cells: int, mix: Mix) -> Batch:
    """Dense scenes for the vision tower alone."""
    width, height = _size(rng, min(progress * 0.6, 0.5))
    count = max(4, min(48, int(2 * num_cells / (width * height / 784))))
    drawn = [
        scenes.clutter_scene(rng, width, height, mix.styles.draw(rng))
        if rng.random() < 0.7
        else scenes.make_scene(rng, width, height, style=mix.styles.draw(rng))
        for _ in range(count)
    ]
    return Batch(_pictures(drawn, rng))


def clutter_pictures(rng: random.Random, count: int, mix: Mix) -> Pictures:
    """Small cluttered pictures that keep characters and shapes coming for the vision tower."""
    drawn = [scenes.clutter_scene(rng, 140, 112, mix.styles.draw(rng)) for _ in range(count)]
    return _pictures(drawn, rng)


def draw_text(prompts: Prompts, rng: random.Random) -> Questions:
    """Conversations without a picture."""
    rows = [[prompts.branch(conversations.text_only(rng)[1])] for _ in range(32)]
    num_user = len(prompts.user)
    positions = np.arange(num_user)[None].repeat(3, 0)
    return _pack(prompts, rows, np.array(prompts.user), positions, num_user)


def _pictures(drawn: list[dict[str, Any]], rng: random.Random) -> Pictures:
    labels = [_merge_order(scenes.dense_labels(scene)) for scene in drawn]
    return Pictures(np.stack([drawing.render(s, rng) for s in drawn]), np.stack(labels))


def _fit(branches: list[Branch]) -> list[Branch]:
    row: list[Branch] = []
    for branch in branches:
        if sum(len(ids) for ids, _ in row) + len(branch[0]) > MAX_BRANCH_TOKENS:
            break
        row.append(branch)
    return row


def _pack(
    prompts: Prompts,
    rows: list[list[Branch]],
    prefix: np.ndarray,
    prefix_positions: np.ndarray,
    start: int,
) -> Questions:
    shape = (len(rows), max(sum(len(ids) for ids, _ in row) for row in rows))
    ids, labels = np.zeros(shape, np.int64), np.full(shape, NO_LOSS)
    positions, branches = np.zeros(shape, np.int64), np.full(shape, PADDING_BRANCH)
    for k, row in enumerate(rows):
        offset = 0
        for number, (branch_ids, branch_labels) in enumerate(row):
            at = slice(offset, offset + len(branch_ids))
            ids[k, at], labels[k, at], branches[k, at] = branch_ids, branch_labels, number
            positions[k, at] = start + np.arange(len(branch_ids))
            offset = at.stop
    weights = _weights(labels, branches, prompts.end)
    return Questions(
        prompts.image, prefix, prefix_positions, ids, labels, positions, branches, weights
    )


def _weights(labels: np.ndarray, branches: np.ndarray, end: int) -> np.ndarray:
    """End markers count little, and long answers (captions) do not drown short ones."""
    weights = np.where(labels == NO_LOSS, 0.0, np.where(labels == end, 0.25, 1.0))
    for k in range(len(labels)):
        for number in range(branches[k].max() + 1):
            member = branches[k] == number
            num_answers = max(1, (labels[k, member] == end).sum())
            num_tokens = max(1, (labels[k, member] != NO_LOSS).sum()) / num_answers
            weights[k, member] *= min(1.0, 4 / num_tokens)
    return weights.astype(np.float32)


def _merge_order(labels: np.ndarray) -> np.ndarray:
    """[gh, gw, k] per patch -> [cells, 4, k], the four patches behind each visual token."""
    h, w, k = labels.shape
    cells = labels.reshape(h // 2, 2, w // 2, 2, k).transpose(0, 2, 1, 3, 4)
    return cells.reshape(h // 2 * (w // 2), 4, k)


def _size(rng: random.Random, progress: float) -> tuple[int, int]:
    """Width and height: a curriculum from small to large over `progress` in [0, 1]."""
    if progress < 0.35:
        weights = {112: 4.0, 140: 2, 168: 4, 224: 1}
    elif progress < 0.65:
        weights = {112: 3.0, 140: 2, 168: 4, 196: 2, 224: 3, 280: 1}
    else:
        weights = {112: 2.0, 140: 2, 168: 3, 196: 2, 224: 3, 280: 2, 336: 1.5, 448: 0.5}
    while True:
        height, width = rng.choices(list(weights), list(weights.values()), k=2)
        if height * width <= 448 * 336 and max(height, width) <= 3 * min(height, width):
            return width, height
