"""Statistics of right and wrong answers: one setting alone, and two settings on the same questions.

    share of right answers      Wilson's score interval
    difference of two shares    Bonett and Price (2012): Wald's interval of the paired difference
                                with one answer added to each of lost and won, on n + 2 questions

Both have a width above 0 if nothing differs, unlike McNemar's normal approximation: 0 lost of 100
is no proof that none of 1,000 is lost. Pure.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Final

Z95: Final = 1.959964
"""The normal quantile of a two-sided 95 % interval."""

Interval = tuple[float, float]


@dataclasses.dataclass(frozen=True, slots=True)
class Paired:
    """The answers of a setting, compared with those of another to the same questions.

    Attributes:
        questions: their number, at least 1.
        right: how many this setting answered right.
        lost: right answers of the other setting that are wrong here.
        won: wrong answers of the other setting that are right here.
    """

    questions: int
    right: int
    lost: int
    won: int

    @classmethod
    def of(cls, here: Sequence[bool], other: Sequence[bool]) -> Paired:
        """Count; raises ValueError if there is no question, or the numbers differ."""
        pairs = list(zip(here, other, strict=True))
        if not pairs:
            raise ValueError("no question was asked")
        lost = sum(before and not now for now, before in pairs)
        won = sum(now and not before for now, before in pairs)
        return cls(len(pairs), sum(here), lost, won)

    @property
    def share(self) -> float:
        """The share of right answers."""
        return self.right / self.questions

    @property
    def share_interval(self) -> Interval:
        """95 % interval of the share."""
        return wilson(self.right, self.questions)

    @property
    def difference(self) -> float:
        """The share here minus the share of the other setting."""
        return (self.won - self.lost) / self.questions

    @property
    def difference_interval(self) -> Interval:
        """95 % interval of the difference."""
        return bonett_price(self.lost, self.won, self.questions)


def wilson(right: int, questions: int) -> Interval:
    """95 % interval of a share, within 0 and 1 (Wilson 1927)."""
    share, square = right / questions, Z95**2 / questions
    middle = (share + square / 2) / (1 + square)
    spread = share * (1 - share) / questions + (Z95 / (2 * questions)) ** 2
    margin = Z95 * math.sqrt(spread) / (1 + square)
    return max(0.0, middle - margin), min(1.0, middle + margin)


def bonett_price(lost: int, won: int, questions: int) -> Interval:
    """95 % interval of (won - lost) / questions, within -1 and 1."""
    number = questions + 2
    less, more = (lost + 1) / number, (won + 1) / number
    middle = more - less
    margin = Z95 * math.sqrt((less + more - middle**2) / number)
    return max(-1.0, middle - margin), min(1.0, middle + margin)
