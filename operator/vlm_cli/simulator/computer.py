"""A pod that computes in turns: an encoder, or a prefill pod, which may encode inline.

turn:  images waiting ─▶ one batch        prompts waiting ─▶ one step of chunks, in order of arrival
       both waiting: turns alternate        duration of a turn: the hardware's curve / speed
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections import deque
from collections.abc import Iterable

from vlm_cli.simulator.hardware import Hardware
from vlm_cli.simulator.job import Clock, Job
from vlm_cli.simulator.pods import Handed, Latencies, Life
from vlm_operator.names import Role
from vlm_operator.state import KvTokens, Sample, WorkCounters


@dataclasses.dataclass(slots=True)
class _Counted:
    """Counters of one kind of work (state.WorkCounters)."""

    seconds: float = 0.0
    calls: int = 0
    items: int = 0
    units: int = 0
    squares: float = 0.0

    def add(self, seconds: float, *, calls: int, items: int, units: int, squares: float) -> None:
        self.seconds += seconds
        self.calls += calls
        self.items += items
        self.units += units
        self.squares += squares

    def freeze(self) -> WorkCounters:
        return WorkCounters(self.seconds, self.calls, self.items, self.units, self.squares)


@dataclasses.dataclass(eq=False, slots=True)
class _Image:
    job: Job
    patches: int
    since: float
    work: float


class TurnNoise:
    """Random factor of the duration of turns."""

    def __init__(self, sigma: float, rng: random.Random) -> None:
        self._sigma, self._rng = sigma, rng

    def factor(self) -> float:
        """Return the factor of one turn, log-normal with mean 1."""
        if not self._sigma:
            return 1.0
        return math.exp(self._rng.gauss(-(self._sigma**2) / 2, self._sigma))


class Computer:
    """Encoder or prefill pod. Its one writer is the simulation's clock.

    Reported work is a prediction. Work is queued from its arrival, and admitted from the start of
    its first batch or step, as workers count it.

    Args:
        encoded, prefilled: called when a job's last image, or its prompt, is computed.
    """

    def __init__(
        self,
        life: Life,
        hardware: Hardware,
        clock: Clock,
        *,
        encoded: Handed,
        prefilled: Handed,
        pace: TurnNoise,
    ) -> None:
        self.life, self._pace = life, pace
        self._hardware, self._clock = hardware, clock
        self._encoded, self._prefilled = encoded, prefilled
        self._images: deque[_Image] = deque()
        self._prompts: deque[Job] = deque()
        self._turning: set[Job] = set()
        self._held: set[Job] = set()
        self._turned = False
        self._encode_next = True
        self._epoch = 0
        self.queued_seconds = 0.0
        self._admitted = 0.0
        self._counted = {"encode": _Counted(), "prefill": _Counted()}
        self._latencies = Latencies()

    @property
    def inflight(self) -> int:
        """Number of requests at this pod."""
        return len(self._held)

    def encode(self, job: Job) -> None:
        """Queue a job's images."""
        now = self._clock.now
        for patches in job.request.patches:
            work = self._predicted(self._hardware.encode.seconds(patches, patches**2))
            self._images.append(_Image(job, patches, now, work))
            self.queued_seconds += work
        job.images_left = len(job.request.patches)
        self._held.add(job)
        self._turn()

    def prefill(self, job: Job) -> None:
        """Queue the prompt of a job, whose images are encoded and whose KV is reserved."""
        job.queued_at, job.prefilled, job.began_at = self._clock.now, 0, None
        tokens = max(1, job.prompt_tokens - job.cached_tokens)
        squares = tokens * (job.cached_tokens + tokens / 2)
        job.pending = self._predicted(self._hardware.prefill.seconds(tokens, squares))
        self.queued_seconds += job.pending
        self._prompts.append(job)
        self._held.add(job)
        self._turn()

    def evacuate(self, now: float) -> list[Job]:
        """Remove and return all jobs, if a drain reaches its deadline or the pod crashes."""
        del now
        jobs = sorted(self._held, key=lambda job: job.request.at)
        self._images.clear()
        self._prompts.clear()
        self._held.clear()
        self._turning.clear()
        self.queued_seconds = 0.0
        self._epoch += 1
        return jobs

    def p95(self, now: float) -> float | None:
        """See `Pod.p95`."""
        return self._latencies.p95(now)

    def sample(self, now: float) -> Sample:
        """Return the pod's report."""
        del now
        tokens = sum(job.prompt_tokens for job in self._prompts)
        capacity = self._hardware.kv_tokens * 4
        kv = KvTokens(
            capacity=capacity,
            running=min(tokens, capacity),
            reserved=0,
            cached=0,
            free=max(0, capacity - tokens),
            queued=max(0, tokens - sum(job.prompt_tokens for job in self._turning)),
        )
        return self.life.sample(
            inflight=self.inflight,
            queued_requests=len(self._held - self._turning),
            queued_seconds=max(0.0, self.queued_seconds),
            admitted_seconds=self._admitted,
            kv=kv if self.life.role is Role.PREFILL else None,
            busy={name: item.freeze() for name, item in self._counted.items()},
        )

    def _predicted(self, seconds: float) -> float:
        """Return the predicted duration of work that takes `seconds` at speed 1."""
        return seconds / self.life.speed * self.life.predicted

    def _turn(self) -> None:
        """Start the next turn, unless one runs or no work waits."""
        if self._turned or not (self._images or self._prompts):
            return
        self._turned = True
        if self._images and (self._encode_next or not self._prompts):
            self._encode_next = False
            self._encode_turn()
        else:
            self._encode_next = True
            self._prefill_turn()

    def _encode_turn(self) -> None:
        epoch = self._epoch
        count = min(len(self._images), self._hardware.encode_items)
        batch = [self._images.popleft() for _ in range(count)]
        units = sum(item.patches for item in batch)
        squares = float(sum(item.patches**2 for item in batch))
        seconds = (
            self._hardware.encode.seconds(units, squares) / self.life.speed * self._pace.factor()
        )
        for item in batch:
            self.queued_seconds -= item.work
            self._admitted += item.work
            self._turning.add(item.job)
        self._counted["encode"].add(seconds, calls=1, items=count, units=units, squares=squares)
        self._clock.after(seconds, lambda: self._encode_end(batch, seconds, epoch))

    def _encode_end(self, batch: Iterable[_Image], seconds: float, epoch: int) -> None:
        self._turned = False
        if epoch == self._epoch:
            self._turning.clear()
            for item in batch:
                job = item.job
                job.images_left -= 1
                if job.images_left == 0:
                    took = self._clock.now - item.since
                    job.mark("encoder_queue", took - seconds)
                    job.mark("encode", seconds)
                    self._held.discard(job)
                    self._latencies.add(self._clock.now, took)
                    self._encoded(job)
        self._turn()

    def _prefill_turn(self) -> None:
        now, epoch = self._clock.now, self._epoch
        room, seconds, pace = self._hardware.chunk_tokens, 0.0, self._pace.factor()
        done: list[Job] = []
        for job in itertools.islice(self._prompts, self._hardware.prompts_per_step):
            if room <= 0:
                break
            if job.began_at is None:
                job.began_at = now
                self._admitted += job.pending
                job.mark("prefill_queue", now - job.queued_at)
            before = job.cached_tokens + job.prefilled
            chunk = min(room, max(1, job.prompt_tokens - before))
            squares = chunk * (before + chunk / 2)
            cost = self._hardware.prefill.seconds(chunk, squares) / self.life.speed * pace
            last = before + chunk >= job.prompt_tokens
            self._counted["prefill"].add(
                cost, calls=1, items=int(last), units=chunk, squares=squares
            )
            seconds += cost
            room -= chunk
            self._turning.add(job)
            job.prefilled += chunk
            share = min(job.pending, cost * self.life.predicted)
            job.pending -= share
            self.queued_seconds -= job.pending + share if last else share
            if last:
                job.pending = 0.0
                done.append(job)
        for _ in done:
            self._prompts.popleft()
        self._clock.after(seconds, lambda: self._prefill_end(done, epoch))

    def _prefill_end(self, done: Iterable[Job], epoch: int) -> None:
        self._turned = False
        if epoch == self._epoch:
            self._turning.clear()
            for job in done:
                now = self._clock.now
                assert job.began_at is not None
                job.mark("prefill", now - job.began_at)
                self._held.discard(job)
                self._latencies.add(now, now - job.queued_at)
                self._prefilled(job)
        self._turn()
