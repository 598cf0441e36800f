"""The simulated gateway: routes requests, and counts TTFT by stage as the worker's gateway does.

arrive ─┬─ images ─▶ encoder (or prefill, inline) ─┬─▶ prefill ─▶ first token ─▶ decode ─▶ end
        └─ KV reservation on a decode pod ─────────┘
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from vlm_cli.simulator.compute_pod import ComputePod
from vlm_cli.simulator.decode_pod import DecodePod
from vlm_cli.simulator.gateway_metrics import GatewayMetrics
from vlm_cli.simulator.hardware import Hardware
from vlm_cli.simulator.job import Clock, Job
from vlm_cli.simulator.trace import Request
from vlm_operator.api.enums import WhileAtZero
from vlm_operator.autoscale.policy import ServicePolicy
from vlm_operator.names import Role

_MAX_BYPASSED = 4  # requests without a reservation that a later request may bypass


class Gateway:
    """Routes every job. Its one writer is the simulation's clock, through callbacks of the pods.

    Args:
        encoders, prefills, decoders: return the pods that accept work now.
    """

    def __init__(
        self,
        policy: ServicePolicy,
        hardware: Hardware,
        clock: Clock,
        *,
        encoders: Callable[[], Sequence[ComputePod]],
        prefills: Callable[[], Sequence[ComputePod]],
        decoders: Callable[[], Sequence[DecodePod]],
    ) -> None:
        self._hardware, self._clock = hardware, clock
        self._encoders, self._prefills, self._decoders = encoders, prefills, decoders
        self.metrics = GatewayMetrics(policy.ttft_seconds)
        self.jobs: list[Job] = []
        self.inline_images = 0
        self._while_at_zero = _while_at_zero(policy)
        self._reservations: dict[Job, DecodePod] = {}
        self._inline: dict[Job, ComputePod] = {}
        self._without_encoder: deque[Job] = deque()
        self._without_reservation: deque[Job] = deque()
        self._without_prefill: deque[Job] = deque()
        self._sleeps = policy.sleep is not None
        self._asleep: deque[Job] = deque()
        self._unended = 0
        self._last_active = 0.0

    @property
    def waiting(self) -> Mapping[Role, int]:
        """Number of requests that no pod has accepted, by the role that they wait for."""
        return {
            Role.ENCODER: len(self._without_encoder),
            Role.PREFILL: len(self._without_prefill),
            Role.DECODE: len(self._without_reservation) + len(self._asleep),
        }

    @property
    def held(self) -> Mapping[Role, int]:
        """Part of `waiting` that a gateway reports as `held_for`: no pod, or no free KV block."""
        accepting = {
            Role.ENCODER: self._encoders(),
            Role.PREFILL: self._prefills(),
        }
        waiting = {**self.waiting, Role.DECODE: len(self._without_reservation)}
        return {role: count for role, count in waiting.items() if not accepting.get(role)}

    @property
    def asleep(self) -> int:
        """Number of requests that wait for the pods of a service at zero."""
        return len(self._asleep)

    @property
    def idle_seconds(self) -> float:
        """Seconds since the last request; 0 while one is in flight."""
        return 0.0 if self._unended else self._clock.now - self._last_active

    def arrive(self, request: Request) -> None:
        """Accept one request now."""
        self._unended += 1
        job = Job(
            request,
            visual_tokens=self._hardware.visual_tokens(request.patches),
            cached_tokens=request.cached_tokens,
        )
        self.jobs.append(job)
        job.add_stage("gateway", self._hardware.gateway_seconds)
        self._clock.after(self._hardware.gateway_seconds, lambda: self._admit(job))

    def accepting_changed(self) -> None:
        """Route all waiting requests again, after pods started or stopped accepting work."""
        for _ in range(len(self._asleep)):
            self._wake(self._asleep.popleft())
        for waiting, route in (
            (self._without_encoder, self._encode),
            (self._without_prefill, self._prefill),
        ):
            for _ in range(len(waiting)):
                route(waiting.popleft())
        self.freed()

    def freed(self) -> None:
        """Reserve KV for waiting requests in their order, after KV tokens were freed."""
        bypassed: list[Job] = []
        while self._without_reservation and len(bypassed) < _MAX_BYPASSED:
            job = self._without_reservation.popleft()
            if not self._reserve(job):
                bypassed.append(job)
        self._without_reservation.extendleft(reversed(bypassed))

    def encoded(self, job: Job) -> None:
        """Transfer the embeddings of a job whose images are all encoded."""
        seconds = 0.0 if job in self._inline else self._hardware.transfer_seconds
        job.add_stage("embed_transfer", seconds)
        self._clock.after(seconds, lambda: self._embedded(job))

    def prefilled(self, job: Job) -> None:
        """Deliver the first token of a computed prompt, and start decoding."""
        self._inline.pop(job, None)
        job.delivered += 1
        job.cached_tokens = 0
        if job.first_token_at is None:
            job.first_token_at = self._clock.now
            self.metrics.first_token(job)
        decoder = self._reservations.pop(job, None)
        if job.remaining_tokens <= 0:
            if decoder is not None:
                decoder.release(job)
            self.ended(job)
            self.freed()
        elif decoder is not None:
            decoder.start(job)
        else:
            self.recompute(job)

    def recompute(self, job: Job) -> None:
        """Prefill the prompt and the delivered tokens of a job that lost its KV."""
        if job.remaining_tokens <= 0:
            self.ended(job)
            return
        job.reserved_at = None
        self._request_reservation(job)

    def reroute(self, jobs: Sequence[Job], role: Role) -> None:
        """Route the jobs of a pod of `role` that was drained or crashed to other pods."""
        for job in jobs:
            self._inline.pop(job, None)
            if role is Role.DECODE:
                # if its prompt is still being computed, `prefilled` requests a new reservation
                if self._reservations.pop(job, None) is None:
                    self.recompute(job)
            elif job.images_left:
                self._encode(job)
            else:
                self._prefill(job)

    def ended(self, job: Job) -> None:
        """Record the end of a job, after its last token or its refusal."""
        assert job.ended_at is None, "a request ends once"
        job.ended_at = self._last_active = self._clock.now
        self._unended -= 1

    def _admit(self, job: Job) -> None:
        """Route a request, or hold it if the service is at zero."""
        if self._sleeps and not (self._decoders() and self._prefills()):
            job.queued_at = self._clock.now
            self._asleep.append(job)
        else:
            self._route(job)

    def _wake(self, job: Job) -> None:
        """Route a request that was held, once every stage of it has a pod."""
        inline = self._while_at_zero is WhileAtZero.INLINE_AT_PREFILL
        encodes = not job.request.patches or inline or self._encoders()
        if not (self._decoders() and self._prefills() and encodes):
            self._asleep.append(job)
            return
        job.wake_seconds = self._clock.now - job.queued_at
        self._route(job)

    def _route(self, job: Job) -> None:
        if job.request.patches:
            job.images_left = len(job.request.patches)
            seconds = self._hardware.media_seconds
            job.add_stage("media", seconds)
            self._clock.after(seconds, lambda: self._encode(job))
        else:
            job.embedded_at = self._clock.now
        self._request_reservation(job)

    def _encode(self, job: Job) -> None:
        pods = self._encoders()
        if not pods and self._while_at_zero is WhileAtZero.INLINE_AT_PREFILL:
            pods = self._prefills()
            if pods:
                self.inline_images += job.images_left
                self._inline[job] = pod = _least_loaded(pods)
                pod.encode(job)
                return
        if pods:
            _least_loaded(pods).encode(job)
        elif self._while_at_zero is WhileAtZero.REJECT:
            self._refuse(job)
        else:
            job.queued_at = self._clock.now
            self._without_encoder.append(job)

    def _refuse(self, job: Job) -> None:
        job.refused = True
        decoder = self._reservations.pop(job, None)
        if decoder is not None:
            decoder.release(job)
        elif job in self._without_reservation:
            self._without_reservation.remove(job)
        self.ended(job)

    def _embedded(self, job: Job) -> None:
        job.embedded_at = self._clock.now
        self._ready_for_prefill(job)

    def _request_reservation(self, job: Job) -> None:
        job.queued_at = self._clock.now
        if self._without_reservation or not self._reserve(job):
            self._without_reservation.append(job)

    def _reserve(self, job: Job) -> bool:
        tokens = job.prompt_tokens
        pod = max(self._decoders(), key=lambda pod: pod.free_after(tokens), default=None)
        if pod is None or pod.free_after(tokens) < 0:
            return False
        pod.reserve(job)
        self._reservations[job] = pod
        job.reserved_at = self._clock.now
        self._ready_for_prefill(job)
        return True

    def _ready_for_prefill(self, job: Job) -> None:
        """Prefill if embeddings and reservation exist; TTFT until now belongs to the later one."""
        if job.embedded_at is None or job.reserved_at is None:
            return
        if job.reserved_at > job.embedded_at and job.first_token_at is None:
            routed_at = job.request.at + self._hardware.gateway_seconds + job.wake_seconds
            job.stages = {"gateway": self._hardware.gateway_seconds}
            job.add_stage("decode_reserve", job.reserved_at - routed_at)
        self._prefill(job)

    def _prefill(self, job: Job) -> None:
        pods = self._prefills()
        inline = self._inline.get(job)
        if inline is not None and inline.lifecycle.accepting:
            inline.prefill(job)
        elif pods:
            _least_loaded(pods).prefill(job)
        else:
            self._without_prefill.append(job)


def _least_loaded(pods: Sequence[ComputePod]) -> ComputePod:
    """Return the pod with the least queued work."""
    return min(pods, key=lambda pod: pod.queued_seconds)


def _while_at_zero(policy: ServicePolicy) -> WhileAtZero:
    """Return what happens to images if no encoder pod accepts work."""
    encoder, prefill = policy.pools.get(Role.ENCODER), policy.pools.get(Role.PREFILL)
    if encoder is None:
        return WhileAtZero.INLINE_AT_PREFILL
    if encoder.zero is not None:
        return encoder.zero.while_at_zero
    inline = prefill is not None and prefill.inline
    return WhileAtZero.INLINE_AT_PREFILL if inline else WhileAtZero.QUEUE
