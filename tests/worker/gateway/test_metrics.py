"""What a gateway tells of its requests."""

from __future__ import annotations

import math
import random

import pytest
from prometheus_client.parser import text_string_to_metric_families

from vlm_worker.gateway.metrics import OUTCOMES, GatewayMetrics
from vlm_worker.gateway.visual import TIERS
from vlm_worker.types import STAGES, Modality

SHARES = dict.fromkeys(STAGES, 0.01)


def samples(meters: GatewayMetrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = meters.exposition(num_inflight=0, accepting=True).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def ttft_edges(meters: GatewayMetrics, modality: Modality = Modality.TEXT) -> list[float]:
    return sorted(
        float(dict(labels)["le"])
        for name, labels in samples(meters)
        if name == "triptych_ttft_seconds_bucket" and dict(labels)["modality"] == modality
    )


def test_the_buckets_of_ttft_follow_the_goal() -> None:
    meters = GatewayMetrics()
    meters.first_token(0.5, SHARES, Modality.TEXT, 0.8)
    assert {0.2, 0.4, 0.8, 1.6, 3.2} <= set(ttft_edges(meters))
    meters.first_token(0.5, SHARES, Modality.TEXT, 0.7)
    edges = ttft_edges(meters)
    assert {0.175, 0.35, 0.7, 1.4, 2.8} <= set(edges)
    assert 3.2 not in edges


def test_the_95th_percentile_is_read_within_a_tenth_of_the_goal() -> None:
    goal, rng = 1.3, random.Random(4)
    for scale in (0.9, 1.05, 1.2):
        meters = GatewayMetrics()
        taken = sorted(rng.uniform(0.5, 1.0) * goal * scale / 0.975 for _ in range(2000))
        for seconds in taken:
            meters.first_token(seconds, SHARES, Modality.IMAGE, goal)
        buckets = meters.ttft[Modality.IMAGE].body["buckets"]
        rank, lower, below, found = 0.95 * 2000, 0.0, 0, math.nan
        for name, count in buckets.items():
            if count >= rank:
                found = lower + (float(name) - lower) * (rank - below) / (count - below)
                break
            lower, below = float(name), count
        assert found == pytest.approx(taken[1899], abs=0.1 * goal)


def test_what_was_counted_stays_counted_when_the_goal_changes() -> None:
    meters = GatewayMetrics()
    for number in range(40):
        meters.first_token(0.1 * number, SHARES, Modality.TEXT, 0.3 + 0.01 * (number % 7))
    body = meters.ttft[Modality.TEXT].body
    counts = list(body["buckets"].values())
    assert counts == sorted(counts)
    assert counts[-1] == body["count"] == 40
    assert len(counts) < 45  # old goals leave no edges behind


def test_tokens_and_images_are_counted_and_have_rates() -> None:
    meters = GatewayMetrics(now=0.0)
    meters.record_images([], 0)
    meters.record_images(["native", "low"], 128)
    meters.record_images(["native"], 64)
    for _ in range(3):
        meters.request("ok")
    meters.first_token(0.1, SHARES, Modality.IMAGE, None)
    for _ in range(29):
        meters.next_token(0.01)
    meters.tick(6.0)
    found = samples(meters)
    assert found["triptych_output_tokens_total", ()] == 30
    assert found["triptych_images_total", ()] == 3
    assert found["triptych_image_tiers_total", (("tier", "native"),)] == 2
    assert found["triptych_image_tiers_total", (("tier", "low"),)] == 1
    assert found["triptych_visual_tokens_per_request_count", ()] == 2
    assert found["triptych_visual_tokens_per_request_sum", ()] == 192
    rates = meters.rates(10.0)
    assert rates == {
        "window_seconds": 60.0,
        "requests_per_second": 0.3,
        "output_tokens_per_second": 3.0,
        "visual_tokens_per_second": 19.2,
        "visual_tokens_per_image_request": pytest.approx(96.0),
    }
    assert meters.rates(1000.0)["output_tokens_per_second"] == 0.0


def test_hostile_requests_make_no_series() -> None:
    """Every label that a request has a say in comes from a closed set; goals are the operator's."""
    meters, rng = GatewayMetrics(), random.Random(9)
    for number in range(3000):
        meters.request(rng.choice(["ok", "invalid", "rejected", "cancelled", "error"]))
        meters.record_images(rng.choices(TIERS, k=rng.randrange(5)), rng.randrange(10**6))
        modality = rng.choice([Modality.TEXT, Modality.IMAGE])
        meters.first_token(rng.expovariate(1), SHARES, modality, rng.choice([None, 1.0, 2.0]))
        meters.next_token(rng.expovariate(1))
        if number == 300:
            few = len(samples(meters))
    many = len(samples(meters))
    print(f"series after 300 and 3,000 requests: {few}, {many}")
    assert many <= few + 60  # the edges of another goal
    assert many <= 520


def test_counts_of_requests_start_at_zero_so_that_rates_have_the_first_request() -> None:
    found = samples(GatewayMetrics())
    for outcome in OUTCOMES:
        assert found["triptych_requests_total", (("outcome", outcome),)] == 0
    for modality in Modality:
        for slo in ("met", "missed"):
            labels = (("modality", modality.value), ("slo", slo))
            assert found["triptych_slo_requests_total", labels] == 0
