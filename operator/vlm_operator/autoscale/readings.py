"""What the pods say, joined with the pods that live, and how far it can be believed.

pod list ──uid──▶ sample ──▶ answered   its counters minus those at its last answer: what it did
                 none    ──▶ silent     up to stale_ticks: its last load counts on
                                        longer: no load, and no capacity either

A number that is absurd makes its pod silent, and is counted. Samples of pods that are gone are not
looked at. A process with a new boot id, or a counter that fell, says nothing of the time before.
Nothing at all in the counters of pods that answer is no traffic, which is not the same as silence.

ratio      measured over predicted seconds of work, by role and node type:
           (busy seconds + PRIOR · pods) / (admitted seconds + PRIOR · pods)
           both sums forget within FORGET_SECONDS; the ratio stays within LEAST and MOST

A pod that has not measured anything yet predicts 0, and a wrong prediction would be a wrong need:
rates and queues of predicted seconds are multiplied by the ratio. Where no work has ended, nothing
was measured, and the ratio stays. Pods that do not report for how long they were busy do not count.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from vlm_operator.autoscale.policy import PoolPolicy, ServicePolicy
from vlm_operator.autoscale.view import PodView, PoolView, View
from vlm_operator.names import POOL_ROLES, Role
from vlm_operator.state import Sample, WorkCounters

ABSURD = 1e12  # no pod has so many seconds, tokens or calls
MAX_RATE = 64.0  # work seconds admitted in a second by one pod, beyond which nobody believes it
KINDS = ("encode", "prefill", "decode")
NO_WORK = WorkCounters(0.0, 0, 0, 0, 0.0)


@dataclasses.dataclass(frozen=True)
class LastAnswer:
    """What a pod said when it last answered.

    Attributes:
        rate: work seconds that came a second, since the answer before; None of its first. What is
            begun counts as admitted, so that what came is that and the growth of the queue; less
            than 0 where waiting work was given up.
        running, promised, queued_tokens: KV tokens that sequences hold, that are reserved, and that
            are waited for; cached blocks are no load.
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

    @property
    def tokens(self) -> int:
        """KV tokens in use, promised or waited for."""
        return self.running + self.promised + self.queued_tokens


@dataclasses.dataclass(frozen=True)
class PodReading:
    """One ready pod.

    Attributes:
        answered: at this tick.
        last: what counts for it, None where it has been silent for too long, or never spoke.
        did: work by kind since its last answer; empty where that is unknown.
        began: seconds that it predicted for what it has begun since, None where that is unknown.
        ratio: what its predicted seconds are multiplied by (`Measured`).
    """

    uid: str
    variant: str
    speed: float
    answered: bool
    last: LastAnswer | None
    did: Mapping[str, WorkCounters] = dataclasses.field(default_factory=dict)
    began: float | None = None
    ratio: float = 1.0

    @property
    def unit_seconds(self) -> float:
        """Seconds on a replica of speed 1 that one of its predicted seconds takes."""
        return self.speed * self.ratio


@dataclasses.dataclass(frozen=True)
class PoolReading:
    """One pool at one tick, in units: replicas of speed 1.

    Attributes:
        pods: those that are ready.
        known: enough of them answered; a pool without a ready pod has nobody to ask.
        ready_units, coming_units: capacity that takes work; that starts or waits for a node.
        silent_units: of ready pods whose load is not known: they are in use, for all we know.
    """

    role: Role
    pods: tuple[PodReading, ...]
    known: bool
    ready_units: float
    coming_units: float
    silent_units: float
    replicas: int

    @property
    def units(self) -> float:
        """Capacity that is there or on its way."""
        return self.ready_units + self.coming_units

    @property
    def loads(self) -> tuple[tuple[PodReading, LastAnswer], ...]:
        """The pods whose load is known, with it."""
        return tuple((pod, pod.last) for pod in self.pods if pod.last is not None)

    @property
    def speed(self) -> float:
        """Of a replica of the present mix."""
        return self.units / self.replicas if self.replicas else 1.0


@dataclasses.dataclass(frozen=True)
class Readings:
    """All pools at one tick, the gateways that can be believed, and the uids of who cannot."""

    pools: Mapping[Role, PoolReading]
    answers: Mapping[str, LastAnswer]
    gateways: tuple[Sample, ...]
    absurd: tuple[str, ...]


