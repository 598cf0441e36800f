"""A decode pod: sequences share steps whose duration grows with the KV tokens in use.

Steps are not simulated one by one. `_generated` is the number of tokens of a sequence that runs
from the start. It grows by 1 / ITL(k) per second, for k KV tokens in use. A sequence ends after
`_generated` has grown by the sequence's remaining tokens.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections.abc import Callable

from vlm_cli.simulator.hardware import Hardware
from vlm_cli.simulator.job import Clock, Job
from vlm_cli.simulator.pod import JobCallback, Latencies, Lifecycle
from vlm_operator.state import KvTokens, Sample, WorkCounters

ITL_BUCKETS = (
    0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.15, 0.2, 0.5, 1.0,
    math.inf,
)  # fmt: skip
_REPLAN_SECONDS = 0.5  # maximum time with a constant ITL


class DecodePod:
    """Decode pod. Its one writer is the simulation's clock.

    Args:
        ended: called with a job after its last token.
        preempted: called with a preempted job, which must be prefilled again.
        freed: called after KV tokens were freed.
        itl_counts: counts of ITL by `ITL_BUCKETS`; all decode pods share the list.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        hardware: Hardware,
        clock: Clock,
        *,
        ended: JobCallback,
        preempted: JobCallback,
        freed: Callable[[], None],
        itl_counts: list[float],
    ) -> None:
        self.lifecycle = lifecycle
        self._hardware, self._clock = hardware, clock
        self._ended, self._preempted, self._freed = ended, preempted, freed
        share = hardware.node_type(lifecycle.role, lifecycle.variant).kv_share
        self.capacity = int(hardware.kv_tokens * share)
        self._itl_counts = itl_counts
        self._reserved: dict[Job, int] = {}
        self._reserved_tokens = 0
        # job → (_generated at its start, its number in _ends), in the order of their starts
        self._running: dict[Job, tuple[float, int]] = {}
        self._ends: list[tuple[float, int, Job]] = []
        self._order = itertools.count()
        self._running_tokens = 0.0
        self._generated = 0.0
        self._rate = 0.0
        self._at = clock.now
        self._plan_id = 0
        self._busy_seconds = self._steps = self._items = self._units = self._squares = 0.0
        self._latencies = Latencies()

    @property
    def inflight(self) -> int:
        """Number of requests at this pod, including reservations."""
        return len(self._running) + len(self._reserved)

    @property
    def used_tokens(self) -> float:
        """KV tokens in use or reserved."""
        return self._running_tokens + self._reserved_tokens

    def free_after(self, tokens: int) -> float:
        """Return the free KV tokens after a reservation of `tokens`; negative if it exceeds them.

        A pod without requests accepts any prompt.
        """
        if not self._running and not self._reserved:
            return float(self.capacity)
        return self.capacity * (1 - self._hardware.kv_margin) - self.used_tokens - tokens

    def reserve(self, job: Job) -> None:
        """Reserve KV tokens for a job's prompt."""
        self._reserved[job] = job.prompt_tokens
        self._reserved_tokens += job.prompt_tokens

    def release(self, job: Job) -> None:
        """Release a job's reservation."""
        self._reserved_tokens -= self._reserved.pop(job)

    def start(self, job: Job) -> None:
        """Start to generate the remaining tokens of a prefilled job, at least 1."""
        self._advance()
        self.release(job)
        self._running_tokens += job.prompt_tokens
        number = next(self._order)
        self._running[job] = (self._generated, number)
        heapq.heappush(self._ends, (self._generated + job.remaining_tokens, number, job))
        job.queued_at = self._clock.now
        self._plan_next_end()

    def evacuate(self) -> list[Job]:
        """See `Pod.evacuate`."""
        self._advance()
        jobs = [*self._reserved, *self._running]
        for job in list(self._running):
            self._remove(job)
        self._reserved.clear()
        self._reserved_tokens = 0
        self._plan_next_end()
        return jobs

    def p95(self, now: float) -> float | None:
        """See `Pod.p95`."""
        return self._latencies.p95(now)

    def sample(self) -> Sample:
        """See `Pod.sample`."""
        self._advance()
        running, reserved = round(self._running_tokens), self._reserved_tokens
        kv = KvTokens(
            capacity=self.capacity,
            running=running,
            reserved=reserved,
            cached=0,
            free=max(0, self.capacity - running - reserved),
            queued=0,
        )
        busy = WorkCounters(
            self._busy_seconds, int(self._steps), int(self._items), int(self._units), self._squares
        )
        return self.lifecycle.sample(inflight=self.inflight, kv=kv, busy={"decode": busy})

    def _advance(self) -> None:
        """Update the counters to now."""
        now = self._clock.now
        seconds, self._at = now - self._at, now
        if seconds <= 0 or not self._running:
            return
        tokens, count = seconds * self._rate, len(self._running)
        self._generated += tokens
        before, self._running_tokens = self._running_tokens, self._running_tokens + tokens * count
        mean = (before + self._running_tokens) / 2
        self._busy_seconds += seconds
        self._steps += tokens
        self._items += tokens * count
        self._units += tokens * mean
        self._squares += tokens * mean * mean
        self._itl_counts[bisect.bisect_left(ITL_BUCKETS, 1 / self._rate)] += tokens * count

    def _plan_next_end(self) -> None:
        """Set the token rate for the KV tokens in use, and schedule the next `_end_sequences`."""
        while self._running_tokens > self.capacity and len(self._running) > 1:
            self._preempt()
        self._plan_id += 1
        if not self._running:
            self._rate = 0.0
            return
        step = self._hardware.itl_base + self._hardware.itl_per_token * self._running_tokens
        self._rate = self.lifecycle.speed / step
        plan = self._plan_id
        while not self._is_valid(self._ends[0]):
            heapq.heappop(self._ends)
        seconds = max(0.0, (self._ends[0][0] - self._generated) / self._rate)
        self._clock.after(min(seconds, _REPLAN_SECONDS), lambda: self._end_sequences(plan))

    def _end_sequences(self, plan: int) -> None:
        if plan != self._plan_id:
            return
        self._advance()
        ended = []
        while self._ends and self._ends[0][0] <= self._generated + 1e-6:
            end = heapq.heappop(self._ends)
            if self._is_valid(end):
                self._remove(end[2])
                ended.append(end[2])
        self._plan_next_end()
        for job in ended:
            self._latencies.add(self._clock.now, self._clock.now - job.queued_at)
            self._ended(job)
        if ended:
            self._freed()

    def _is_valid(self, end: tuple[float, int, Job]) -> bool:
        """Whether the sequence still runs and has not restarted since this end was computed."""
        start = self._running.get(end[2])
        return start is not None and start[1] == end[1]

    def _preempt(self) -> None:
        """Preempt the sequence that started last."""
        job = next(reversed(self._running))
        self._remove(job)
        self._clock.after(0.0, lambda: self._preempted(job))

    def _remove(self, job: Job) -> None:
        """Remove a sequence; its job keeps the number of delivered tokens."""
        tokens = self._generated - self._running.pop(job)[0]
        self._running_tokens -= job.prompt_tokens + tokens
        if not self._running:
            self._running_tokens = 0.0
        job.delivered = min(job.request.output_tokens, job.delivered + round(tokens))
