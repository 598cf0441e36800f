"""Joins the samples of one tick with the ready pods, by uid. Pure.

sample in this tick         answered: counters minus those of the pod's previous sample
none for up to stale_ticks  silent: the pod keeps the load of its previous sample
none for longer             silent: neither load nor capacity is known

`scrape` has dropped samples whose numbers are negative, not finite or of another pod. Here a sample
also counts as absent if it contradicts itself or the previous one. If the boot id is new or a
counter decreased, growth is unknown for one tick.

ratio   measured over predicted seconds of work, per role and variant:
        (busy seconds + prior) / (started seconds + prior), prior = PRIOR_SECONDS · pods
        both sums decay with FORGET_SECONDS; the ratio is clipped to MIN_RATIO..MAX_RATIO

A worker that has not measured its speed predicts 0 seconds. So predicted seconds, of rates and of
queues, are multiplied by the ratio. It stays while no work ends or pods report no busy seconds.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Mapping

from vlm_operator.autoscale.policy import ServicePolicy
from vlm_operator.autoscale.view import View
from vlm_operator.names import POOL_ROLES, Role
from vlm_operator.state import Sample, WorkCounters

MAX_RATE = 64.0  # work seconds that one pod can start per second
KINDS = ("encode", "prefill", "decode")
FORGET_SECONDS = 300.0
PRIOR_SECONDS = 20.0
MIN_RATIO, MAX_RATIO = 0.5, 3.0
_NO_WORK = WorkCounters(0.0, 0, 0, 0, 0.0)
_COUNTERS = operator.attrgetter("seconds", "calls", "items", "units", "squares")


@dataclasses.dataclass(frozen=True)
class LastSample:
    """The load of a pod by its last valid sample.

    Attributes:
        at: time of the sample, seconds since the epoch.
        admitted: counter of predicted seconds of work that the process started.
        rate: predicted work seconds that arrived per second since the sample before: work started
            plus growth of the queue, so negative if waiting work was cancelled. None if unknown.
        running, promised, queued_tokens: KV tokens that sequences hold, that are reserved and that
            requests wait for. Cached blocks can be evicted and are no load.
        capacity: KV tokens; 0 without a KV cache.
        encode_rate: seconds of image encoding per second.
    """

    at: float
    boot_id: str
    admitted: float
    rate: float | None
    queued_seconds: float
    inflight: int
    running: int
    promised: int
    queued_tokens: int
    capacity: int
    encode_rate: float
    busy: Mapping[str, WorkCounters]


@dataclasses.dataclass(frozen=True)
class PodReading:
    """One ready pod.

    Attributes:
        ratio: measured over predicted seconds (`Measured`).
        answered: this tick has a valid sample of the pod.
        last: its load; None if it has been silent for more than stale_ticks, or always.
        work: growth of its work counters since the previous sample, by kind; {} if unknown.
        started: growth of its predicted seconds of started work; None if unknown.
    """

    uid: str
    variant: str
    speed: float
    ratio: float = 1.0
    answered: bool = False
    last: LastSample | None = None
    work: Mapping[str, WorkCounters] = dataclasses.field(default_factory=dict)
    started: float | None = None

    @property
    def unit_seconds(self) -> float:
        """Seconds on a replica of speed 1 per predicted second of this pod."""
        return self.speed * self.ratio


@dataclasses.dataclass(frozen=True)
class PoolReading:
    """One pool at one tick, in units: replicas of speed 1.

    Attributes:
        pods: the ready pods.
        known: at least fresh_share of them answered; False without a ready pod.
        coming_units: capacity of pods that start or wait for a node.
        replicas: pods that are ready, start or wait for a node.
    """

    role: Role
    pods: tuple[PodReading, ...]
    known: bool
    coming_units: float
    replicas: int

    @property
    def ready_units(self) -> float:
        return sum(pod.speed for pod in self.pods)

    @property
    def silent_units(self) -> float:
        """Capacity of ready pods of unknown load. It counts as fully used."""
        return sum(pod.speed for pod in self.pods if pod.last is None)

    @property
    def units(self) -> float:
        return self.ready_units + self.coming_units

    @property
    def usable_units(self) -> float:
        """Capacity, without pods of unknown load."""
        return max(0.0, self.units - self.silent_units)

    @property
    def speed(self) -> float:
        """Mean speed of a replica; 1 without replicas."""
        return self.units / self.replicas if self.replicas else 1.0

    @property
    def loads(self) -> list[tuple[PodReading, LastSample]]:
        """The pods of known load."""
        return [(pod, pod.last) for pod in self.pods if pod.last is not None]


@dataclasses.dataclass(frozen=True)
class Measured:
    """Busy and predicted seconds of one role and variant.

    Attributes:
        at: time of the last tick with busy seconds, seconds since the epoch.
        busy: busy seconds, decayed.
        admitted: predicted seconds of the work started until `at`, decayed.
        begun: predicted seconds of the work started since `at`.
        pods: ready pods at `at`.
    """

    at: float
    busy: float = 0.0
    admitted: float = 0.0
    begun: float = 0.0
    pods: int = 1

    @property
    def ratio(self) -> float:
        prior = PRIOR_SECONDS * max(1, self.pods)
        return min(max((self.busy + prior) / (self.admitted + prior), MIN_RATIO), MAX_RATIO)


def read_pools(
    policy: ServicePolicy,
    view: View,
    before: Mapping[str, LastSample],
    measured: Mapping[str, Measured],
) -> tuple[dict[Role, PoolReading], tuple[str, ...]]:
    """Return a reading per pool, and the uids of pods whose samples are contradictory.

    Args:
        policy: the service's settings.
        view: pods and samples of this tick.
        before: the last samples known at the previous tick, by uid.
        measured: by "role/variant", without this tick: more work must never look like less.
    """
    pools: dict[Role, PoolReading] = {}
    absurd: list[str] = []
    stale = policy.constants.stale_ticks * policy.interval_seconds
    for role in POOL_ROLES:
        if role not in view.pools or role not in policy.pools:
            continue
        speeds = {item.name: item.speed for item in policy.pools[role].variants}
        pool, pods = view.pools[role], []
        for pod in pool.of("ready"):
            sample, last = view.samples.get(pod.uid), before.get(pod.uid)
            known = measured.get(f"{role}/{pod.variant}")
            reading = PodReading(
                uid=pod.uid,
                variant=pod.variant,
                speed=speeds.get(pod.variant, 1.0),
                ratio=1.0 if known is None else known.ratio,
            )
            if sample is not None and _absurd(sample, last, now=view.now):
                absurd.append(pod.uid)
                sample = None
            if sample is not None:
                reading = _answered(reading, sample, last, now=view.now)
            elif last is not None and view.now - last.at <= stale:
                reading = dataclasses.replace(reading, last=last)
            pods.append(reading)
        coming = [*pool.of("starting"), *pool.of("pending")]
        answered = sum(pod.answered for pod in pods)
        pools[role] = PoolReading(
            role=role,
            pods=tuple(pods),
            known=bool(pods) and answered >= policy.constants.fresh_share * len(pods),
            coming_units=sum(speeds.get(pod.variant, 1.0) for pod in coming),
            replicas=len(pods) + len(coming),
        )
    return pools, tuple(absurd)


def add_measured(
    pools: Mapping[Role, PoolReading], memory: Mapping[str, Measured], *, now: float
) -> dict[str, Measured]:
    """Add what pods computed and started in this tick; keys are "role/variant"."""
    found = dict(memory)
    for role, pool in pools.items():
        kinds = ("encode",) if role is Role.ENCODER else ("prefill", "encode")
        for variant in {pod.variant for pod in pool.pods}:
            own = [pod for pod in pool.pods if pod.variant == variant]
            started = busy = 0.0
            for pod in own:
                computed = [pod.work[kind].seconds for kind in kinds if kind in pod.work]
                if pod.started is not None and computed:
                    started += pod.started
                    busy += sum(computed)
            old = found.get(f"{role}/{variant}", Measured(now))
            new = dataclasses.replace(old, begun=old.begun + started)
            if busy > 0:
                decay = math.exp(-max(0.0, now - old.at) / FORGET_SECONDS)
                admitted = old.admitted * decay + old.begun + started
                new = Measured(now, old.busy * decay + busy, admitted, pods=len(own))
            found[f"{role}/{variant}"] = new
    return found


def _absurd(sample: Sample, last: LastSample | None, *, now: float) -> bool:
    """Whether KV use is beyond its capacity, or work was started faster than a pod can."""
    kv = sample.kv
    if kv is not None and max(kv.running, kv.reserved) > 2 * kv.capacity:
        return True
    if last is None or last.boot_id != sample.boot_id or now <= last.at:
        return False
    return sample.started_work_seconds - last.admitted > MAX_RATE * (now - last.at)


def _answered(
    pod: PodReading, sample: Sample, last: LastSample | None, *, now: float
) -> PodReading:
    # if growth is unknown, the rates of the tick before stay
    rate, encode_rate = (last.rate, last.encode_rate) if last is not None else (None, 0.0)
    work: Mapping[str, WorkCounters] = {}
    started = None
    if last is not None and last.boot_id == sample.boot_id and now > last.at:
        elapsed = now - last.at
        if sample.started_work_seconds >= last.admitted:
            started = sample.started_work_seconds - last.admitted
            rate = (started + sample.queued_work_seconds - last.queued_seconds) / elapsed
        work = _growth(last.busy, sample.busy)
        if "encode" in work:
            encode_rate = min(work["encode"].seconds / elapsed, MAX_RATE)
    kv = sample.kv
    found = LastSample(
        at=now,
        boot_id=sample.boot_id,
        admitted=sample.started_work_seconds,
        rate=rate,
        queued_seconds=sample.queued_work_seconds,
        inflight=sample.inflight,
        running=kv.running if kv else 0,
        promised=kv.reserved if kv else 0,
        queued_tokens=kv.queued if kv else 0,
        capacity=kv.capacity if kv else 0,
        encode_rate=encode_rate,
        busy=sample.busy,
    )
    return dataclasses.replace(pod, answered=True, last=found, work=work, started=started)


def _growth(
    before: Mapping[str, WorkCounters], now: Mapping[str, WorkCounters]
) -> dict[str, WorkCounters]:
    """Return differences by kind, without kinds of which a counter decreased."""
    found = {}
    for kind in [kind for kind in KINDS if kind in now]:
        pairs = zip(_COUNTERS(now[kind]), _COUNTERS(before.get(kind, _NO_WORK)), strict=True)
        grown = [new - old for new, old in pairs]
        if min(grown) >= 0:
            found[kind] = WorkCounters(*grown)
    return found
