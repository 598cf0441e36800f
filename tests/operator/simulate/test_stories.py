"""Short traffic that asks for one pool: ours grows that one, and nothing else."""

import dataclasses
import random

from support.simulated import quick_start, run
from vlm_cli.simulator.contenders import TriptychAutoscaler
from vlm_cli.simulator.hardware import QUIET, Curve
from vlm_cli.simulator.run import Run, Setup
from vlm_cli.simulator.scenario import standard
from vlm_cli.simulator.trace import Request, Trace
from vlm_operator.names import Role

CALM, STORM, SECONDS = 240.0, 420.0, 660.0  # when the other traffic begins and ends
POOLS = (Role.ENCODER, Role.PREFILL, Role.DECODE)


def traffic(calm: dict, storm: dict, *, seed: int = 1) -> Trace:
    """One kind of requests, and another one for a while."""
    rng = random.Random(seed)
    found, at = [], 0.0
    while True:
        kind = dict(storm if CALM <= at < STORM else calm)
        at += rng.expovariate(kind.pop("rate"))
        if at >= SECONDS:
            return Trace("story", SECONDS, tuple(found))
        share = kind.pop("share", 0.0)
        patches = (kind.pop("patches", 2000),) if rng.random() < share else ()
        kind.pop("patches", None)
        found.append(Request(at, patches=patches, **kind))


def service(**changes) -> Setup:
    setup = quick_start(standard(), 15.0)
    policy = setup.policy
    pools = {
        role: dataclasses.replace(
            pool, variants=(dataclasses.replace(pool.variants[0], startup_seconds=15.0),)
        )
        for role, pool in policy.pools.items()
    }
    # visual tokens are few, so that images are the encoder's matter alone
    hardware = dataclasses.replace(setup.hardware, tokens_per_patch=0.01, **changes)
    return dataclasses.replace(
        setup, hardware=hardware, policy=dataclasses.replace(policy, pools=pools), noise=QUIET
    )


def grown(setup: Setup, trace: Trace) -> tuple[set[Role], Run]:
    done = run(setup, trace, TriptychAutoscaler(setup.policy))
    before = next(item for item in reversed(done.moments) if item.at <= CALM)
    during = [item for item in done.moments if CALM < item.at <= STORM + 60]
    return {
        role for role in POOLS if max(item.wanted[role] for item in during) > before.wanted[role]
    }, done


PLAIN = {"rate": 3.0, "text_tokens": 300, "output_tokens": 100, "share": 0.3}


def test_a_burst_of_images_grows_the_encoder_alone():
    found, done = grown(service(), traffic(PLAIN, PLAIN | {"share": 1.0, "patches": 6000}))
    assert found == {Role.ENCODER}
    assert all(job.ended_at is not None and not job.refused for job in done.jobs)


def test_long_answers_grow_decode_alone():
    found, done = grown(service(), traffic(PLAIN, PLAIN | {"output_tokens": 700}))
    assert found == {Role.DECODE}
    assert all(job.delivered == job.request.output_tokens for job in done.jobs)


def test_long_prompts_grow_prefill_alone():
    """Decode has so much KV memory that the longer prompts do not matter to it."""
    setup = service(kv_tokens=200_000, prefill=Curve(0.01, 3e-4))
    found, _ = grown(setup, traffic(PLAIN, PLAIN | {"text_tokens": 2600, "output_tokens": 30}))
    assert found == {Role.PREFILL}


def test_an_encoder_without_images_goes_to_zero_and_comes_back_and_no_request_fails():
    setup = standard("text-only-lull")
    encoder = setup.policy.pools[Role.ENCODER]
    zero = dataclasses.replace(encoder.zero, idle_seconds=60.0)
    pools = dict(setup.policy.pools)
    pools[Role.ENCODER] = dataclasses.replace(encoder, zero=zero, down_seconds=60.0)
    pools = {
        role: dataclasses.replace(
            pool, variants=(dataclasses.replace(pool.variants[0], startup_seconds=15.0),)
        )
        for role, pool in pools.items()
    }
    policy = dataclasses.replace(setup.policy, pools=pools, window_seconds=60.0)
    setup = quick_start(dataclasses.replace(setup, policy=policy), 15.0)
    with_images = {"rate": 5.0, "text_tokens": 300, "output_tokens": 60, "share": 0.5}
    calm, lull = 120.0, 600.0
    rng, found, at = random.Random(2), [], 0.0
    while at < 900.0:
        at += rng.expovariate(with_images["rate"])
        has_image = not calm < at < lull and rng.random() < with_images["share"]
        found.append(Request(at, 300, 60, (2500,) if has_image else ()))
    done = run(setup, Trace("lull", 900.0, tuple(found)), TriptychAutoscaler(policy))
    during = [item.wanted[Role.ENCODER] for item in done.moments if calm < item.at <= lull]
    after = [item.wanted[Role.ENCODER] for item in done.moments if lull < item.at <= 900.0]
    assert min(during) == 0
    assert max(after) >= 1
    assert done.inline_images > 0, "images were answered while no encoder was there"
    assert all(job.ended_at is not None and not job.refused for job in done.jobs)
