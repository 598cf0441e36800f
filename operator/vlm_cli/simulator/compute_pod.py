"""A pod that encodes or prefills: an encoder pod, or a prefill pod, which may encode inline.

waiting images  ─▶ one batch                            ─┐ steps alternate if both wait;
waiting prompts ─▶ one step of chunks, first in first out ─┘ duration: the hardware's curve / speed
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
from vlm_cli.simulator.pod import JobCallback, Latencies, Lifecycle
from vlm_operator.names import Role
from vlm_operator.state import KvTokens, Sample, WorkCounters


@dataclasses.dataclass(slots=True)
class _Counters:
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
    queued_at: float
    predicted_seconds: float


class StepNoise:
    """Random factor of the duration of steps."""

    def __init__(self, sigma: float, rng: random.Random) -> None:
        self._sigma, self._rng = sigma, rng

    def factor(self) -> float:
        """Return the factor of one step, log-normal with mean 1."""
        if not self._sigma:
            return 1.0
        return math.exp(self._rng.gauss(-(self._sigma**2) / 2, self._sigma))


class ComputePod:
    """Encoder or prefill pod. Its one writer is the simulation's clock.

    Reported work is a prediction. Work is queued from its arrival, and started from its first batch
    or step, as workers count it.

    Args:
        encoded, prefilled: called when a job's last image, or its prompt, is computed.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        hardware: Hardware,
        clock: Clock,
        *,
        encoded: JobCallback,
        prefilled: JobCallback,
        noise: StepNoise,
    ) -> None:
        self.lifecycle, self._noise = lifecycle, noise
        self._hardware, self._clock = hardware, clock
        self._encoded, self._prefilled = encoded, prefilled
        self._images: deque[_Image] = deque()
        self._prompts: deque[Job] = deque()
        self._running: set[Job] = set()
        self._jobs: set[Job] = set()
        self._stepping = False
        self._encode_next = True
        self._num_evacuations = 0
        self.queued_seconds = 0.0
        self._started_seconds = 0.0
        self._counters = {"encode": _Counters(), "prefill": _Counters()}
        self._latencies = Latencies()

    @property
    def inflight(self) -> int:
        """Number of requests at this pod."""
        return len(self._jobs)

    def encode(self, job: Job) -> None:
        """Queue a job's images."""
        now = self._clock.now
        for patches in job.request.patches:
            seconds = self._predicted(self._hardware.encode.seconds(patches, patches**2))
            self._images.append(_Image(job, patches, now, seconds))
            self.queued_seconds += seconds
        job.images_left = len(job.request.patches)
        self._jobs.add(job)
        self._start_step()

    def prefill(self, job: Job) -> None:
        """Queue the prompt of a job, whose images are encoded and whose KV is reserved."""
        job.queued_at, job.prefilled, job.started_at = self._clock.now, 0, None
        tokens = max(1, job.prompt_tokens - job.cached_tokens)
        squares = tokens * (job.cached_tokens + tokens / 2)
        job.queued_seconds = self._predicted(self._hardware.prefill.seconds(tokens, squares))
        self.queued_seconds += job.queued_seconds
        self._prompts.append(job)
        self._jobs.add(job)
        self._start_step()

    def evacuate(self) -> list[Job]:
        """See `Pod.evacuate`."""
        jobs = sorted(self._jobs, key=lambda job: job.request.at)
        self._images.clear()
        self._prompts.clear()
        self._jobs.clear()
        self._running.clear()
        self.queued_seconds = 0.0
        self._num_evacuations += 1
        return jobs

    def p95(self, now: float) -> float | None:
        """See `Pod.p95`."""
        return self._latencies.p95(now)

    def sample(self) -> Sample:
        """See `Pod.sample`."""
        tokens = sum(job.prompt_tokens for job in self._prompts)
        capacity = self._hardware.kv_tokens * 4
        kv = KvTokens(
            capacity=capacity,
            running=min(tokens, capacity),
            reserved=0,
            cached=0,
            free=max(0, capacity - tokens),
            queued=max(0, tokens - sum(job.prompt_tokens for job in self._running)),
        )
        return self.lifecycle.sample(
            inflight=self.inflight,
            queued_requests=len(self._jobs - self._running),
            queued_seconds=max(0.0, self.queued_seconds),
            started_seconds=self._started_seconds,
            kv=kv if self.lifecycle.role is Role.PREFILL else None,
            busy={name: item.freeze() for name, item in self._counters.items()},
        )

    def _predicted(self, seconds: float) -> float:
        """Return the predicted duration of work that takes `seconds` at speed 1."""
        return seconds / self.lifecycle.speed * self.lifecycle.prediction_factor

    def _start_step(self) -> None:
        """Start the next step, unless one runs or no work waits."""
        if self._stepping or not (self._images or self._prompts):
            return
        self._stepping = True
        if self._images and (self._encode_next or not self._prompts):
            self._encode_next = False
            self._start_encode()
        else:
            self._encode_next = True
            self._start_prefill()

    def _start_encode(self) -> None:
        num_evacuations = self._num_evacuations
        count = min(len(self._images), self._hardware.encode_items)
        batch = [self._images.popleft() for _ in range(count)]
        units = sum(item.patches for item in batch)
        squares = float(sum(item.patches**2 for item in batch))
        seconds = (
            self._hardware.encode.seconds(units, squares)
            / self.lifecycle.speed
            * self._noise.factor()
        )
        for item in batch:
            self.queued_seconds -= item.predicted_seconds
            self._started_seconds += item.predicted_seconds
            self._running.add(item.job)
        self._counters["encode"].add(seconds, calls=1, items=count, units=units, squares=squares)
        self._clock.after(seconds, lambda: self._end_encode(batch, seconds, num_evacuations))

    def _end_encode(self, batch: Iterable[_Image], seconds: float, num_evacuations: int) -> None:
        self._stepping = False
        if num_evacuations == self._num_evacuations:
            self._running.clear()
            for item in batch:
                job = item.job
                job.images_left -= 1
                if job.images_left == 0:
                    waited = self._clock.now - item.queued_at
                    job.add_stage("encoder_queue", waited - seconds)
                    job.add_stage("encode", seconds)
                    self._jobs.discard(job)
                    self._latencies.add(self._clock.now, waited)
                    self._encoded(job)
        self._start_step()

    def _start_prefill(self) -> None:
        now, num_evacuations = self._clock.now, self._num_evacuations
        tokens_left, seconds, factor = self._hardware.chunk_tokens, 0.0, self._noise.factor()
        ended: list[Job] = []
        for job in itertools.islice(self._prompts, self._hardware.prompts_per_step):
            if tokens_left <= 0:
                break
            if job.started_at is None:
                job.started_at = now
                self._started_seconds += job.queued_seconds
                job.add_stage("prefill_queue", now - job.queued_at)
            done_tokens = job.cached_tokens + job.prefilled
            chunk = min(tokens_left, max(1, job.prompt_tokens - done_tokens))
            squares = chunk * (done_tokens + chunk / 2)
            cost = self._hardware.prefill.seconds(chunk, squares) / self.lifecycle.speed * factor
            is_last = done_tokens + chunk >= job.prompt_tokens
            self._counters["prefill"].add(
                cost, calls=1, items=int(is_last), units=chunk, squares=squares
            )
            seconds += cost
            tokens_left -= chunk
            self._running.add(job)
            job.prefilled += chunk
            share = min(job.queued_seconds, cost * self.lifecycle.prediction_factor)
            job.queued_seconds -= share
            self.queued_seconds -= job.queued_seconds + share if is_last else share
            if is_last:
                job.queued_seconds = 0.0
                ended.append(job)
        for _ in ended:
            self._prompts.popleft()
        self._clock.after(seconds, lambda: self._end_prefill(ended, num_evacuations))

    def _end_prefill(self, ended: Iterable[Job], num_evacuations: int) -> None:
        self._stepping = False
        if num_evacuations == self._num_evacuations:
            self._running.clear()
            for job in ended:
                now = self._clock.now
                assert job.started_at is not None
                job.add_stage("prefill", now - job.started_at)
                self._jobs.discard(job)
                self._latencies.add(now, now - job.queued_at)
                self._prefilled(job)
        self._start_step()
