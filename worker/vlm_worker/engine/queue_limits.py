"""Limits of the prefill queue: whether a request may wait, and the retry time if not."""

from __future__ import annotations

from vlm_worker.core.scheduler import Scheduler
from vlm_worker.core.step_time import StepTimeModel, retry_after
from vlm_worker.engine.settings import EngineSettings, QueueLimit
from vlm_worker.errors import OverloadedError


class QueueLimits:
    """The limits of the prefill queue. Engine thread only.

    Attributes:
        work: the step time model; the step loop updates it.
        num_refused: refused requests, by limit.
    """

    def __init__(self, scheduler: Scheduler, *, settings: EngineSettings) -> None:
        self.work = StepTimeModel()
        self.num_refused = dict.fromkeys(QueueLimit, 0)
        self._scheduler = scheduler
        self._settings = settings

    def check(self, num_tokens: int, *, for_peer: bool) -> None:
        """Raise OverloadedError if a prompt of `num_tokens` exceeds a limit.

        An empty queue accepts any one prompt. With `for_peer`, the limit of KV
        for peers applies too.
        """
        waiting, settings = self._scheduler.waiting, self._settings
        additional_tokens = num_tokens if waiting else 0
        for bound, queued, additional, maximum in (
            (QueueLimit.REQUESTS, len(waiting), 1, settings.max_waiting),
            (QueueLimit.TOKENS, waiting.num_tokens, additional_tokens, settings.max_waiting_tokens),
        ):
            if queued + additional > maximum:
                raise self._refusal(bound, f"{queued} {bound.value} wait, {maximum} may")
        pending_transfers = self._scheduler.pending_transfers
        if for_peer and pending_transfers.is_over_limit:
            raise self._refusal(
                QueueLimit.UNREAD,
                f"{pending_transfers.num_held_blocks} KV blocks wait to be read, "
                f"{pending_transfers.max_blocks} may",
            )

    def predict(self, num_tokens: int) -> float:
        """Predicted seconds to compute `num_tokens` prompt tokens."""
        units = self._settings.max_num_batched_tokens
        return self.work.predict(num_tokens, units_per_step=units)

    @property
    def retry_after_seconds(self) -> float:
        """Predicted seconds until the queue is computed and a running sequence has ended."""
        batch = self._scheduler.batch
        seconds = batch.min_steps_to_finish * self.predict(len(batch))
        return retry_after(self.predict(self._scheduler.waiting.num_tokens) + seconds)

    def _refusal(self, bound: QueueLimit, message: str) -> OverloadedError:
        self.num_refused[bound] += 1
        return OverloadedError(message, retry_after_seconds=self.retry_after_seconds)