def read_pools(policy: ServicePolicy, view: View, answers: Mapping[str, LastAnswer]) -> Readings:
    """Join samples and pods; `answers` are those before, by uid."""
    pools: dict[Role, PoolReading] = {}
    kept: dict[str, LastAnswer] = {}
    absurd: list[str] = []
    for role in POOL_ROLES:
        pool = view.pools.get(role)
        rules = policy.pools.get(role)
        if pool is None or rules is None:
            continue
        speeds = {item.name: item.speed for item in rules.variants}
        pods = []
        for pod in pool.pods:
            if pod.phase != "ready":
                continue
            sample, before = view.samples.get(pod.uid), answers.get(pod.uid)
            if sample is not None and not (
                plausible(sample) and _possible(before, sample, view.now)
            ):
                sample = None
                absurd.append(pod.uid)
            found = _pod(policy, pod, _speed(speeds, pod), sample, before, now=view.now)
            pods.append(found)
            if found.last is not None:
                kept[pod.uid] = found.last
        pools[role] = _pool(policy, rules, pool, tuple(pods))
    gateways = [item for item in view.samples.values() if item.role is Role.GATEWAY]
    believed = tuple(item for item in gateways if plausible_gateway(item))
    absurd += [item.pod_uid for item in gateways if item not in believed]
    return Readings(pools, kept, believed, tuple(absurd))


def plausible(sample: Sample) -> bool:
    """Whether a pod's numbers are finite, not negative and of this world."""
    kv = sample.kv
    if kv is not None and not (
        0 <= kv.running <= 2 * kv.capacity < ABSURD
        and 0 <= kv.reserved <= 2 * kv.capacity
        and 0 <= kv.queued < ABSURD
    ):
        return False
    if not (
        0.0 <= sample.queued_work_seconds < ABSURD and 0.0 <= sample.started_work_seconds < ABSURD
    ):
        return False
    for busy in sample.busy.values():
        if not (
            0.0 <= busy.seconds < ABSURD
            and 0 <= busy.calls < ABSURD
            and 0 <= busy.items < ABSURD
            and 0 <= busy.units < ABSURD**2
            and 0.0 <= busy.squares < ABSURD**2
        ):
            return False
    return True


def plausible_gateway(sample: Sample) -> bool:
    """The same of a gateway's."""
    numbers: list[float] = [*sample.held_for.values()]
    for item in sample.ttft.values():
        numbers += (item.count, item.missed, *item.buckets.values())
        for stage in item.stages.values():
            numbers += (stage.met, stage.missed, *stage.buckets.values())
    if sample.gaps is not None:
        numbers += (sample.gaps.count, *sample.gaps.buckets.values())
    return all(0 <= number < ABSURD for number in numbers)


def _possible(before: LastAnswer | None, sample: Sample, now: float) -> bool:
    """Whether a process can have admitted so much since its last answer."""
    if before is None or before.boot_id != sample.boot_id or now <= before.at:
        return True
    return sample.started_work_seconds - before.admitted <= MAX_RATE * (now - before.at)


def _pod(
    policy: ServicePolicy,
    pod: PodView,
    speed: float,
    sample: Sample | None,
    before: LastAnswer | None,
    *,
    now: float,
) -> PodReading:
    if sample is None:
        stale = policy.constants.stale_ticks * policy.interval_seconds
        last = before if before is not None and now - before.at <= stale else None
        return PodReading(pod.uid, pod.variant, speed, False, last)
    # what a process without a past does is unknown for one tick: as much as the one before it
    rate = before.rate if before is not None else None
    encoding = before.encode_rate if before is not None else 0.0
    did: Mapping[str, WorkCounters] = {}
    began = None
    if before is not None and before.boot_id == sample.boot_id and now > before.at:
        elapsed = now - before.at
        if sample.started_work_seconds >= before.admitted:
            began = sample.started_work_seconds - before.admitted
            rate = (began + sample.queued_work_seconds - before.queued_seconds) / elapsed
        did = _difference(before.busy, sample.busy)
        if "encode" in did:
            encoding = min(did["encode"].seconds / elapsed, MAX_RATE)
    kv = sample.kv
    last = LastAnswer(
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
        encode_rate=encoding,
        busy=sample.busy,
    )
    return PodReading(pod.uid, pod.variant, speed, True, last, did, began)


