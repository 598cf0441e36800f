"""Computes the rows of `vlm top` from two reads of the same pods. Pure.

A rate is the growth of a counter over the time between both reads of one process. If the process
restarted, or one read failed, it is None.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vlm_cli.access import condition
from vlm_operator.autoscale.outcome import Reason
from vlm_operator.cluster import Manifest
from vlm_operator.names import Role
from vlm_operator.scrape import parse_stats
from vlm_operator.state import PodState, Sample

_ROLES = tuple(Role)
_TTFT_SHARE = 0.95


@dataclasses.dataclass(frozen=True)
class Stats:
    """One `/stats` of a pod.

    Attributes:
        at: time of the read in seconds, on a monotonic clock.
        counters: the integers of `counters`.
        cache: the integers of `encoder_cache`; empty without an encoder cache.
    """

    at: float
    sample: Sample
    counters: Mapping[str, int]
    cache: Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class PodReading:
    """A pod of a service, and its statistics or the reason why there are none."""

    namespace: str
    service: str
    pod: PodState
    stats: Stats | None
    problem: str = ""


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """All services and their pods at one time. `services` is sorted by namespace and name."""

    services: Sequence[Manifest]
    pods: Sequence[PodReading]


@dataclasses.dataclass(frozen=True)
class TtftLevel:
    """TTFT p95 of a modality in the interval, and its goal.

    Attributes:
        seconds: None if no request of the interval got a token.
        goal: seconds; None without a goal.
    """

    modality: str
    seconds: float | None
    goal: float | None

    @property
    def ratio(self) -> float:
        """TTFT over its goal; 0 if either is unknown."""
        return 0.0 if self.seconds is None or not self.goal else self.seconds / self.goal


@dataclasses.dataclass(frozen=True)
class Row:
    """One line: a service if `pod` is "", else one of its pods.

    Attributes:
        ready: such as `True`, or `2/3` for a service.
        inflight: of a service, requests in its gateways.
        queued_seconds: predicted time of the queue; of a service, that of its longest queue.
        kv_used, kv_capacity: tokens; of running and reserved sequences, without the prefix cache.
        cache_hit: share of encoder cache lookups in the interval that found their image, 0 to 1.
        ttft: of the modality that is closest to its goal, or furthest beyond it.
        problem: why there are no numbers; "" if there are.
    """

    namespace: str
    service: str
    pod: str = ""
    role: str = ""
    variant: str = ""
    node: str = ""
    ready: str = ""
    inflight: int | None = None
    queued: int | None = None
    queued_seconds: float | None = None
    kv_used: int | None = None
    kv_capacity: int | None = None
    tokens_per_second: float | None = None
    images_per_second: float | None = None
    ttft: TtftLevel | None = None
    cache_hit: float | None = None
    problem: str = ""


def read_stats(value: Any, *, at: float) -> Stats:
    """Validate and convert one answer of `/stats`.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: it does not match docs/stats.schema.json.
    """
    return Stats(
        at=at,
        sample=parse_stats(value),
        counters={name: int(count) for name, count in value["counters"].items()},
        cache={
            name: int(count)
            for name, count in (value["encoder_cache"] or {}).items()
            if not isinstance(count, Mapping)
        },
    )


def rows(before: Snapshot, after: Snapshot) -> list[Row]:
    """Return one row per service of `after`, each followed by the rows of its pods."""
    old = {reading.pod.uid: reading for reading in before.pods}
    by_service: dict[tuple[str, str], list[_Interval]] = defaultdict(list)
    for reading in after.pods:
        interval = _Interval(old.get(reading.pod.uid), reading)
        by_service[reading.namespace, reading.service].append(interval)
    found = []
    for service in after.services:
        meta = service["metadata"]
        intervals = sorted(
            by_service.get((meta["namespace"], meta["name"]), ()),
            key=lambda one: (_ROLES.index(one.after.pod.role), one.after.pod.name),
        )
        found.append(_service_row(service, intervals))
        found.extend(_pod_row(service, interval) for interval in intervals)
    return found


@dataclasses.dataclass(frozen=True)
class _Interval:
    """Two reads of a pod."""

    before: PodReading | None
    after: PodReading

    @property
    def bounds(self) -> tuple[Stats, Stats] | None:
        """Both statistics if they are of one process."""
        old, new = self.before.stats if self.before else None, self.after.stats
        if old is None or new is None or old.sample.boot_id != new.sample.boot_id:
            return None
        return (old, new) if new.at > old.at else None

    def rate(self, counter: str) -> float | None:
        """Growth of a counter per second."""
        if self.bounds is None:
            return None
        old, new = self.bounds
        return (new.counters.get(counter, 0) - old.counters.get(counter, 0)) / (new.at - old.at)


def _pod_row(service: Manifest, interval: _Interval) -> Row:
    reading, pod, stats = interval.after, interval.after.pod, interval.after.stats
    row = Row(
        namespace=reading.namespace,
        service=reading.service,
        pod=pod.name,
        role=pod.role.value,
        variant=pod.variant,
        node=pod.node or "",
        ready="Deleting" if pod.deleting else str(pod.ready),
        problem=reading.problem,
    )
    if stats is None:
        return row
    is_worker, kv = pod.role is not Role.GATEWAY, stats.sample.kv
    return dataclasses.replace(
        row,
        inflight=stats.sample.inflight,
        queued=stats.sample.queued_requests if is_worker else None,
        queued_seconds=stats.sample.queued_work_seconds if is_worker else None,
        kv_used=kv.running + kv.reserved if kv else None,
        kv_capacity=kv.capacity if kv else None,
        tokens_per_second=interval.rate("output_tokens"),
        images_per_second=interval.rate("images"),
        ttft=None if is_worker else _ttft(service, [interval]),
        cache_hit=_cache_hit([interval]),
    )


def _service_row(service: Manifest, intervals: Sequence[_Interval]) -> Row:
    """Sum the pods of a service; requests, tokens and images are those of its gateways."""
    meta = service["metadata"]
    gateways = [one for one in intervals if one.after.pod.role is Role.GATEWAY]
    of_gateways = [one.after.stats for one in gateways if one.after.stats]
    of_workers = [
        one.after.stats.sample
        for one in intervals
        if one.after.stats and one.after.pod.role is not Role.GATEWAY
    ]
    kv = [sample.kv for sample in of_workers if sample.kv]
    num_ready = sum(one.after.pod.ready for one in intervals)
    return Row(
        namespace=meta["namespace"],
        service=meta["name"],
        ready=f"{num_ready}/{len(intervals)}" + (" asleep" if _asleep(service) else ""),
        inflight=sum(one.sample.inflight for one in of_gateways) if of_gateways else None,
        queued=sum(one.queued_requests for one in of_workers) if of_workers else None,
        queued_seconds=max((one.queued_work_seconds for one in of_workers), default=None),
        kv_used=sum(one.running + one.reserved for one in kv) if kv else None,
        kv_capacity=sum(one.capacity for one in kv) if kv else None,
        tokens_per_second=_sum(one.rate("output_tokens") for one in gateways),
        images_per_second=_sum(one.rate("images") for one in gateways),
        ttft=_ttft(service, gateways),
        cache_hit=_cache_hit(intervals),
        problem="" if intervals else "it has no pods",
    )


def _asleep(service: Manifest) -> bool:
    ready = condition(service, "Ready") or {}
    return ready.get("status") == "True" and ready["reason"] == Reason.SCALED_TO_ZERO


def _sum(values: Iterable[float | None]) -> float | None:
    """Return the sum of the known values; None if none is known."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _cache_hit(intervals: Iterable[_Interval]) -> float | None:
    """Return (hits + joins) / lookups of the interval; None without lookups."""
    found = dict.fromkeys(("hits", "joins", "misses"), 0)
    for interval in intervals:
        if interval.bounds is not None:
            old, new = interval.bounds
            for name in found:
                found[name] += new.cache.get(name, 0) - old.cache.get(name, 0)
    lookups = sum(found.values())
    return (found["hits"] + found["joins"]) / lookups if lookups > 0 else None


