"""Declares metrics: the name, type, help and value of each in one place.

The metrics of a worker's state are rows of tables (`Metric`). Names that the gateway uses are
constants. A test compares docs/metrics.md to all of them.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, Generic, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family

S = TypeVar("S")
Value = float | Mapping[Any, float] | None
"""A number, or numbers by the text of a label."""


class Kind(enum.Enum):
    """The type of a metric. A counter only grows."""

    GAUGE = GaugeMetricFamily
    COUNTER = CounterMetricFamily


GAUGE: Final = Kind.GAUGE
COUNTER: Final = Kind.COUNTER


@dataclasses.dataclass(frozen=True, slots=True)
class Metric(Generic[S]):
    """One metric, whose value is computed from a state `S`.

    Attributes:
        value: a number; with `label`, a number for each of its values; None if there is none now.
        stats: the key in `counters` of `/stats`, where the series of all label values are summed.
    """

    name: str
    kind: Kind
    text: str
    value: Callable[[S], Value]
    label: str = ""
    stats: str = ""

    def family(self, value: Value) -> Family | None:
        """The series in `/metrics`."""
        if value is None:
            return None
        labels = [self.label] if self.label else []
        family: Any = self.kind.value(self.name, self.text, labels=labels)
        series = value if isinstance(value, Mapping) else {None: value}
        for label_value, number in series.items():
            family.add_metric([] if label_value is None else [label_value], number)
        return family  # type: ignore[no-any-return]


def families(table: Iterable[Metric[S]], state: S) -> Iterator[Family]:
    """Yield what `/metrics` shows of a state."""
    for metric in table:
        if (family := metric.family(metric.value(state))) is not None:
            yield family


TTFT_SECONDS: Final = "triptych_ttft_seconds"  # histogram {modality}
STAGE_SECONDS: Final = "triptych_stage_seconds"  # histogram {stage, modality}
TTFT_STAGE_SECONDS_TOTAL: Final = (
    "triptych_ttft_stage_seconds_total"  # counter {stage, slo, modality}
)
SLO_REQUESTS_TOTAL: Final = "triptych_slo_requests_total"  # counter {slo, modality}
ITL_SECONDS: Final = "triptych_itl_seconds"  # histogram
WAKE_WAIT_SECONDS: Final = "triptych_wake_wait_seconds"  # histogram
OUTPUT_TOKENS_TOTAL: Final = "triptych_output_tokens_total"  # counter
VISUAL_TOKENS_TOTAL: Final = "triptych_visual_tokens_total"  # counter
IMAGE_TIERS_TOTAL: Final = "triptych_image_tiers_total"  # counter {tier}
VISUAL_TOKENS_PER_REQUEST: Final = "triptych_visual_tokens_per_request"  # histogram
IMAGES_TOTAL: Final = "triptych_images_total"  # counter
# counter {outcome}: ok, invalid, rejected, cancelled, error
REQUESTS_TOTAL: Final = "triptych_requests_total"
ROUTED_CACHED_TOKENS_TOTAL: Final = "triptych_routed_cached_tokens_total"  # counter {stage}
KNOWN_CACHE_ENTRIES: Final = "triptych_known_cache_entries"  # gauge
SESSION_PREFETCHES_TOTAL: Final = "triptych_session_prefetches_total"  # counter {outcome}
LENT_REQUESTS_TOTAL: Final = "triptych_lent_requests_total"
IMAGE_FETCHES_TOTAL: Final = "triptych_image_fetches_total"
IMAGE_FETCH_SECONDS: Final = "triptych_image_fetch_seconds"
TENANT_REQUESTS_TOTAL: Final = "triptych_tenant_requests_total"  # counter {tenant}
TENANT_TOKENS_TOTAL: Final = "triptych_tenant_tokens_total"  # counter {tenant, kind}
TENANT_REFUSED_TOTAL: Final = "triptych_tenant_refused_total"  # counter {tenant, limit}
# counter {bound}: the values of `gateway.memory.Bound`
GATEWAY_REFUSED_TOTAL: Final = "triptych_gateway_refused_total"
GATEWAY_MEMORY_BYTES: Final = "triptych_gateway_memory_bytes"  # gauge {kind}: body, prompt
GATEWAY_MEMORY_LIMIT_BYTES: Final = "triptych_gateway_memory_limit_bytes"  # gauge
GATEWAY_SETTINGS_VALID: Final = "triptych_gateway_settings_valid"  # gauge
INFLIGHT: Final = "triptych_inflight"  # gauge
ACCEPTING: Final = "triptych_accepting"  # gauge
HEARTBEAT_TIMESTAMP_SECONDS: Final = "triptych_heartbeat_timestamp_seconds"  # gauge

SECONDS_BUCKETS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5,
    0.75, 1.0, 1.5, 2.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
)  # fmt: skip
# Stages have many series: with few bucket edges, a gateway has fewer than 500 of them.
STAGE_BUCKETS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0,
)  # fmt: skip
