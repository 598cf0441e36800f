"""Reads each pod's /stats into a `Sample`. A pod that does not answer has no sample.

A sample is dropped, and counted with the reason, in each of these cases: the uid is another pod's
(a reused address), the version is unknown, a number is negative, not finite or out of range,
buckets are not cumulative, or the body exceeds 256 KiB. Workers and gateways of older images omit
`device`, `busy`, `gaps`, `held_for`, `wake` and the buckets of stages.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, TypeVar, cast

import aiohttp

from vlm_operator import names
from vlm_operator.metrics import BAD_SAMPLES
from vlm_operator.names import Role
from vlm_operator.state import (
    ItlHistogram,
    KvTokens,
    PodState,
    Sample,
    StageSeconds,
    Ttft,
    WorkCounters,
)
from vlm_operator.state.cluster_view import DownloadPod, DownloadProgress
from vlm_operator.state.pod_stats import ModelFacts, Phase

TIMEOUT_SECONDS = 2.0
MAX_BYTES = 256 * 1024
MAX_COUNT = 2**53  # greater integers are not exact as floats
MAX_SECONDS = 1e12
VERSION = 1
_AT_ONCE = 64
Found = TypeVar("Found")
_PHASES = ("loading", "ready", "draining", "failed")


class Scraper(Protocol):
    async def scrape(self, pods: Iterable[PodState]) -> dict[str, Sample]:
        """Return the sample of every pod with a valid answer, by uid; raises no error."""
        ...

    async def downloads(self, pods: Iterable[DownloadPod]) -> dict[str, DownloadProgress]:
        """Return the progress of every download with a valid answer, by uid; raises no error."""
        ...


class HttpScraper:
    """Reads http://POD_IP:9001/stats of at most 64 pods at once. The owner must close it."""

    def __init__(self, *, port: int = names.PORT_HTTP) -> None:
        self._port = port
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def scrape(self, pods: Iterable[PodState]) -> dict[str, Sample]:
        reachable = [pod for pod in pods if pod.ip and not pod.finished]
        gate = asyncio.Semaphore(_AT_ONCE)

        async def read(pod: PodState) -> Sample | None:
            async with gate:
                return await self._read(pod)

        samples = await asyncio.gather(*(read(pod) for pod in reachable))
        return {sample.pod_uid: sample for sample in samples if sample is not None}

    async def downloads(self, pods: Iterable[DownloadPod]) -> dict[str, DownloadProgress]:
        found = {}
        for pod in pods:
            if pod.ip and pod.started and not pod.finished:
                text = await self._get(pod.ip, "progress", answers=False)
                with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
                    found[pod.uid] = parse_progress(json.loads(text or ""), pod.uid)
        return found

    async def _read(self, pod: PodState) -> Sample | None:
        assert pod.ip is not None
        text = await self._get(pod.ip, "stats", answers=pod.containers_ready)
        if text is None:
            return None
        try:
            sample = parse_stats(json.loads(text))
        except (ValueError, KeyError, TypeError, AttributeError):
            return _drop("malformed")
        return sample if sample.pod_uid == pod.uid else _drop("another pod")

    async def _get(self, ip: str, path: str, *, answers: bool) -> bytes | None:
        """Return a body; None, and counted, if there is none. `answers` is whether it listens."""
        host = f"[{ip}]" if ":" in ip else ip
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                url = f"http://{host}:{self._port}/{path}"
                async with self._open().get(url, allow_redirects=False) as answer:
                    if answer.status != 200:
                        _drop("status")
                        return None
                    text = await answer.content.read(MAX_BYTES + 1)
                    while not answer.content.at_eof() and len(text) <= MAX_BYTES:
                        text += await answer.content.read(MAX_BYTES + 1 - len(text))
        except (TimeoutError, aiohttp.ClientError, OSError):
            # a pod that does not listen yet is not counted as a bad sample
            if answers:
                _drop("unreachable")
            return None
        if len(text) > MAX_BYTES:
            _drop("too long")
            return None
        return text

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
            self._session = aiohttp.ClientSession(timeout=timeout, trust_env=False)
        return self._session


def parse_progress(value: Mapping[str, Any], uid: str) -> DownloadProgress:
    """Validate the answer of the pod with `uid` to GET /progress and convert it.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: it is another pod's, or is malformed.
    """
    if value["version"] != VERSION or value["pod_uid"] != uid:
        raise ValueError("another version or pod")
    if not isinstance(value["checking"], bool):
        raise TypeError("checking is no boolean")
    total = _count(value["total_bytes"])
    return DownloadProgress(
        num_bytes=min(_count(value["num_bytes"]), total),
        total_bytes=total,
        checking=value["checking"],
        seconds_left=_optional(value["seconds_left"], _seconds),
    )


