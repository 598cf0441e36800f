"""What each pool needs, by example: one thing happens, and only the pool that it concerns grows."""

import dataclasses
import random

import pytest
from estimating_support import NOW, TICK, ZERO, Pod, Service, policy

from vlm_operator.api.enums import OnDemand
from vlm_operator.autoscale.estimate import EstimateMemory, estimate
from vlm_operator.autoscale.policy import Tuning, VariantPolicy
from vlm_operator.names import POOL_ROLES, Role

QUICK = Tuning(min_requests=10)


def signals(need) -> dict[str, int]:
    return {item.signal: item.replicas for item in need.candidates}


def units(found) -> dict[Role, float]:
    return {role: round(need.units, 3) for role, need in found.needs.items()}


def busy(service: Service, role: Role, rate: float) -> None:
    for pod in service.of(role):
        pod.rate = rate


def test_between_the_bands_nothing_moves():
    service = Service(policy(), prefill=4)
    busy(service, Role.PREFILL, 0.80)
    need = service.tick(60).needs[Role.PREFILL]
    assert need.units == pytest.approx(4)
    assert need.least_units > 4
    assert not need.guilty


def test_beyond_the_upper_band_a_pool_grows_to_its_target():
    service = Service(policy(), prefill=4)
    busy(service, Role.PREFILL, 0.9)
    need = service.tick(60).needs[Role.PREFILL]
    assert need.units == pytest.approx(3.6 / 0.75, rel=0.01)
    assert need.guilty
    assert signals(need)["utilization"] == 5
    assert "utilization needs" in need.message


def test_below_the_lower_band_a_pool_may_shrink():
    service = Service(policy(), prefill=4)
    busy(service, Role.PREFILL, 0.5)
    need = service.tick(60).needs[Role.PREFILL]
    assert need.least_units == pytest.approx(2.0 / 0.70, rel=0.01)


def test_the_bands_move_with_the_target():
    service = Service(policy(prefill={"utilization": 0.45}), prefill=4)
    busy(service, Role.PREFILL, 0.55)
    assert service.tick(60).needs[Role.PREFILL].units == pytest.approx(2.2 / 0.45, rel=0.01)


def test_a_backlog_is_worked_off_within_half_a_minute():
    service = Service(policy(), prefill=1)
    (pod,) = service.of(Role.PREFILL)
    pod.rate, pod.queued = 0.2, 60.0
    need = service.tick(30).needs[Role.PREFILL]
    # ten times the text target is 15 s: 0.2 + 60 / 15
    assert need.units == pytest.approx(4.2, rel=0.01)
    assert need.urgent


def test_work_is_counted_in_seconds_of_speed_one():
    half = VariantPolicy("plain", speed=0.5)
    service = Service(policy(prefill={"variants": (half,)}), prefill=4)
    busy(service, Role.PREFILL, 0.9)
    need = service.tick(60).needs[Role.PREFILL]
    assert need.units == pytest.approx(1.8 / 0.75, rel=0.01)
    assert signals(need)["utilization"] == 5


def test_an_image_burst_grows_the_encoder_and_nothing_else():
    service = Service(policy(QUICK), encoder=1, prefill=2, decode=2)
    busy(service, Role.PREFILL, 0.3)
    busy(service, Role.ENCODER, 0.3)
    service.tick(3)
    (encoder,) = service.of(Role.ENCODER)
    encoder.rate, encoder.queued = 1.0, 20.0
    service.finish("image", 60, encoder_queue=4.0, encode=0.2, prefill=0.3)
    found = service.tick(12)
    assert found.needs[Role.ENCODER].units > 2
    assert found.needs[Role.ENCODER].guilty
    for role in (Role.PREFILL, Role.DECODE):
        assert found.needs[role].units <= 2
        assert not found.needs[role].guilty


