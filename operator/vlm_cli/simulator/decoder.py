"""A decode pod: sequences share steps whose duration grows with the KV tokens in use.

Steps are not simulated individually. `_made` counts the tokens of a sequence that runs from the
start. It grows by 1 / ITL(k) per second, for k KV tokens. A sequence ends after `_made` has grown
by the sequence's remaining tokens.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections.abc import Callable

from vlm_cli.simulator.hardware import Hardware
from vlm_cli.simulator.job import Clock, Job
from vlm_cli.simulator.pods import Handed, Latencies, Life
from vlm_operator.state import KvTokens, Sample, WorkCounters

GAP_BUCKETS = (
    0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.15, 0.2, 0.5, 1.0,
    math.inf,
)  # fmt: skip
_REPLAN_SECONDS = 0.5  # longest time with a constant ITL


class Decoder:
    """Decode pod. Its one writer is the simulation's clock.

    Args:
        ended: called with a job after its last token.
        preempted: called with a preempted job, which must be prefilled again.
        freed: called after KV tokens were freed.
        gaps: counts of ITL by `GAP_BUCKETS`; all decoders share the list.
    """

    def __init__(
        self,
        life: Life,
        hardware: Hardware,
        clock: Clock,
        *,
        ended: Handed,
        preempted: Handed,
        freed: Callable[[], None],
        gaps: list[float],
    ) -> None:
        self.life = life
        self._hardware, self._clock = hardware, clock
        self._ended, self._preempted, self._freed = ended, preempted, freed
        share = hardware.node_type(life.role, life.variant).kv_share
        self.capacity = int(hardware.kv_tokens * share)
        self._gaps = gaps
        self._promised: dict[Job, int] = {}
        self._promised_tokens = 0
        # job → (_made at its start, its number in _ends); the latest last
        self._began: dict[Job, tuple[float, int]] = {}
        self._ends: list[tuple[float, int, Job]] = []
        self._order = itertools.count()
        self._held_tokens = 0.0
        self._made = 0.0
        self._rate = 0.0
        self._at = clock.now
        self._plans = 0
        self.queued_tokens = 0
        self._busy_seconds = self._steps = self._items = self._units = self._squares = 0.0
        self._latencies = Latencies()

    @property
    def inflight(self) -> int:
        """Number of requests at this pod, including reservations."""
        return len(self._began) + len(self._promised)

    @property
    def used(self) -> float:
        """KV tokens in use or reserved."""
        return self._held_tokens + self._promised_tokens

    def room(self, tokens: int) -> float:
        """Return the free KV tokens after a reservation of `tokens`; negative if impossible."""
        if not self._began and not self._promised:
            return float(self.capacity)  # a single prompt may use the margin
        return self.capacity * (1 - self._hardware.kv_margin) - self.used - tokens

    def reserve(self, job: Job) -> None:
        """Reserve KV tokens for a job's prompt."""
        self._promised[job] = job.prompt_tokens
        self._promised_tokens += job.prompt_tokens

    def release(self, job: Job) -> None:
        """Release a job's reservation."""
        self._promised_tokens -= self._promised.pop(job)

    def start(self, job: Job) -> None:
        """Start to generate the remaining tokens of a prefilled job, at least 1."""
        self._advance()
        self.release(job)
        self._held_tokens += job.prompt_tokens
        place = next(self._order)
        self._began[job] = (self._made, place)
        heapq.heappush(self._ends, (self._made + job.left, place, job))
        job.queued_at = self._clock.now
        self._plan()

    def evacuate(self, now: float) -> list[Job]:
        """Remove and return all jobs, if a drain reaches its deadline or the pod crashes."""
        del now
        self._advance()
        jobs = [*self._promised, *self._began]
        for job in list(self._began):
            self._leave(job)
        self._promised.clear()
        self._promised_tokens = 0
        self._plan()
        return jobs

    def p95(self, now: float) -> float | None:
        """See `Pod.p95`."""
        return self._latencies.p95(now)

    def sample(self, now: float) -> Sample:
        """Return the pod's report."""
        del now
        self._advance()
        held, promised = round(self._held_tokens), self._promised_tokens
        kv = KvTokens(
            capacity=self.capacity,
            running=held,
            reserved=promised,
            cached=0,
            free=max(0, self.capacity - held - promised),
            queued=self.queued_tokens,
        )
        busy = WorkCounters(
            self._busy_seconds, int(self._steps), int(self._items), int(self._units), self._squares
        )
        return self.life.sample(inflight=self.inflight, kv=kv, busy={"decode": busy})

    def _advance(self) -> None:
        """Update the counters to now."""
        now = self._clock.now
        seconds, self._at = now - self._at, now
        if seconds <= 0 or not self._began:
            return
        made, count = seconds * self._rate, len(self._began)
        self._made += made
        before, self._held_tokens = self._held_tokens, self._held_tokens + made * count
        mean = (before + self._held_tokens) / 2
        self._busy_seconds += seconds
        self._steps += made
        self._items += made * count
        self._units += made * mean
        self._squares += made * mean * mean
        self._gaps[bisect.bisect_left(GAP_BUCKETS, 1 / self._rate)] += made * count

    def _plan(self) -> None:
        """Set the token rate for the present KV use, and schedule the next `_look`."""
        while self._held_tokens > self.capacity and len(self._began) > 1:
            self._preempt()
        self._plans += 1
        if not self._began:
            self._rate = 0.0
            return
        step = self._hardware.itl_base + self._hardware.itl_per_token * self._held_tokens
        self._rate = self.life.speed / step
        plan = self._plans
        while not self._present(self._ends[0]):
            heapq.heappop(self._ends)
        seconds = max(0.0, (self._ends[0][0] - self._made) / self._rate)
        self._clock.after(min(seconds, _REPLAN_SECONDS), lambda: self._look(plan))

    def _look(self, plan: int) -> None:
        if plan != self._plans:
            return
        self._advance()
        ended = []
        while self._ends and self._ends[0][0] <= self._made + 1e-6:
            end = heapq.heappop(self._ends)
            if self._present(end):
                self._leave(end[2])
                ended.append(end[2])
        self._plan()
        for job in ended:
            self._latencies.add(self._clock.now, self._clock.now - job.queued_at)
            self._ended(job)
        if ended:
            self._freed()

    def _present(self, end: tuple[float, int, Job]) -> bool:
        """Whether this end is valid: its sequence may have left, or restarted, since."""
        began = self._began.get(end[2])
        return began is not None and began[1] == end[1]

    def _preempt(self) -> None:
        """Preempt the sequence that started last."""
        job = next(reversed(self._began))
        self._leave(job)
        self._clock.after(0.0, lambda: self._preempted(job))

    def _leave(self, job: Job) -> None:
        """Remove a sequence; its job keeps the number of delivered tokens."""
        made = self._made - self._began.pop(job)[0]
        self._held_tokens -= job.prompt_tokens + made
        if not self._began:
            self._held_tokens = 0.0
        job.delivered = min(job.request.output_tokens, job.delivered + round(made))