def parse_stats(value: Mapping[str, Any]) -> Sample:
    """Validate one answer by docs/stats.schema.json and convert it.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: the answer does not match the schema.
    """
    if value["version"] != VERSION:
        raise ValueError(f"version {value['version']!r} is not {VERSION}")
    phase = value["phase"]
    if phase not in _PHASES:
        raise ValueError(f"phase {phase!r} is none of {_PHASES}")
    if not isinstance(value["accepting"], bool):
        raise TypeError("accepting is no boolean")
    queue, wake = value["queue"], value.get("wake")
    # pods of version 0.1 report the counter of started work under its old name
    started = "started_work_seconds_total"
    started = started if started in queue else "admitted_work_seconds_total"
    return Sample(
        pod_uid=_text(value["pod_uid"]),
        boot_id=_text(value["boot_id"]),
        role=Role(value["role"]),
        phase=cast("Phase", phase),
        message=_text(value["message"])[:300],
        accepting=value["accepting"],
        inflight=_count(value["inflight"]),
        queued_requests=_count(queue["requests"]),
        queued_work_seconds=_seconds(queue["work_seconds"]),
        started_work_seconds=_seconds(queue[started]),
        kv=_optional(value["kv"], _kv),
        model=_optional(value["model"], _model),
        ttft={name: _ttft(item) for name, item in (value["ttft"] or {}).items()},
        config_hash=_optional(value["config_hash"], _text),
        busy={name: _busy(item) for name, item in (value.get("busy") or {}).items()},
        gaps=_optional(value.get("gaps"), _gaps),
        held_for={name: _count(item) for name, item in (value.get("held_for") or {}).items()},
        idle_seconds=None if wake is None else _seconds(wake["idle_seconds"]),
        waiting_for_wake=0 if wake is None else _count(wake["waiting_requests"]),
        device=_text(value.get("device") or "")[:64],
    )


def _optional(value: Any, read: Callable[[Any], Found]) -> Found | None:
    return None if value is None else read(value)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no string")
    return value


def _count(value: object) -> int:
    """Return a whole number of at least 0; JSON does not distinguish 2.0 from 2."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_COUNT:
        raise ValueError("no count")
    return value


def _seconds(value: object, *, limit: float = MAX_SECONDS) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is no number")
    if not 0 <= value <= limit:
        raise ValueError(f"{value!r} is not within 0 and {limit:g}")
    return float(value)


def _kv(value: Mapping[str, Any]) -> KvTokens:
    return KvTokens(
        capacity=_count(value["capacity_tokens"]),
        running=_count(value["running_tokens"]),
        reserved=_count(value["reserved_tokens"]),
        cached=_count(value["cached_tokens"]),
        free=_count(value["free_tokens"]),
        queued=_count(value["queued_tokens"]),
    )


def _model(value: Mapping[str, Any]) -> ModelFacts:
    return ModelFacts(
        kv_bytes_per_token=_count(value["kv_bytes_per_token"]),
        embedding_bytes_per_token=_count(value["embedding_bytes_per_token"]),
        image_tokens_per_megapixel=_count(value["image_tokens_per_megapixel"]),
        weights_bytes=_count(value["weights_bytes"]),
    )


def _ttft(value: Mapping[str, Any]) -> Ttft:
    return Ttft(
        count=_count(value["count"]),
        missed=_count(value["missed"]),
        sum_seconds=_seconds(value["sum_seconds"]),
        buckets=_buckets(value["buckets"]),
        stages={
            stage: StageSeconds(
                met=_seconds(item["met"]),
                missed=_seconds(item["missed"]),
                buckets=_buckets(item.get("buckets") or {}),
            )
            for stage, item in value["stages"].items()
        },
    )


def _gaps(value: Mapping[str, Any]) -> ItlHistogram:
    return ItlHistogram(count=_count(value["count"]), buckets=_buckets(value["buckets"]))


def _busy(value: Mapping[str, Any]) -> WorkCounters:
    return WorkCounters(
        seconds=_seconds(value["seconds"]),
        calls=_count(value["calls"]),
        items=_count(value["items"]),
        units=_count(value["units"]),
        squares=_seconds(value["squares"], limit=MAX_SECONDS**2),
    )


def _buckets(value: Mapping[str, Any]) -> dict[float, int]:
    """Return cumulative counts by ascending upper bound in seconds."""
    counts = {
        math.inf if bound == "+Inf" else _seconds(float(bound)): _count(count)
        for bound, count in value.items()
    }
    ordered = dict(sorted(counts.items()))
    if list(ordered.values()) != sorted(ordered.values()):
        raise ValueError("buckets are not cumulative")
    return ordered


def _drop(reason: str) -> Sample | None:
    BAD_SAMPLES.labels(reason=reason).inc()
    return None