def _ttft(service: Manifest, gateways: Iterable[_Interval]) -> TtftLevel | None:
    """Return the modality with the largest TTFT relative to its goal; None if there is nothing."""
    grown: dict[str, dict[float, int]] = {}
    for bounds in (one.bounds for one in gateways):
        if bounds is None:
            continue
        for sign, stats in ((1, bounds[1]), (-1, bounds[0])):
            for modality, ttft in stats.sample.ttft.items():
                buckets = grown.setdefault(modality, defaultdict(int))
                for bound, count in ttft.buckets.items():
                    buckets[bound] += sign * count
    default, goals = _goals(service)
    levels = [
        TtftLevel(modality, p95, goals.get(modality, default))
        for modality, buckets in sorted(grown.items())
        if (p95 := quantile(buckets, _TTFT_SHARE)) is not None
    ]
    if levels:
        return max(levels, key=lambda level: (level.ratio, level.seconds or 0.0))
    return None if default is None else TtftLevel("", None, default)


def _goals(service: Manifest) -> tuple[float | None, dict[str, float]]:
    """Return the default goal and those of single modalities, in seconds."""
    slo = service["spec"].get("slo") or {}
    default = slo.get("ttftP95Milliseconds")
    goals = {
        str(item["modality"]).lower(): item["ttftP95Milliseconds"] / 1000
        for item in slo.get("overrides") or []
    }
    return None if default is None else default / 1000, goals


def quantile(buckets: Mapping[float, int], share: float) -> float | None:
    """Return a quantile of a cumulative histogram, linear within a bucket; None if it is empty.

    As Prometheus' histogram_quantile: if it is in the bucket `+Inf`, the largest finite bound.
    """
    ordered = sorted(buckets.items())
    rank = share * max((count for _, count in ordered), default=0)
    if rank <= 0:
        return None
    lower, below = 0.0, 0
    for bound, count in ordered:
        if count >= rank:
            if math.isinf(bound):
                return lower
            return lower + (bound - lower) * (rank - below) / (count - below)
        lower, below = bound, count
    return lower