def test_long_answers_grow_decode_and_nothing_else():
    service = Service(policy(QUICK), prefill=2, decode=2)
    busy(service, Role.PREFILL, 0.3)
    for pod in service.of(Role.DECODE):
        pod.tokens, pod.queued_tokens = 9_500, 3_000
    service.tick(3)
    service.finish("text", 60, decode_reserve=4.0, prefill=0.3)
    found = service.tick(3)
    assert found.needs[Role.DECODE].units == pytest.approx(25_000 / 8_000, rel=0.01)
    assert found.needs[Role.DECODE].urgent
    assert found.needs[Role.PREFILL].units <= 2
    assert not found.needs[Role.PREFILL].guilty
    assert signals(found.needs[Role.DECODE])["kvTokensWithQueue"] == 4


def test_kv_demand_rises_at_once_and_falls_as_its_average_does():
    service = Service(policy(), decode=2)

    def demand(tokens: int, ticks: int) -> float:
        for pod in service.of(Role.DECODE):
            pod.tokens = tokens
        return service.tick(ticks).demands[Role.DECODE].tokens

    assert demand(1_000, 3) == 2_000
    assert demand(8_000, 1) == 16_000
    assert demand(8_000, 30) == 16_000
    assert demand(1_000, 1) > 12_000, "one tick is no trend"
    assert demand(1_000, 60) == pytest.approx(2_000, rel=0.05)


def test_evictable_blocks_are_no_load():
    service = Service(policy(), decode=2)
    for pod in service.of(Role.DECODE):
        pod.tokens = 1_000
    view = service.view()
    full = {
        uid: dataclasses.replace(
            item, kv=dataclasses.replace(item.kv, cached=9_000, free=0) if item.kv else None
        )
        for uid, item in view.samples.items()
    }
    found, _ = estimate(service.policy, dataclasses.replace(view, samples=full), EstimateMemory())
    assert found.demands[Role.DECODE].tokens == 2_000


def test_long_prompts_grow_prefill_and_nothing_else():
    service = Service(policy(QUICK), encoder=1, prefill=2, decode=2)
    busy(service, Role.PREFILL, 1.0)
    for pod in service.of(Role.PREFILL):
        pod.queued = 5.0
    service.tick(3)
    service.finish("text", 60, prefill_queue=3.0, prefill=0.5)
    found = service.tick(12)
    assert found.needs[Role.PREFILL].units > 2.5
    assert found.needs[Role.DECODE].units <= 2
    assert found.needs[Role.ENCODER].units <= 1


def test_a_breach_with_all_queues_short_raises_nothing():
    service = Service(policy(QUICK), encoder=1, prefill=2, decode=2)
    busy(service, Role.PREFILL, 0.3)
    service.tick(3)
    service.finish("text", 60, prefill=4.0)
    found = service.tick(6)
    (text,) = found.attributions
    assert not text.attainable
    assert text.blocking_stage == "prefill"
    assert units(found) == {
        role: pytest.approx(count, abs=count)
        for role, count in ((Role.ENCODER, 1), (Role.PREFILL, 2), (Role.DECODE, 2))
    }
    assert not any(need.guilty for need in found.needs.values())


def test_a_guilty_pool_with_a_queue_that_models_do_not_explain_gets_one_more():
    service = Service(policy(QUICK), prefill=2)
    busy(service, Role.PREFILL, 0.3)
    for pod in service.of(Role.PREFILL):
        pod.queued = 1.0
    service.tick(3)
    service.finish("text", 60, prefill_queue=3.0, prefill=0.5)
    need = service.tick().needs[Role.PREFILL]
    assert signals(need)["overrun"] == 3
    assert need.units == 3
    service.pods.append(Pod("coming", Role.PREFILL, phase="starting"))
    assert service.tick().needs[Role.PREFILL].units == 3, "what starts is not asked for again"


def test_waiting_speaks_only_where_the_pool_is_guilty():
    service = Service(policy(QUICK), prefill=2)
    for pod in service.of(Role.PREFILL):
        pod.rate = 0.75
    for _ in range(30):
        for pod in service.of(Role.PREFILL):
            pod.work("prefill", seconds=3.75, calls=2, items=2, units=2000, squares=1e6)
        found = service.tick()
    need = found.needs[Role.PREFILL]
    assert signals(need)["waiting"] > 2
    assert need.units == pytest.approx(2)
    service.finish("text", 60, prefill_queue=3.0, prefill=0.2)
    assert service.tick().needs[Role.PREFILL].units == signals(need)["waiting"]


