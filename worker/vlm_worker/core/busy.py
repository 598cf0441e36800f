"""What was computed so far, by kind of work: what a capacity is fitted to. Pure.

    encode    a call is one batch, an item one picture, a unit one patch; squares Σ patches²
    prefill   a call is one chunk, an item one prompt, a unit one token computed;
              squares Σ n·(h + n/2) for n tokens after h that have KV already
    decode    a call is one step, an item one sequence of a step, a unit one KV token of a step;
              squares Σ of the steps' units²

A step that does both is split as the predictions for its halves are: what so many tokens of prompts
take in steps without answers, to what so many answers take in steps without prompts. Until steps of
both kinds were seen, it is split by tokens.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping

import numpy as np

from vlm_worker.core.work import WorkModel


class Kind(enum.StrEnum):
    """A kind of work."""

    ENCODE = "encode"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclasses.dataclass(frozen=True, slots=True)
class Busy:
    """Sums since the start; the module says of what."""

    seconds: float = 0.0
    calls: int = 0
    items: int = 0
    units: int = 0
    squares: float = 0.0

    def plus(self, seconds: float, calls: int, items: int, units: int, squares: float) -> Busy:
        """With so much more."""
        return Busy(
            self.seconds + seconds,
            self.calls + calls,
            self.items + items,
            self.units + units,
            self.squares + squares,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class StepWork:
    """What a step computes.

    Attributes:
        num_decodes: sequences that decode.
        kv_tokens: tokens that these have with KV.
        chunks: int64 [C], tokens of each chunk of a prompt.
        before: int64 [C], tokens of each that have KV already.
        num_prompts: prompts that begin with this step.
    """

    num_decodes: int
    kv_tokens: int
    chunks: np.ndarray
    before: np.ndarray
    num_prompts: int


class BusyMeter:
    """Adds up. Its owner is its only writer."""

    def __init__(self) -> None:
        self._sums: dict[Kind, Busy] = {}
        self._alone = {Kind.PREFILL: WorkModel(), Kind.DECODE: WorkModel()}

    @property
    def sums(self) -> Mapping[Kind, Busy]:
        """The kinds of which there was any, as of now."""
        return dict(self._sums)

    def encoded(self, patches: list[int], seconds: float) -> None:
        """One call of the encoder, with the patches of each picture."""
        squares = float(sum(count * count for count in patches))
        self._add(Kind.ENCODE, seconds, 1, len(patches), sum(patches), squares)

    def stepped(self, work: StepWork, seconds: float) -> None:
        """One step of the language model."""
        num_tokens = int(work.chunks.sum()) if len(work.chunks) else 0
        share = self._prefill_share(num_tokens, work.num_decodes)
        if num_tokens:
            squares = float((work.chunks * (work.before + work.chunks / 2)).sum())
            self._add(
                Kind.PREFILL,
                seconds * share,
                len(work.chunks),
                work.num_prompts,
                num_tokens,
                squares,
            )
        if work.num_decodes:
            squares = float(work.kv_tokens) ** 2
            self._add(
                Kind.DECODE, seconds * (1 - share), 1, work.num_decodes, work.kv_tokens, squares
            )
        if not work.num_decodes:
            self._alone[Kind.PREFILL].observe(num_tokens, seconds)
        elif not num_tokens:
            self._alone[Kind.DECODE].observe(work.num_decodes, seconds)

    def _prefill_share(self, num_tokens: int, num_decodes: int) -> float:
        """The part of a step's seconds that its prompts have: 0 to 1."""
        if not num_tokens or not num_decodes:
            return 1.0 if num_tokens else 0.0
        prefill = self._alone[Kind.PREFILL].predict(num_tokens, units_per_step=num_tokens)
        decode = self._alone[Kind.DECODE].predict(num_decodes, units_per_step=num_decodes)
        if not prefill or not decode:
            return num_tokens / (num_tokens + num_decodes)
        return prefill / (prefill + decode)

    def _add(
        self, kind: Kind, seconds: float, calls: int, items: int, units: int, squares: float
    ) -> None:
        self._sums[kind] = self._sums.get(kind, Busy()).plus(seconds, calls, items, units, squares)
