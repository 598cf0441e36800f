"""The law of identity: greedy tokens are transformers', ties apart.

    law = Law(pairs)
    while law.pending:
        law.record([await ask(question, delivered) for question, delivered in law.pending])
    law.check()

A position is a tie where the reference's two best logits differ by less than 1e-4. There an answer
may leave the reference; it is asked again from the reference's token on, which also tries how an
answer is continued.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from worker.identity.questions import Question
from worker.identity.reference import MAX_TOKENS, Answer

from vlm_worker.types import Request, RequestKey, SamplingParams

MAX_TIES = 1e-3


@dataclasses.dataclass
class Law:
    """Compares answers with the reference and says what is to be asked again.

    The first `num_delivered` tokens of every answer count as delivered, as when another engine gave
    them before it died.
    """

    pairs: Sequence[tuple[Question, Answer]]
    num_delivered: int = 0
    num_ties: int = 0
    failures: list[str] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self._open: dict[int, tuple[int, ...]] = {
            i: answer.token_ids[: self.num_delivered] for i, (_, answer) in enumerate(self.pairs)
        }

    @property
    def pending(self) -> list[tuple[Question, tuple[int, ...]]]:
        """Questions to ask, each with the tokens of the answer that count as delivered."""
        return [(self.pairs[i][0], delivered) for i, delivered in self._open.items()]

    @property
    def num_positions(self) -> int:
        """Answer tokens of the reference."""
        return sum(len(answer.token_ids) for _, answer in self.pairs)

    def record(self, answers: Sequence[Sequence[int]]) -> None:
        """Answers to `pending`, in its order; each holds the tokens after the delivered ones."""
        asked, self._open = self._open, {}
        for (i, delivered), tokens in zip(asked.items(), answers, strict=True):
            question, answer = self.pairs[i]
            got, want = (*delivered, *tokens), answer.token_ids
            if got == want:
                continue
            at = next((p for p, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), None)
            if at is None or at not in answer.ties:
                self.failures.append(f"{question.task} #{i}: {list(got)}, want {list(want)}")
                continue
            self.num_ties += 1
            print(f"tie: {question.task} #{i} token {at}: {got[at]} for {want[at]}")
            if at + 1 < len(want):
                self._open[i] = want[: at + 1]

    def check(self) -> None:
        """Raise where an answer differs, or where too many positions are ties."""
        assert not self._open, "questions are still pending"
        print(f"{len(self.pairs)} answers, {self.num_positions} tokens, {self.num_ties} ties")
        assert not self.failures, f"{len(self.failures)} differ:\n" + "\n".join(self.failures[:5])
        assert self.num_ties <= MAX_TIES * self.num_positions


def request_for(
    question: Question,
    delivered: Sequence[int] = (),
    *,
    request_id: str,
    attempt: int = 0,
    max_tokens: int = MAX_TOKENS,
    ignore_eos: bool = False,
) -> Request:
    """The engine's request for a question."""
    return Request(
        key=RequestKey(request_id, attempt),
        token_ids=(*question.token_ids, *delivered),
        num_prompt_tokens=len(question.token_ids),
        sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos),
        items=question.items,
    )
