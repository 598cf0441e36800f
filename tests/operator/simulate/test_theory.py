"""The simulator against queueing theory, where theory has an answer."""

import math
import statistics

import pytest

from support.simulated import one_of_each, poisson, run
from vlm_cli.simulator.hardware import Curve

# only prefill takes time, and it takes time in proportion to the prompt
LINEAR = {"prefill": Curve(0.0, 0.001), "gateway_seconds": 0.0, "chunk_tokens": 10**9}


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_one_prefill_pod_is_an_m_m_1_queue(load):
    setup = one_of_each(**LINEAR, prompts_per_step=1)
    mean = 0.3  # seconds of service
    trace = poisson(load / mean, 40_000.0 * mean, tokens=mean * 1000, output_tokens=1)
    done = run(setup, trace)
    sojourn = statistics.fmean(job.ttft for job in done.jobs)
    assert sojourn == pytest.approx(mean / (1 - load), rel=0.08 if load < 0.7 else 0.15)


def test_decode_holds_as_many_sequences_as_littles_law_says():
    setup = one_of_each(itl_per_token=0.0, itl_base=0.02, kv_tokens=10**6)
    held = []

    class Counting:
        def decide(self, reading):
            samples = reading.view.samples.values()
            held.append(next(item.inflight for item in samples if item.role == "decode"))
            return {}

    done = run(setup, poisson(2.0, 3000.0, tokens=50, output_tokens=101), Counting())
    waiting_too = statistics.fmean(job.ended_at - job.reserved_at for job in done.jobs)
    assert waiting_too == pytest.approx(2.0, abs=0.1), "100 tokens of 20 ms, and the prompt"
    arrived = len(done.jobs) / 3000.0
    assert statistics.fmean(held[10:-10]) == pytest.approx(arrived * waiting_too, rel=0.05)


def test_a_batch_of_images_takes_what_its_curve_says():
    setup = one_of_each(encode=Curve(0.5, 1e-4, 1e-8), media_seconds=0.0)
    done = run(setup, poisson(0.05, 2000.0, output_tokens=1, patches=(1000,)))
    fastest = min(job.stages["encode"] for job in done.jobs)
    assert fastest == pytest.approx(0.5 + 0.1 + 0.01)


def test_times_between_tokens_follow_the_kv_in_use():
    setup = one_of_each(itl_base=0.01, itl_per_token=1e-5, kv_tokens=10**6)
    trace = poisson(0.05, 1000.0, tokens=1, output_tokens=501)
    done = run(setup, trace)
    alone = [job.ended_at - job.first_token_at for job in done.jobs]
    # k grows from 2 to 502 tokens: 500 steps of 10 ms, and 10 µs · Σ k
    assert min(alone) == pytest.approx(500 * 0.01 + 1e-5 * 500 * 252, rel=0.02)
    assert math.isfinite(max(alone))
