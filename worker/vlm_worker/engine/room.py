"""Whether there is room for one more request, and if not, when to come back."""

from __future__ import annotations

from vlm_worker.core.scheduler import Scheduler
from vlm_worker.core.work import WorkModel, retry_after
from vlm_worker.engine.settings import Bound, EngineSettings
from vlm_worker.errors import OverloadedError


class Room:
    """The bounds on what waits for prefill. Lives on the engine thread.

    Attributes:
        work: how long steps take; whoever runs one tells it.
        num_refused: requests that found something full, by what it was.
    """

    def __init__(self, scheduler: Scheduler, *, settings: EngineSettings) -> None:
        self.work = WorkModel()
        self.num_refused = dict.fromkeys(Bound, 0)
        self._scheduler = scheduler
        self._settings = settings

    def check(self, num_tokens: int, *, hold: bool) -> None:
        """Raise OverloadedError where a prompt of `num_tokens` may not wait.

        An empty queue takes in any one prompt. With `hold`, its KV is for a peer, and too much may
        wait for peers already.
        """
        waiting, settings = self._scheduler.waiting, self._settings
        more_tokens = num_tokens if waiting else 0
        for bound, queued, more, most in (
            (Bound.REQUESTS, len(waiting), 1, settings.max_waiting),
            (Bound.TOKENS, waiting.num_tokens, more_tokens, settings.max_waiting_tokens),
        ):
            if queued + more > most:
                raise self._refusal(bound, f"{queued} {bound.value} wait, {most} may")
        unread = self._scheduler.unread
        if hold and unread.too_much:
            raise self._refusal(
                Bound.UNREAD,
                f"{unread.num_held_blocks} KV blocks wait to be read, {unread.most_blocks} may",
            )

    def predict(self, num_tokens: int) -> float:
        """Predicted seconds to compute so many tokens of prompts."""
        units = self._settings.max_num_batched_tokens
        return self.work.predict(num_tokens, units_per_step=units)

    @property
    def retry_after_seconds(self) -> float:
        """When what waits now is computed, and then one of those that run has ended."""
        table = self._scheduler.table
        seconds = table.steps_until_one_ends * self.predict(len(table))
        return retry_after(self.predict(self._scheduler.waiting.num_tokens) + seconds)

    def _refusal(self, bound: Bound, message: str) -> OverloadedError:
        self.num_refused[bound] += 1
        return OverloadedError(message, retry_after_seconds=self.retry_after_seconds)
