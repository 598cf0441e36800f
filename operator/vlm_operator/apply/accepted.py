"""What one loop remembers of its writes, so that it neither repeats nor fights them."""

from __future__ import annotations

import dataclasses

from vlm_operator.apply.compare import Drift
from vlm_operator.apply.contest import Contests, Key
from vlm_operator.apply.learned import Learned


@dataclasses.dataclass
class Accepted:
    """What became of our manifests, by kind and name. Written by `apply_plan` alone.

    Attributes:
        kept: a digest, and the paths at which the answer to our own write differed from it: the
            API server's own ways are no drift.
        digests: what was last found or put as wanted.
        compared: a digest and the version of an object that was as it says: it still is.
        contests: what somebody else changed since.
        ends: the namespace is being deleted; a service of a later one has a loop of its own.
        news: what was put right since the loop last asked, for people.
        learned: what the API server adds by itself.
    """

    kept: dict[Key, tuple[str, frozenset[str]]] = dataclasses.field(default_factory=dict)
    digests: dict[Key, str] = dataclasses.field(default_factory=dict)
    compared: dict[Key, tuple[str, str | None]] = dataclasses.field(default_factory=dict)
    contests: Contests = dataclasses.field(default_factory=dict)
    ends: bool = False
    news: list[str] = dataclasses.field(default_factory=list)
    learned: Learned = dataclasses.field(default_factory=Learned)

    def tell(self, key: Key, found: tuple[Drift, ...]) -> None:
        """Note that somebody else's changes are being put back."""
        rest = f" and {len(found) - 3} more" if len(found) > 3 else ""
        paths = ", ".join(item.path for item in found[:3])
        self.news.append(f"{key[0]} {key[1]}: {paths}{rest} changed; put back")

    def told(self) -> tuple[str, ...]:
        """Hand over the news, once."""
        found = tuple(self.news)
        self.news.clear()
        return found
