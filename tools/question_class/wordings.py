"""Reads wordings and generates questions from them, the same ones for the same seed.

wordings.txt + slots.txt ─▶ Wording(class, text with {slots}) ─▶ Example(text, target, wording)
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from vlm_worker.gateway.question_class import LEARNED, QuestionClass

FOLDER = Path(__file__).parent
SLOT = re.compile(r"\{(\w+)\}")
_SHAPES = re.compile(r"\{(shape|outer)\}|the text|the grid")

EXAMPLES_PER_WORDING = 6
SHAPES_WEIGHT = 5.0
NUM_DOUBLE = 600
"""Examples that ask for two classes at once. Their target is half of each, so neither is sure."""

BEFORE = (
    "Please",
    "Look at the image.",
    "Hi,",
    "Hello, can you help me?",
    "Question:",
    "Based on the image,",
    "In this picture,",
    "You are a helpful assistant.",
    "I attached a photo.",
    "Consider the following image and answer.",
)
AFTER = (
    "Thanks.",
    "Please.",
    "Answer briefly.",
    "Answer with one word.",
    "Answer the question using a single word or phrase.",
    "Answer yes or no.",
    "Think step by step.",
    "Give only the answer.",
    "Be precise.",
    "Reply in JSON.",
)
"""Phrases that say nothing of the class. Alone, they are examples of no class."""
PHRASE_WEIGHT = 3.0


@dataclasses.dataclass(frozen=True, slots=True)
class Wording:
    """One way to ask, with {slots}."""

    question_class: QuestionClass
    text: str

    @property
    def weight(self) -> float:
        """SHAPES_WEIGHT for a wording about colours and shapes: many classes share their words."""
        return SHAPES_WEIGHT if _SHAPES.search(self.text) else 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Example:
    """A question. `targets` are probabilities of LEARNED; `wordings` are indices of its sources."""

    text: str
    targets: tuple[float, ...]
    weight: float
    wordings: tuple[int, ...]


def read(name: str) -> list[Wording]:
    """The wordings of a file of this folder: `[class]` lines, each with its wordings below it."""
    found = []
    question_class = QuestionClass.UNSURE
    for line in (FOLDER / name).read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            question_class = QuestionClass(line.strip("[]"))
        elif line and not line.startswith("#"):
            found.append(Wording(question_class, line))
    return found


def slots() -> dict[str, tuple[str, ...]]:
    """The words of each slot."""
    lines = (FOLDER / "slots.txt").read_text(encoding="utf-8").splitlines()
    pairs = (line.split(": ", 1) for line in lines if not line.startswith("#"))
    return {name: tuple(words.split(", ")) for name, words in pairs}


def fill(text: str, fillers: Mapping[str, Sequence[str]], rng: random.Random) -> str:
    """The text with a word in each slot."""
    return SLOT.sub(lambda slot: rng.choice(fillers[slot[1]]), text)


def examples(wordings: Sequence[Wording], *, seed: int = 17) -> list[Example]:
    """Questions of all wordings, each wording with its weight in total.

    Of four examples in turn, one is bare; the others have a phrase before it, after it, or both.
    """
    rng, fillers, made = random.Random(seed), slots(), []
    for index, wording in enumerate(wordings):
        targets = tuple(float(one is wording.question_class) for one in LEARNED)
        for number in range(EXAMPLES_PER_WORDING):
            text = fill(wording.text, fillers, rng)
            before, after = rng.choice(BEFORE), rng.choice(AFTER)
            text = f"{before} {text}" if number & 1 else text
            text = f"{text} {after}" if number & 2 else text
            made.append(Example(text, targets, wording.weight / EXAMPLES_PER_WORDING, (index,)))
    for _ in range(NUM_DOUBLE):
        pair = rng.sample(range(len(wordings)), 2)
        classes = [wordings[index].question_class for index in pair]
        both = [fill(wordings[index].text, fillers, rng) for index in pair]
        text = rng.choice((" ", " and ")).join(both)
        targets = tuple(classes.count(one) / 2 for one in LEARNED)
        made.append(Example(text, targets, 1 / EXAMPLES_PER_WORDING, tuple(pair)))
    nothing = (1 / len(LEARNED),) * len(LEARNED)
    return made + [Example(text, nothing, PHRASE_WEIGHT, ()) for text in (*BEFORE, *AFTER)]


def vocabulary(wordings: Sequence[Wording]) -> list[str]:
    """All texts whose words the classifier knows."""
    filler = [word for words in slots().values() for word in words]
    return [*(SLOT.sub(" ", wording.text) for wording in wordings), *filler, *BEFORE, *AFTER]