def test_while_decode_lacks_room_prefill_does_not_grow():
    service = Service(policy(QUICK), prefill=1, decode=1)
    busy(service, Role.PREFILL, 0.95)
    (decode,) = service.of(Role.DECODE)
    decode.tokens, decode.queued_tokens = 9_000, 4_000
    found = service.tick(20)
    assert found.needs[Role.DECODE].units > 1
    assert found.needs[Role.PREFILL].units == 1
    assert "decode has no KV room" in found.needs[Role.PREFILL].message
    service.pods.append(Pod("coming", Role.DECODE, phase="starting"))
    assert service.tick().needs[Role.PREFILL].units > 1, "decode has what it needs, on its way"


def test_a_decode_pool_without_prefill_is_sized_by_its_prompts_too():
    asked = policy()
    alone = dataclasses.replace(asked, pools={Role.DECODE: asked.pools[Role.DECODE]})
    service = Service(alone, decode=2)
    busy(service, Role.DECODE, 0.95)
    need = service.tick(60).needs[Role.DECODE]
    assert need.units == pytest.approx(1.9 / 0.75, rel=0.01)


def test_a_rise_is_met_before_it_is_there():
    service = Service(policy(), prefill=4)
    for step in range(24):
        busy(service, Role.PREFILL, 0.4 + 0.02 * step)
        found = service.tick(1)
    need, load = found.needs[Role.PREFILL], found.demands[Role.PREFILL].erlangs
    assert need.units > load / 0.75 * 1.2


