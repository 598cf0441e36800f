"""Laws of an estimate: the same twice, more for more, twice for twice, and never nonsense."""

import copy
import dataclasses
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.estimates import BOUNDS, NOW, TICK, ZERO, Pod, Service, gateway, policy
from vlm_operator.autoscale.constants import Constants
from vlm_operator.autoscale.estimate import Estimate, EstimateMemory, estimate
from vlm_operator.autoscale.policy import VariantPolicy
from vlm_operator.autoscale.view import PodView, PoolView, View
from vlm_operator.names import POOL_ROLES, Role
from vlm_operator.state import ItlHistogram, KvTokens, Sample, StageSeconds, Ttft, WorkCounters

EPSILON = 1e-9

load = st.fixed_dictionaries(
    {
        "rate": st.floats(0, 1.5),
        "queued": st.floats(0, 100),
        "tokens": st.integers(0, 10_000),
        "queued_tokens": st.integers(0, 20_000),
    }
)
pools = st.fixed_dictionaries({role: st.lists(load, min_size=1, max_size=4) for role in POOL_ROLES})
stages = st.dictionaries(
    st.sampled_from(["encoder_queue", "prefill_queue", "decode_reserve", "prefill", "encode"]),
    st.floats(0, 5),
    min_size=1,
)


def service(found, requests, *, ticks: int, zero: bool = False, bottleneck: bool = True) -> Service:
    """A service that has lived for some ticks under such loads."""
    encoder = {"zero": ZERO, "minimum": 0} if zero else {}
    living = Service(
        policy(encoder=encoder),
        **{role.value: len(items) for role, items in found.items()},
    )
    for role, items in found.items():
        for pod, item in zip(living.of(role), items, strict=True):
            for name, value in item.items():
                setattr(pod, name, value)
            if role is Role.ENCODER:
                pod.tokens = pod.queued_tokens = 0
    for _ in range(ticks):
        for pod in living.pods:
            kind = "encode" if pod.role is Role.ENCODER else pod.role.value
            pod.work(kind, seconds=1.0, calls=5, items=5, units=500, squares=1e5)
        living.tick()
    if bottleneck:
        for stage in requests:
            living.finish("image", 10, **stage)
    return living


requests = st.lists(stages, max_size=5)


@given(pools, requests, st.integers(1, 20))
def test_estimating_twice_estimates_the_same(found, asked, ticks):
    living = service(found, asked, ticks=ticks)
    view = dataclasses.replace(living.view(), now=living.now + TICK)
    before = copy.deepcopy(living.memory)
    assert estimate(living.policy, view, living.memory) == estimate(
        living.policy, view, living.memory
    )
    assert living.memory == before


@given(pools, requests, st.integers(1, 20), st.sampled_from(POOL_ROLES), load, st.booleans())
def test_more_load_never_needs_less(found, asked, ticks, role, more, zero):
    living = service(found, asked, ticks=ticks, zero=zero)
    heavy = copy.deepcopy(living)
    for pod in heavy.of(role):
        pod.admitted += more["rate"] * TICK
        pod.queued += more["queued"]
        if role is not Role.ENCODER:
            pod.tokens += more["tokens"]
            pod.tokens = min(pod.tokens, 2 * pod.capacity)
            pod.queued_tokens += more["queued_tokens"]
    less, much = living.tick().needs, heavy.tick().needs
    assert much[role].units >= less[role].units - EPSILON
    assert much[role].least_units >= less[role].least_units - EPSILON


@given(pools, st.integers(1, 20), st.integers(2, 5))
def test_twice_the_pods_with_twice_the_load_need_twice_the_units(found, ticks, times):
    one = service(found, (), ticks=ticks, bottleneck=False)
    many = service(
        {role: items * times for role, items in found.items()}, (), ticks=ticks, bottleneck=False
    )
    needs = many.tick().needs
    for role, need in one.tick().needs.items():
        assert needs[role].units == pytest.approx(times * need.units)


@given(pools, requests, st.integers(1, 20))
def test_less_is_never_asked_for_than_may_be_left(found, asked, ticks):
    for need in service(found, asked, ticks=ticks).tick().needs.values():
        assert 0 <= need.units <= need.least_units


@given(pools, requests, st.integers(2, 20), st.sampled_from(POOL_ROLES))
def test_an_absurd_answer_is_worth_no_answer(found, asked, ticks, role):
    living = service(found, asked, ticks=ticks)
    absurd = copy.deepcopy(living)
    living.of(role)[0].answers = False
    absurd.of(role)[0].admitted += 1e9
    missing, strange = living.tick(), absurd.tick()
    assert len(strange.absurd) == 1
    assert strange.needs == missing.needs


@given(pools, st.integers(4, 20), st.data())
def test_silence_changes_no_demand_for_as_long_as_it_is_short(found, ticks, data):
    living = service(found, (), ticks=ticks, bottleneck=False)
    before = living.tick()
    for pod in living.pods:
        pod.answers = data.draw(st.booleans())
    for _ in range(Constants().stale_ticks):
        after = living.tick()
        for role in POOL_ROLES:
            now, then = after.demands[role], before.demands[role]
            assert now.erlangs == pytest.approx(then.erlangs)
            assert (now.tokens, now.queued_seconds) == (then.tokens, then.queued_seconds)
            answered = sum(pod.answers for pod in living.of(role))
            assert after.needs[role].known == (answered >= 0.7 * len(living.of(role)))


EXTREME = (0, 10**12)  # scrape drops what is negative, not finite or greater


