"""One request on its way through the pools, and the marks that its TTFT is made of."""

from __future__ import annotations

import dataclasses

from vlm_operator.simulate.trace import Request


@dataclasses.dataclass(eq=False, slots=True)
class Job:
    """A request under way. Its writers are the gateway and the pod that has it.

    Attributes:
        visual_tokens: of all its pictures.
        cached_tokens: head of the prompt that the next prefill skips.
        delivered: tokens that the client has.
        pictures_left: not encoded yet.
        queued_at: since when it has waited at the pod that has it.
        prefilled: prompt tokens computed in this attempt.
        pending: seconds of work that its pod counts as queued for it.
        marks: stage → seconds, as the gateway books them.
        embedded_at: when its last picture arrived at prefill.
        reserved_at: when decode promised room.
        first_token_at, ended_at: None until then.
        refused: it was not served.
    """

    request: Request
    visual_tokens: int
    cached_tokens: int = 0
    delivered: int = 0
    pictures_left: int = 0
    queued_at: float = 0.0
    began_at: float | None = None
    prefilled: int = 0
    pending: float = 0.0
    marks: dict[str, float] = dataclasses.field(default_factory=dict)
    embedded_at: float | None = None
    reserved_at: float | None = None
    first_token_at: float | None = None
    ended_at: float | None = None
    refused: bool = False

    @property
    def prompt_tokens(self) -> int:
        """What prefill has to have computed: the prompt, and the tokens already delivered."""
        return self.request.text_tokens + self.visual_tokens + self.delivered

    @property
    def left(self) -> int:
        """Tokens that decode still has to make."""
        return self.request.output_tokens - self.delivered

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token, None without one."""
        return None if self.first_token_at is None else self.first_token_at - self.request.at

    def mark(self, stage: str, seconds: float) -> None:
        """Book time to a stage, before the first token alone."""
        if self.first_token_at is None and seconds > 0:
            self.marks[stage] = self.marks.get(stage, 0.0) + seconds

    def mark_rest(self, ttft: float) -> None:
        """Book what no stage claims to `other`, as long as the first token is new."""
        rest = ttft - sum(self.marks.values())
        if rest > 1e-9:
            self.marks["other"] = self.marks.get("other", 0.0) + rest