class TestMissing:
    """§4.10 of the design: what is missing or strange never shrinks anything."""

    def test_no_traffic_is_idle_and_not_missing(self):
        service = Service(policy(), prefill=2)
        found = service.tick(int(300 / TICK) + 1)
        assert found.fresh
        assert found.attributions == ()
        need = found.needs[Role.PREFILL]
        assert (need.idle, need.known, need.units, need.least_units) == (True, True, 0, 0)

    def test_too_few_answers_hold_the_pool_and_are_timed(self):
        service = Service(policy(), prefill=3)
        service.tick(2)
        for pod in service.of(Role.PREFILL)[:2]:
            pod.answers = False
        found = service.tick(4)
        assert not found.needs[Role.PREFILL].known
        assert found.needs[Role.DECODE].known
        assert not found.fresh
        assert found.missing_seconds == 3 * TICK
        assert "1 of 3 ready pods answered" in found.needs[Role.PREFILL].message
        for pod in service.pods:
            pod.answers = True
        found = service.tick()
        assert found.fresh
        assert found.missing_seconds == 0

    def test_a_pod_that_is_silent_for_a_moment_keeps_its_load(self):
        service = Service(policy(), prefill=4)
        busy(service, Role.PREFILL, 0.5)
        before = service.tick(40).needs[Role.PREFILL]
        service.of(Role.PREFILL)[0].answers = False
        during = service.tick(3).needs[Role.PREFILL]
        assert during.known
        assert during.least_units == pytest.approx(before.least_units)

    def test_a_pod_that_is_silent_for_long_is_no_capacity_and_is_not_taken_for_idle(self):
        service = Service(policy(), prefill=4)
        busy(service, Role.PREFILL, 0.5)
        before = service.tick(40).needs[Role.PREFILL]
        service.of(Role.PREFILL)[0].answers = False
        after = service.tick(60).needs[Role.PREFILL]
        assert after.known
        assert after.least_units == pytest.approx(1.5 / 0.7 + 1, rel=0.01)
        assert after.least_units >= before.least_units

    def test_samples_of_pods_that_are_gone_are_not_looked_at(self):
        service = Service(policy(), decode=1)
        ghost = Pod("ghost", Role.DECODE, tokens=9_000)
        view = service.view()
        view = dataclasses.replace(view, samples={**view.samples, "ghost": ghost.sample()})
        found, memory = estimate(service.policy, view, EstimateMemory())
        assert found.demands[Role.DECODE].tokens == 0
        assert set(memory.answers) == {pod.uid for pod in service.pods}

    def test_a_restarted_process_counts_from_zero_and_its_load_stays(self):
        service = Service(policy(), prefill=2)
        busy(service, Role.PREFILL, 0.6)
        before = service.tick(60).needs[Role.PREFILL]
        for pod in service.of(Role.PREFILL):
            pod.boot, pod.admitted = "b", 0.0
        after = service.tick().needs[Role.PREFILL]
        assert after.least_units == pytest.approx(before.least_units)

    @pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -1.0, 1e30])
    def test_an_absurd_answer_is_silence_and_counted(self, wrong):
        service = Service(policy(), prefill=1)
        busy(service, Role.PREFILL, 0.5)
        before = service.tick(20)
        (pod,) = service.of(Role.PREFILL)
        pod.queued = wrong
        found = service.tick()
        assert found.bad_samples == 1
        assert not found.needs[Role.PREFILL].known
        assert found.needs[Role.PREFILL].units >= before.needs[Role.PREFILL].units - 1e-9

    def test_a_jump_that_no_process_can_make_is_absurd(self):
        service = Service(policy(), prefill=1)
        service.tick(5)
        (pod,) = service.of(Role.PREFILL)
        pod.admitted += 1e6
        assert service.tick().bad_samples == 1

    def test_a_clock_that_is_put_back_stops_nothing(self):
        service = Service(policy(), prefill=2)
        busy(service, Role.PREFILL, 0.6)
        service.tick(60)
        service.now -= 3600
        before = service.tick()
        assert before.needs[Role.PREFILL].units >= 0
        assert service.tick(60).needs[Role.PREFILL].known

    def test_a_pool_whose_pods_report_no_capacity_is_held(self):
        service = Service(policy(), decode=1)
        service.of(Role.DECODE)[0].capacity = 0
        need = service.tick().needs[Role.DECODE]
        assert not need.known
        assert "no capacity" in need.message

    def test_a_pool_without_a_ready_pod_is_held(self):
        service = Service(policy(), decode=1)
        service.of(Role.DECODE)[0].phase = "starting"
        assert not service.tick().needs[Role.DECODE].known