class Chaos:
    """A service in which anything may be reported. One seed gives one history."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        slow = VariantPolicy("slow", speed=0.4, cost_per_hour=1.0)
        self.policy = policy(
            Constants(fit_points=3, stale_ticks=2),
            encoder={"zero": ZERO, "minimum": 0, "variants": (VariantPolicy("plain"), slow)},
            itl_seconds=0.05,
        )
        self._pods = {role: [self._pod(role) for _ in range(2)] for role in POOL_ROLES}
        self._requests = 0
        self._now = NOW

    def view(self) -> View:
        """The next tick."""
        draw = self._draw
        self._now += draw.choice((TICK, TICK, TICK, TICK, 0.0, 60.0, -100.0, 5000.0))
        samples: dict[str, Sample] = {}
        pools = {}
        for role, pods in self._pods.items():
            if draw.random() < 0.05:
                pods.append(self._pod(role))
            if len(pods) > 3 or (pods and draw.random() < 0.05):
                pods.pop(0)
            for pod in pods:
                pod.phase = draw.choice(("ready", "ready", "ready", "starting", pod.phase))
                pod.admitted += draw.random() * 5
                if draw.random() < 0.02:
                    pod.boot, pod.admitted = str(draw.random()), 0.0
                if draw.random() < 0.9:
                    samples[pod.uid] = self._sample(pod)
            views = tuple(
                PodView(pod.uid, pod.variant, pod.phase, pod.created, None)  # type: ignore[arg-type]
                for pod in pods
            )
            pools[role] = PoolView(len(views), None, {}, views)
        if draw.random() < 0.9:
            samples["gateway"] = self._gateway()
        return View(self._now, pools, samples)

    def _pod(self, role: Role) -> Pod:
        draw = self._draw
        variant = draw.choice(("plain", "slow", "unknown"))
        return Pod(str(draw.random()), role, variant, created=NOW - draw.choice((0, 60, -60)))

    def _number(self, plain: Any) -> Any:
        return self._draw.choice(EXTREME) if self._draw.random() < 0.02 else plain

    def _sample(self, pod: Pod) -> Sample:
        draw = self._draw
        if draw.random() < 0.5:
            kind = draw.choice(("encode", "prefill", "decode"))
            units = draw.randint(0, 2000)
            pod.work(kind, seconds=units * 1e-3, calls=3, items=2, units=units, squares=1e3)
        found = pod.sample()
        number = self._number
        return dataclasses.replace(
            found,
            queued_work_seconds=number(draw.random() * 9),
            started_work_seconds=number(pod.admitted),
            kv=KvTokens(
                number(10_000), number(draw.randint(0, 9000)), 0, 0, 0, number(draw.randint(0, 9))
            )
            if pod.role is not Role.ENCODER
            else None,
            busy={
                kind: WorkCounters(
                    number(item.seconds), item.calls, item.items, number(item.units), item.squares
                )
                for kind, item in found.busy.items()
            },
        )

    def _gateway(self) -> Sample:
        draw, number = self._draw, self._number
        self._requests += draw.randint(0, 9)
        count = self._requests
        buckets = {
            bound: number(count * (index + 1) // len(BOUNDS)) for index, bound in enumerate(BOUNDS)
        }
        spent = {
            stage: StageSeconds(number(count * 0.3), number(count * 0.1))
            for stage in ("encoder_queue", "prefill", "decode_reserve", "unheard_of")
        }
        found = Ttft(number(count), number(count // 3), 0.0, buckets, spent)
        said = gateway(boot=draw.choice("aaaaab"), text=found, image=found)
        held = {"encoder": number(draw.randint(0, 1))}
        return dataclasses.replace(said, gaps=ItlHistogram(number(count), buckets), held_for=held)


def nonsense(found: Estimate) -> list[str]:
    """Everything that must not leave an estimate."""
    numbers = {
        "missing_seconds": found.missing_seconds,
        "itl": found.itl_p95_seconds or 0.0,
        **{f"startup {key}": value for key, value in found.startup.items()},
    }
    for role, need in found.needs.items():
        numbers |= {f"{role} units": need.units, f"{role} least": need.least_units}
        numbers |= {f"{role} {item.signal}": item.replicas for item in need.candidates}
    for item in found.attributions:
        numbers |= {f"{item.modality} p95": item.p95_seconds, item.modality: item.overrun_seconds}
        numbers |= {f"{item.modality} {name}": share for name, share in item.shares.items()}
        numbers |= {f"floor {name}": value for name, value in item.service_seconds.items()}
        if item.shares and abs(sum(item.shares.values()) - 1) > 1e-6:
            return [f"shares of {item.modality}"]
    return [name for name, value in numbers.items() if not 0 <= value < 1e15]


def live(ticks: int, seed: int) -> None:
    chaos, memory = Chaos(seed), EstimateMemory()
    answered = 0
    for _ in range(ticks):
        view = chaos.view()
        found, memory = estimate(chaos.policy, view, memory)
        wrong = nonsense(found)
        assert not wrong, wrong
        answered += any(need.known for need in found.needs.values())
        pods = {pod.uid for pool in view.pools.values() for pod in pool.pods}
        assert set(memory.answers) <= pods
        assert len(memory.window.slots) <= 37
    assert answered > ticks / 10, "some of it must have been believed"


@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_reported_nothing_breaks_and_no_nonsense_leaves(seed):
    live(3_000, seed)


@pytest.mark.full
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", range(20))
def test_a_million_ticks_of_anything_break_nothing(seed):
    live(50_000, 100 + seed)
