"""The operator's metrics, in one registry. docs/metrics.md lists them; a test compares both."""

from __future__ import annotations

import contextlib

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

REGISTRY = CollectorRegistry()

TURNS = Histogram(
    "triptych_operator_turn_seconds",
    "Seconds that one turn of a service's loop took, by result.",
    ["result"],
    buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
    registry=REGISTRY,
)
MISSED_EVENTS = Counter(
    "triptych_operator_missed_events",
    "Changes of VLMServices that a list shows and that no event reported.",
    registry=REGISTRY,
)
WRITES = Counter(
    "triptych_operator_writes",
    "Objects written to the API server, by kind and verb.",
    ["kind", "verb"],
    registry=REGISTRY,
)
UNLEARNED = Counter(
    "triptych_operator_unlearned",
    "Dry runs that the API server refused: additions to objects of that kind go unnoticed.",
    ["kind"],
    registry=REGISTRY,
)
BAD_SAMPLES = Counter(
    "triptych_operator_bad_samples",
    "Answers of pods to /stats that were dropped: unreachable, malformed, absurd, of another pod.",
    ["reason"],
    registry=REGISTRY,
)
LOOP_LAG = Histogram(
    "triptych_operator_loop_lag_seconds",
    "Seconds by which the operator's event loop came round later than asked.",
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5),
    registry=REGISTRY,
)
IDENTITY_ISSUED = Counter(
    "triptych_operator_identity_issued",
    "Certificates that the operator issued, by cause.",
    ["cause"],
    registry=REGISTRY,
)
IDENTITY_FAILURES = Counter(
    "triptych_operator_identity_failures",
    "Failed attempts to issue a certificate or to compare its Secret.",
    registry=REGISTRY,
)
IDENTITY_EXPIRY = Gauge(
    "triptych_operator_identity_expiry_seconds",
    "End of the validity of a role's certificate, in seconds since the epoch.",
    ["namespace", "service", "role"],
    registry=REGISTRY,
)
LEADER = Gauge("triptych_operator_leader", "1 while this process leads.", registry=REGISTRY)
SCALE_DECISIONS = Counter(
    "triptych_scale_decisions",
    "Decisions that changed a pool's size, by the reason they gave.",
    ["namespace", "service", "role", "reason"],
    registry=REGISTRY,
)
DESIRED_REPLICAS = Gauge(
    "triptych_desired_replicas",
    "Replicas that a pool should have.",
    ["namespace", "service", "role"],
    registry=REGISTRY,
)
RECOMMENDED_REPLICAS = Gauge(
    "triptych_recommended_replicas",
    "Replicas that a pool's need alone asks for, before pace, budget and holds.",
    ["namespace", "service", "role"],
    registry=REGISTRY,
)
READY_REPLICAS = Gauge(
    "triptych_ready_replicas",
    "Replicas of a pool that are ready and accept work.",
    ["namespace", "service", "role"],
    registry=REGISTRY,
)
SCALE_LIMITED = Gauge(
    "triptych_scale_limited",
    "1 for the bound that limits the last decision about a pool.",
    ["namespace", "service", "role", "bound"],
    registry=REGISTRY,
)
WAKING = Gauge(
    "triptych_waking",
    "1 while a service starts from zero and makes progress; absent if it does not scale to zero.",
    ["namespace", "service"],
    registry=REGISTRY,
)
STALLED = Gauge(
    "triptych_stalled",
    "1 while the condition Stalled of a service is True.",
    ["namespace", "service"],
    registry=REGISTRY,
)
ACCELERATORS = Gauge(
    "triptych_accelerators",
    "Accelerators of a pool's scheduled pods.",
    ["namespace", "service", "role"],
    registry=REGISTRY,
)
COST_PER_HOUR = Gauge(
    "triptych_cost_per_hour",
    "Cost of a pool's pods per hour, if a node class has a cost.",
    ["namespace", "service", "role"],
    registry=REGISTRY,
)
TTFT_TARGET = Gauge(
    "triptych_ttft_target_seconds",
    "Target of the 95th percentile of time to first token.",
    ["namespace", "service", "modality"],
    registry=REGISTRY,
)
ITL_TARGET = Gauge(
    "triptych_itl_target_seconds",
    "Target of the 95th percentile of the time between two tokens.",
    ["namespace", "service"],
    registry=REGISTRY,
)
OF_A_SERVICE = (
    IDENTITY_EXPIRY,
    SCALE_DECISIONS,
    DESIRED_REPLICAS,
    RECOMMENDED_REPLICAS,
    READY_REPLICAS,
    SCALE_LIMITED,
    WAKING,
    STALLED,
    ACCELERATORS,
    COST_PER_HOUR,
    TTFT_TARGET,
    ITL_TARGET,
)


def exposition() -> bytes:
    return generate_latest(REGISTRY)


def set_or_remove(gauge: Gauge, value: float | None, *labels: str) -> None:
    """Set one series; if the value is None, remove it."""
    if value is None:
        gauge.remove(*labels)
    else:
        gauge.labels(*labels).set(value)


def forget(namespace: str, service: str, *, role: str | None = None) -> None:
    """Remove all series of a deleted service, or of one pool that it no longer has."""
    labels = {"namespace": namespace, "service": service}
    if role is not None:
        labels["role"] = role
    for metric in OF_A_SERVICE:
        with contextlib.suppress(ValueError):  # a metric of the whole service has no label `role`
            metric.remove_by_labels(labels)
