"""Fits a softmax regression and rounds it to int8. The same examples give the same file.

    minimise  Σ weight · cross entropy(targets, softmax(x W)) / Σ weight + DECAY · ‖W‖²

x has length 1, so the gradient's Lipschitz constant is at most 1/2 + 2·DECAY. Nesterov's method
with that step needs no search. All sums run in a fixed order: rounding errors of other processors
stay near 1e-15 and do not reach the int8 values.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from question_class.wordings import Example, Wording, examples, vocabulary
from vlm_worker.gateway.question_class import (
    LEARNED,
    NUM_FEATURES,
    Weights,
    bloom_filter,
    features,
    words,
)

Floats = npt.NDArray[np.float64]

DECAY = 5e-6
NUM_STEPS = 300


class Problem:
    """Examples as a sparse matrix: `values` in `columns`, its rows begin at `starts`."""

    def __init__(self, made: Sequence[Example]) -> None:
        counted = [features(words(example.text)) for example in made]
        lengths = [len(counts) for counts in counted]
        self.columns = np.array([key for counts in counted for key in counts], np.intp)
        values = np.array([value for counts in counted for value in counts.values()], np.float64)
        self.rows = np.repeat(np.arange(len(made)), lengths)
        self.starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        norms = np.sqrt(np.add.reduceat(values**2, self.starts))
        self.values = values / norms[self.rows]
        self.targets = np.array([example.targets for example in made]).T
        self.weights = np.array([example.weight for example in made])

    def probabilities(self, coefficients: Floats) -> Floats:
        """float64 [classes, examples]."""
        logits = np.stack(
            [np.add.reduceat(of[self.columns] * self.values, self.starts) for of in coefficients]
        )
        exponentials = np.exp(logits - logits.max(axis=0))
        return np.asarray(exponentials / exponentials.sum(axis=0))

    def gradient(self, coefficients: Floats, weights: Floats) -> Floats:
        """Of the objective, float64 [classes, NUM_FEATURES]."""
        errors = (self.probabilities(coefficients) - self.targets) * (weights / weights.sum())
        sums = [
            np.bincount(self.columns, of[self.rows] * self.values, NUM_FEATURES) for of in errors
        ]
        return np.stack(sums) + 2 * DECAY * coefficients


def fit(problem: Problem, weights: Floats) -> Floats:
    """Coefficients, float64 [classes, NUM_FEATURES], of the examples with these weights."""
    at = ahead = np.zeros((len(LEARNED), NUM_FEATURES))
    step = 1 / (0.5 + 2 * DECAY)
    for number in range(NUM_STEPS):
        following = ahead - step * problem.gradient(ahead, weights)
        ahead = following + number / (number + 3) * (following - at)
        at = following
    return at


def rounded(coefficients: Floats, wordings: Sequence[Wording]) -> Weights:
    """The coefficients as int8 with one unit, and the words of the wordings."""
    unit = float(np.float32(np.abs(coefficients).max() / 127))
    columns = np.clip(np.rint(coefficients.T / unit), -127, 127).astype(np.int8)
    known = {word for text in vocabulary(wordings) for word in words(text)}
    return Weights(unit, columns, bloom_filter(sorted(known)))


def train(wordings: Sequence[Wording]) -> Weights:
    """The classifier of the wordings."""
    problem = Problem(examples(wordings))
    return rounded(fit(problem, problem.weights), wordings)