def _difference(
    before: Mapping[str, WorkCounters], now: Mapping[str, WorkCounters]
) -> dict[str, WorkCounters]:
    found = {}
    for kind in KINDS:
        if kind not in now:
            continue
        old, new = before.get(kind, NO_WORK), now[kind]
        grown = WorkCounters(
            new.seconds - old.seconds,
            new.calls - old.calls,
            new.items - old.items,
            new.units - old.units,
            new.squares - old.squares,
        )
        if min(grown.seconds, grown.calls, grown.items, grown.units, grown.squares) >= 0:
            found[kind] = grown
    return found


def _pool(
    policy: ServicePolicy, rules: PoolPolicy, pool: PoolView, pods: tuple[PodReading, ...]
) -> PoolReading:
    speeds = {item.name: item.speed for item in rules.variants}
    coming = [pod for pod in pool.pods if pod.phase in ("starting", "pending")]
    answered = sum(pod.answered for pod in pods)
    return PoolReading(
        role=rules.role,
        pods=pods,
        known=bool(pods) and answered >= policy.constants.fresh_share * len(pods),
        ready_units=sum(pod.speed for pod in pods),
        coming_units=sum(_speed(speeds, pod) for pod in coming),
        silent_units=sum(pod.speed for pod in pods if pod.last is None),
        replicas=len(pods) + len(coming),
    )


def _speed(speeds: Mapping[str, float], pod: PodView) -> float:
    """Of a variant that the manifest no longer names: 1."""
    speed = speeds.get(pod.variant, 1.0)
    return speed if math.isfinite(speed) and speed > 0 else 1.0


FORGET_SECONDS = 300.0
PRIOR_SECONDS = 20.0
LEAST, MOST = 0.5, 3.0


@dataclasses.dataclass(frozen=True)
class Measured:
    """Seconds of work of one role and node type, older ones counted less.

    Attributes:
        at: when work was last measured.
        busy: that the work took.
        admitted: that it was predicted to take when it was begun.
        begun: the same of work that was begun since.
        pods: that were ready then.
    """

    at: float
    busy: float = 0.0
    admitted: float = 0.0
    begun: float = 0.0
    pods: int = 1

    @property
    def ratio(self) -> float:
        """What predicted seconds are multiplied by."""
        prior = PRIOR_SECONDS * max(1, self.pods)
        found = (self.busy + prior) / (self.admitted + prior)
        return min(max(found, LEAST), MOST)


def measured(
    pools: Mapping[Role, PoolReading], memory: Mapping[str, Measured], *, now: float
) -> dict[str, Measured]:
    """Add what pods have done and begun since their last answers; keys are "role/variant"."""
    found = dict(memory)
    for role, pool in pools.items():
        kinds = ("encode",) if role is Role.ENCODER else ("prefill", "encode")
        for variant in {pod.variant for pod in pool.pods}:
            key = f"{role}/{variant}"
            own = [pod for pod in pool.pods if pod.variant == variant]
            begun = taken = 0.0
            for pod in own:
                done = [pod.did[kind].seconds for kind in kinds if kind in pod.did]
                if pod.began is not None and done:
                    begun += pod.began
                    taken += sum(done)
            old = found.get(key, Measured(now))
            if taken <= 0:
                found[key] = dataclasses.replace(old, begun=old.begun + begun)
                continue
            fade = math.exp(-max(0.0, now - old.at) / FORGET_SECONDS)
            found[key] = Measured(
                at=now,
                busy=old.busy * fade + taken,
                admitted=old.admitted * fade + old.begun + begun,
                pods=len(own),
            )
    return found


def corrected(
    pools: Mapping[Role, PoolReading], found: Mapping[str, Measured]
) -> dict[Role, PoolReading]:
    """The same readings, whose pods know by what their predictions are multiplied.

    Args:
        pools: the readings of a tick.
        found: what was measured before it: more work at a tick must never look like less.
    """
    ratios = {key: item.ratio for key, item in found.items()}
    return {
        role: dataclasses.replace(
            pool,
            pods=tuple(
                dataclasses.replace(pod, ratio=ratios.get(f"{role}/{pod.variant}", 1.0))
                for pod in pool.pods
            ),
        )
        for role, pool in pools.items()
    }