class TestZero:
    """An encoder between zero and one."""

    def service(self, on_demand=OnDemand.INLINE_AT_PREFILL, *, encoder=0, **changes) -> Service:
        zero = dataclasses.replace(ZERO, on_demand=on_demand)
        rules = {"zero": zero, "minimum": 0, **changes}
        return Service(policy(encoder=rules), encoder=encoder, prefill=2)

    def encode_inline(self, service: Service, seconds: float) -> None:
        for pod in service.of(Role.PREFILL):
            share = seconds * TICK / 2
            pod.work("encode", seconds=share, calls=1, items=1, units=100, squares=1e4)

    def test_at_zero_and_without_pictures_it_stays_there(self):
        need = self.service().tick(10).needs[Role.ENCODER]
        assert (need.units, need.least_units, need.idle, need.known) == (0, 0, True, True)

    def test_a_request_that_is_held_wakes_it_at_once(self):
        service = self.service(OnDemand.QUEUE)
        service.held = 1
        need = service.tick().needs[Role.ENCODER]
        assert need.units == 1
        assert need.urgent
        assert need.guilty
        assert need.known
        assert signals(need)["held"] == 1

    def test_a_few_pictures_do_not_pay_for_an_encoder(self):
        service = self.service()
        for _ in range(60):
            self.encode_inline(service, 0.1)
            need = service.tick().needs[Role.ENCODER]
        assert need.units == 0
        assert need.known

    def test_pictures_that_cost_more_inline_than_an_encoder_wake_it(self):
        cheap = VariantPolicy("plain", cost_per_hour=1.0)
        dear = VariantPolicy("plain", cost_per_hour=8.0)
        rules = {"zero": ZERO, "minimum": 0, "variants": (cheap,)}
        service = Service(policy(encoder=rules, prefill={"variants": (dear,)}), encoder=0)
        for _ in range(60):
            (pod,) = service.of(Role.PREFILL)
            pod.work("encode", seconds=1.0, calls=1, items=1, units=100, squares=1e4)
            need = service.tick().needs[Role.ENCODER]
        assert need.units == 1
        assert "an encoder is cheaper" in need.message

    def test_pictures_that_keep_prefill_busy_wake_it(self):
        service = self.service()
        busy(service, Role.PREFILL, 0.8)
        for _ in range(60):
            self.encode_inline(service, 0.6)
            need = service.tick().needs[Role.ENCODER]
        assert need.units >= 1
        assert "prefill is busy" in need.message

    def test_prompts_that_keep_prefill_busy_do_not_wake_it(self):
        service = self.service()
        busy(service, Role.PREFILL, 0.9)
        for _ in range(60):
            self.encode_inline(service, 0.05)
            need = service.tick().needs[Role.ENCODER]
        assert need.units == 0

    def test_one_that_starts_is_not_sent_away(self):
        service = self.service()
        service.pods.append(Pod("new", Role.ENCODER, phase="starting"))
        need = service.tick(3).needs[Role.ENCODER]
        assert (need.units, need.known, need.idle) == (1, True, False)

    def test_it_is_idle_without_pictures_while_prefill_could_encode(self):
        service = self.service(encoder=1)
        (encoder,) = service.of(Role.ENCODER)
        encoder.rate = 0.1
        need = service.tick(5).needs[Role.ENCODER]
        assert (need.idle, need.least_units) == (False, 1)
        encoder.rate = 0.0
        need = service.tick().needs[Role.ENCODER]
        assert (need.idle, need.least_units, need.units) == (True, 0, 0)
        busy(service, Role.PREFILL, 0.8)
        need = service.tick(60).needs[Role.ENCODER]
        assert (need.idle, need.least_units) == (False, 1)
        assert "too busy to encode" in need.message

    def test_silent_pods_never_send_it_to_zero(self):
        service = self.service(encoder=1)
        (encoder,) = service.of(Role.ENCODER)
        encoder.answers = False
        need = service.tick(60).needs[Role.ENCODER]
        assert not need.known
        assert not need.idle


def test_variability_is_that_of_the_work_that_came():
    service = Service(policy(), prefill=1)
    draw = random.Random(5)
    (pod,) = service.of(Role.PREFILL)
    for _ in range(200):
        items = sum(draw.random() < 0.02 for _ in range(100))  # about Poisson, 2 a tick
        pod.admitted += items * 0.5
        if items:
            pod.work("prefill", seconds=items * 0.5, calls=items, items=items, units=items * 100)
        found = service.tick()
    # Poisson arrivals of items that are all alike: (1 + 0) / 2
    assert found.demands[Role.PREFILL].variability == pytest.approx(0.5, rel=0.35)


def test_memory_is_bounded_and_what_lasts_does_not_change_while_idle():
    service = Service(policy(QUICK), encoder=1, prefill=2, decode=2)
    draw = random.Random(1)
    for _ in range(300):
        for pod in service.pods:
            pod.rate = draw.random()
            kind = "encode" if pod.role is Role.ENCODER else pod.role.value
            units = draw.randint(10, 1000)
            pod.work(kind, seconds=units * 1e-3, calls=1, items=1, units=units, squares=units**2)
        service.finish("text", 1, prefill=0.2)
        service.tick()
    memory = service.memory
    assert all(len(item.rows) <= 64 for item in memory.fits.values())
    assert len(memory.window.slots) <= 36
    assert set(memory.demands) == set(POOL_ROLES)
    assert all(len(item.trend) <= 13 for item in memory.demands.values())
    for pod in service.pods:
        pod.rate = 0.0
    service.tick(450)  # the last hour with work is over
    lasting = service.memory.lasting
    service.tick(400)
    assert service.memory.lasting == lasting
    assert service.now > NOW
