"""Held-out questions about one image each, by kind, and the groups that figures are given for.

    kind    what is asked: colour, a bar's value, a line of text; 19 kinds of `shapes`
    group   kinds whose questions are pooled: one class of questions, or a mix

A group pools equally many questions of each of its kinds, the first that were drawn. Questions are
a function of kind and seed. Training draws from other seeds, and each seed draws other questions.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Final, TypeVar

import int8_accuracy  # finds the worker and the examples
import numpy as np
from shapes_vlm import batches, build, heldout

assert int8_accuracy.ROOT

T = TypeVar("T")

SIDES: Final = (224, 280, 336)
"""Sides of the images in pixels: 64 to 144 visual tokens."""
SEED: Final = heldout.SEED + 17
"""No other run has drawn its questions from it: the levers were not chosen by their answers."""

CLASSES: Final[Mapping[str, tuple[str, ...]]] = {
    "attribute": ("color", "shape", "exist", "background", "text_color"),
    "locate": ("where", "rel_what", "extreme"),
    "read": ("ocr", "ocr_line", "char_count"),
    "count": ("count_all", "count_color", "count_shape", "bar_count", "grid_size"),
    "chart": ("bar_extreme", "bar_value"),
    "cell": ("cell",),
}
KINDS: Final = tuple(kind for kinds in CLASSES.values() for kind in kinds)
GROUPS: Final[Mapping[str, tuple[str, ...]]] = {
    "objects": ("color", "shape", "where", "rel_what", "extreme"),
    "read": ("ocr", "ocr_line"),
    **{name: CLASSES[name] for name in ("attribute", "locate", "count", "chart", "cell")},
    "all": KINDS,
}


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Question:
    """One question about one image.

    Attributes:
        kind: one of `KINDS`.
        rgb: uint8 `[height, width, 3]`.
        text: the question.
        answer: token ids of the right answer, the end of the turn included.
    """

    kind: str
    rgb: np.ndarray
    text: str
    answer: tuple[int, ...]


def num_per_group(group: str, questions: int) -> int:
    """How many questions of each kind a group of `questions` pools, rounded up."""
    return math.ceil(questions / len(GROUPS[group]))


def num_of_kind(kind: str, questions: int) -> int:
    """How many questions of a kind are drawn, so that every group has `questions`."""
    return max(num_per_group(name, questions) for name, kinds in GROUPS.items() if kind in kinds)


def draw(kind: str, count: int, *, seed: int) -> list[Question]:
    """The first `count` questions of a kind."""
    drawn = heldout.build(kind, count, SIDES, seed)
    return [
        Question(
            kind,
            np.asarray(item.images[0].convert("RGB")),
            item.turns[0][0],
            (*prompts().words(item.turns[0][1]), prompts().end),
        )
        for item in drawn
    ]


@functools.cache
def prompts() -> batches.Prompts:
    """Makes tokens of conversations exactly as the chat template of `shapes` does."""
    return batches.Prompts(build.make_tokenizer())


def token_ids(question: Question, cells: tuple[int, int]) -> tuple[list[int], int]:
    """The prompt with a whole image of these cells and the answer but for its last token.

    Returns:
        The token ids, and the index of the image's first placeholder.
    """
    before, _, _ = prompts().prefix([cells])
    behind, _ = prompts().branch([(question.text, "")])
    ids = [*before.tolist(), *behind[:-1], *question.answer[:-1]]  # the last one ends the answer
    return ids, ids.index(prompts().image)


def pooled(by_kind: Mapping[str, Sequence[T]], group: str, questions: int) -> list[T]:
    """The answers of a group of `questions`, kind by kind, each kind's first ones."""
    count = num_per_group(group, questions)
    return [answer for kind in GROUPS[group] for answer in by_kind[kind][:count]]
