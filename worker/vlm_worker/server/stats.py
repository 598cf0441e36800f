"""`/stats`, version 1: state and snapshot -> the document of docs/stats.schema.json."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from vlm_worker.engine.settings import EngineStats
from vlm_worker.server.state import Snapshot, WorkerState, growth_of

VERSION = 1


def stats_document(state: WorkerState, snapshot: Snapshot | None) -> dict[str, Any]:
    """The document; parts that are not known before loading are zero or null."""
    settings = state.settings
    identity = settings.identity
    engine = snapshot.engine if snapshot else EngineStats()
    return {
        "version": VERSION,
        "role": settings.role.value,
        "stages": sorted(stage.value for stage in settings.stages),
        "service": identity.service,
        "revision": identity.revision,
        "compat": settings.compat,
        "variant": identity.variant,
        "pod_name": identity.pod_name,
        "pod_uid": identity.pod_uid,
        "boot_id": state.boot_id.hex(),
        "uptime_seconds": round(state.uptime_seconds, 3),
        "phase": state.phase.value,
        "message": state.message,
        "accepting": state.accepting,
        "inflight": max(engine.inflight, snapshot.num_calls) if snapshot else 0,
        "queue": {
            "requests": engine.num_waiting + engine.num_waiting_images,
            "work_seconds": engine.work_queued_seconds,
            "admitted_work_seconds_total": engine.work_admitted_seconds_total,
            "oldest_wait_seconds": engine.queue.oldest_wait_seconds,
            "waiting": dict(engine.queue.waiting),
            "running_limit": engine.queue.running_limit,
        },
        "kv": dataclasses.asdict(engine.kv) if engine.kv else None,
        "encoder_cache": dataclasses.asdict(engine.encoder_cache) if snapshot else None,
        "leases": dataclasses.asdict(snapshot.leases) if snapshot else None,
        "counters": {
            "requests": engine.requests,
            "images": engine.images,
            "visual_tokens": engine.visual_tokens,
            "output_tokens": engine.output_tokens,
            "preemptions": engine.preemptions,
            "patches": engine.patches,
            "out_of_memory": engine.out_of_memory,
            "prefix_cache_queries": engine.prefix_cache_queries,
            "prefix_cache_hits": engine.prefix_cache_hits,
        },
        "rates": _rates(state, engine),
        "model": dataclasses.asdict(state.model) if state.model else None,
        "device": state.device,
        "busy": {kind.value: dataclasses.asdict(busy) for kind, busy in engine.busy.items()},
        "ttft": None,
        "gaps": None,
        "held_for": None,
        "config_hash": None,
    }


def _rates(state: WorkerState, engine: EngineStats) -> dict[str, float]:
    """Growth a second, over the last minute."""
    found = state.rates.per_second(time.monotonic(), growth_of(engine))
    return {"window_seconds": state.rates.window_seconds, **found}
