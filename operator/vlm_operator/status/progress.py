"""Decides whether a service makes progress, and since when it does not. Pure.

generation, revision ─ new ─▶ reset
pods scheduled, pulled, loaded, ready; percent of a start; old pods gone ─ new maximum ─▶ progress
every role serves its floor, no rollout ─▶ settled: the generation is reached

A pod that crashes and restarts exceeds no earlier maximum, so it is no progress.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping

from vlm_operator.cluster import epoch_seconds
from vlm_operator.pods.parts import start_seconds
from vlm_operator.state import Manifest
from vlm_operator.state.downloads import DownloadState
from vlm_operator.status.inputs import StatusInputs

MIN_START_SECONDS = 600.0


@dataclasses.dataclass(frozen=True)
class Progress:
    """State that a loop keeps between turns.

    Attributes:
        key: generation and revision that the state is about.
        at: time of the last progress, in seconds since the epoch.
        settled: whether the service has reached this generation once.
        maxima: maximum of each of `_counts`.
    """

    key: tuple[int, str]
    at: float
    settled: bool = False
    maxima: Mapping[str, int] = dataclasses.field(default_factory=dict)


def restored(status: Manifest, *, now: float) -> Progress:
    """Restore the state from the status that an earlier process wrote; `maxima` is empty."""
    conditions = {item["type"]: item for item in status.get("conditions", [])}
    generation = int(status.get("observedGeneration", 0))
    quiet = all(
        conditions.get(kind, {}).get("status") == "False"
        and conditions[kind].get("observedGeneration") == generation
        for kind in ("Reconciling", "Stalled")
    )
    last = status.get("lastProgressTime")
    at = now if last is None else epoch_seconds(last)
    return Progress((generation, status.get("updateRevision", "")), min(at, now), settled=quiet)


def update_progress(
    before: Progress, view: StatusInputs, *, revision: str, serving: bool
) -> Progress:
    """Compare this turn with earlier ones.

    `revision` is the one of the whole service that the manifest asks for. `serving` is whether
    every role has its floor in pods of the rollout's revisions.
    """
    now, key = view.observed.now, (view.written.generation, revision)
    counts = _counts(view)
    done = view.step.done and not view.step.back and view.failure is None and serving
    if before.key != key:
        return Progress(key, now, settled=done, maxima=counts)
    if done:
        return Progress(key, now, settled=True, maxima=counts)
    if not before.maxima:  # restored from the status of another process
        return dataclasses.replace(before, maxima=counts)
    gained = any(count > before.maxima.get(name, 0) for name, count in counts.items())
    maxima = {name: max(count, before.maxima.get(name, count)) for name, count in counts.items()}
    return Progress(key, now if gained else before.at, before.settled, {**before.maxima, **maxima})


def deadline_seconds(view: StatusInputs) -> float:
    """Return the seconds without progress after which a user must act.

    While a model loads, its start limit applies if it is longer. The limit is twice the measured
    start time, but at least `MIN_START_SECONDS`; without a measured start, it is
    `model.startTimeoutSeconds`. A deadline below `MIN_START_SECONDS` is never extended.
    """
    if view.held and view.download is not None:
        return _download_deadline(view.download, view)
    unmeasured = float(start_seconds(view.service))
    deadline = float(view.service.spec.rollout.progress_deadline_seconds)
    loading = [
        pod
        for role in view.service.spec.pools.present
        for pod in view.aimed(role)
        if pod.starting and any(item.started for item in pod.containers)
    ]
    if deadline < MIN_START_SECONDS or not loading:
        return deadline
    measured = {
        (role, variant.name): variant.startup_seconds
        for role, pool in view.policy.pools.items()
        for variant in pool.variants
    }
    limits = [measured.get((pod.role, pod.variant)) for pod in loading]
    starts = (unmeasured if item is None else max(MIN_START_SECONDS, 2 * item) for item in limits)
    return max(deadline, *starts)


def _download_deadline(download: DownloadState, view: StatusInputs) -> float:
    """Return the deadline of a download; a pod that runs and reports nothing has none."""
    silent = any(pod.started and pod.progress is None for pod in download.running)
    return math.inf if silent else float(view.service.spec.rollout.progress_deadline_seconds)


def _download_counts(download: DownloadState) -> dict[str, int]:
    reports = [pod.progress for pod in download.pods if pod.progress is not None]
    return {
        "model bound": int(download.claim_phase == "Bound"),
        "model scheduled": sum(pod.scheduled for pod in download.pods),
        "model pulled": sum(pod.started for pod in download.pods),
        "model MiB": max((item.num_bytes >> 20 for item in reports), default=0),
        "model checked MiB": max(
            (item.num_bytes >> 20 for item in reports if item.checking), default=0
        ),
        "model complete": int(download.complete),
    }


_PERCENT = re.compile(r"(\d{1,3})(?:\.\d+)? ?%")


def percent(message: str) -> int | None:
    """Return the percentage in a loading worker's message, in steps of 10; None if it has none."""
    match = _PERCENT.search(message)
    return None if match is None else min(100, int(match[1])) // 10 * 10


def steady(message: str) -> str:
    """Return a worker's message that changes rarely: percent in steps of 10, no rate, no time left.

    The worker's /stats and its log have rate and time left.
    """
    kept = re.sub(r"( at [\d.]+ \w+/s)?, \d+ s left", "", message)
    return _PERCENT.sub(lambda _: f"{percent(message)} %", kept)


def _shares(role: str, messages: Iterable[str]) -> dict[str, int]:
    """Return the percentages of each step of a role's starts, summed over its pods."""
    found: dict[str, int] = {}
    for message in messages:
        share = percent(message)
        if share is not None:
            step = f"{role} {_PERCENT.split(message)[0]}"
            found[step] = found.get(step, 0) + share
    return found


def _counts(view: StatusInputs) -> dict[str, int]:
    counts = {"old": 0} | (_download_counts(view.download) if view.download else {})
    for role in {pod.role for pod in view.observed.pods}:
        pods = view.aimed(role)
        samples = [item for pod in pods if (item := view.observed.samples.get(pod.uid))]
        counts |= {
            f"{role} scheduled": sum(pod.scheduled for pod in pods),
            f"{role} pulled": sum(any(item.started for item in pod.containers) for pod in pods),
            f"{role} loaded": sum(sample.phase == "ready" for sample in samples),
            f"{role} containers": sum(pod.containers_ready for pod in pods),
            f"{role} ready": sum(pod.ready and not pod.draining for pod in pods),
        }
        counts |= _shares(role, (sample.message for sample in samples))
        counts["old"] += len(pods) - len(view.observed.of(role))
    return counts
