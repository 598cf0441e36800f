"""Accuracy of the classifier on wordings that its training did not see.

right at all      the best class is the right one, whatever its probability
right where sure  the same, of the questions with a probability of at least MIN_PROBABILITY
lost              sure of a wrong class whose images are reduced: what costs accuracy
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from question_class.train import Problem, fit, rounded
from question_class.wordings import Wording, examples
from vlm_worker.gateway.question_class import (
    LEARNED,
    MIN_PROBABILITY,
    QuestionClass,
    Weights,
    classify,
    features,
    words,
)

NATIVE = frozenset({QuestionClass.CHART, QuestionClass.SCENE, QuestionClass.UNSURE})
"""Classes whose images are not reduced."""


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """The best class of a question and its probability."""

    wording: Wording
    text: str
    best: QuestionClass
    probability: float

    @property
    def is_right(self) -> bool:
        return self.best is self.wording.question_class

    @property
    def is_sure(self) -> bool:
        return self.probability >= MIN_PROBABILITY

    @property
    def is_lost(self) -> bool:
        return self.is_sure and not self.is_right and self.best not in NATIVE


@dataclasses.dataclass(frozen=True, slots=True)
class Accuracy:
    """Shares of `questions`; `right_where_sure` is a share of those that are sure."""

    questions: int
    right: float
    sure: float
    right_where_sure: float
    lost: float

    def __str__(self) -> str:
        return (
            f"{self.questions:5d} questions, right {self.right:.1%}, sure {self.sure:.1%}, "
            f"right where sure {self.right_where_sure:.1%}, lost {self.lost:.1%}"
        )


def accuracy(outcomes: Sequence[Outcome]) -> Accuracy:
    """Of at least one outcome."""
    num, sure = len(outcomes), [one for one in outcomes if one.is_sure]
    return Accuracy(
        questions=num,
        right=sum(one.is_right for one in outcomes) / num,
        sure=len(sure) / num,
        right_where_sure=sum(one.is_right for one in sure) / max(1, len(sure)),
        lost=sum(one.is_lost for one in outcomes) / num,
    )


def held_out(weights: Weights, wordings: Sequence[Wording]) -> list[Outcome]:
    """The outcomes of questions without slots, those of UNSURE left out."""
    asked = [one for one in wordings if one.question_class is not QuestionClass.UNSURE]
    return [outcome(weights, wording, wording.text) for wording in asked]


def served(wordings: Sequence[Wording]) -> Counter[str]:
    """Number of held-out questions by what `classify` and the shipped weights make of them.

    `right`, `unsure`, `lost`, or `harmless`: a wrong class whose images are not reduced either.
    """
    counts: Counter[str] = Counter()
    for wording in wordings:
        found = classify([wording.text], method="Learned").question_class
        if found is wording.question_class:
            counts["right"] += 1
        elif found is QuestionClass.UNSURE:
            counts["unsure"] += 1
        else:
            counts["harmless" if found in NATIVE else "lost"] += 1
    return counts


def report(title: str, outcomes: Sequence[Outcome], *, errors: bool = False) -> Iterator[str]:
    """Lines: all, each class, and the wrong ones if `errors`."""
    yield f"{title:12}{accuracy(outcomes)}"
    for question_class in LEARNED:
        of_class = [one for one in outcomes if one.wording.question_class is question_class]
        if of_class:
            yield f"  {question_class:10}{accuracy(of_class)}"
    if errors:
        for one in (one for one in outcomes if not one.is_right):
            right = one.wording.question_class
            yield f"    {right} taken for {one.best}, p {one.probability:.2f}: {one.text}"


def outcome(weights: Weights, wording: Wording, text: str) -> Outcome:
    """Classify one question, without the checks that make it UNSURE."""
    probabilities = weights.probabilities(features(words(text)))
    best = int(probabilities.argmax())
    return Outcome(wording, text, LEARNED[best], float(probabilities[best]))


def left_out(wordings: Sequence[Wording], *, folds: int) -> Iterator[Outcome]:
    """Each wording once, by a classifier that was trained without it and its fold.

    With as many folds as wordings, one wording is left out at a time. The question is the bare one.
    """
    made = examples(wordings)
    problem = Problem(made)
    bare = {one.wordings[0]: one.text for one in reversed(made) if len(one.wordings) == 1}
    order = np.random.default_rng(3).permutation(len(wordings))
    for fold in np.array_split(order, folds):
        out = set(fold.tolist())
        removed = np.array([not out.isdisjoint(example.wordings) for example in made])
        weights = rounded(fit(problem, np.where(removed, 0.0, problem.weights)), wordings)
        for index in sorted(out):
            yield outcome(weights, wordings[index], bare[index])
