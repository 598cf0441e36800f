"""What each pool needs, by example: one thing happens, and only the pool that it concerns grows."""

import dataclasses
import random

import pytest

from support.estimates import NOW, Pod, Service, busy, policy, signals
from vlm_operator.autoscale.demand import DemandMemory, demand_of
from vlm_operator.autoscale.estimate import EstimateMemory, estimate
from vlm_operator.autoscale.policy import VariantPolicy
from vlm_operator.autoscale.readings import LastSample, PodReading, PoolReading
from vlm_operator.names import POOL_ROLES, Role


def units(found) -> dict[Role, float]:
    return {role: round(need.units, 3) for role, need in found.needs.items()}


def test_between_the_bands_nothing_moves():
    service = Service(policy(), prefill=4)
    busy(service, Role.PREFILL, 0.80)
    need = service.tick(60).needs[Role.PREFILL]
    assert need.units == pytest.approx(4)
    assert need.least_units > 4
    assert not need.bottleneck


def test_beyond_the_upper_band_a_pool_grows_to_its_target():
    service = Service(policy(), prefill=4)
    busy(service, Role.PREFILL, 0.9)
    need = service.tick(60).needs[Role.PREFILL]
    assert need.units == pytest.approx(3.6 / 0.75, rel=0.01)
    assert need.bottleneck
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


def test_work_is_counted_in_seconds_of_speed_one():
    half = VariantPolicy("plain", speed=0.5)
    service = Service(policy(prefill={"variants": (half,)}), prefill=4)
    busy(service, Role.PREFILL, 0.9)
    need = service.tick(60).needs[Role.PREFILL]
    assert need.units == pytest.approx(1.8 / 0.75, rel=0.01)
    assert signals(need)["utilization"] == 5


def test_an_image_burst_grows_the_encoder_and_nothing_else():
    service = Service(policy(), encoder=1, prefill=2, decode=2)
    busy(service, Role.PREFILL, 0.3)
    busy(service, Role.ENCODER, 0.3)
    service.tick(3)
    (encoder,) = service.of(Role.ENCODER)
    encoder.rate = 1.0
    service.finish("image", 60, encoder_queue=4.0, encode=0.2, prefill=0.3)
    for _ in range(12):
        encoder.queued += 5.0  # what comes beyond what it can begin
        found = service.tick()
    assert found.needs[Role.ENCODER].units > 2
    assert found.needs[Role.ENCODER].bottleneck
    for role in (Role.PREFILL, Role.DECODE):
        assert found.needs[role].units <= 2
        assert not found.needs[role].bottleneck


def test_long_answers_grow_decode_and_nothing_else():
    service = Service(policy(), prefill=2, decode=2)
    busy(service, Role.PREFILL, 0.3)
    for pod in service.of(Role.DECODE):
        pod.tokens, pod.queued_tokens = 9_500, 3_000
    service.tick(3)
    service.finish("text", 60, decode_reserve=4.0, prefill=0.3)
    found = service.tick(3)
    assert found.needs[Role.DECODE].units == pytest.approx(25_000 / 8_000, rel=0.01)
    assert found.needs[Role.PREFILL].units <= 2
    assert not found.needs[Role.PREFILL].bottleneck
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
    service = Service(policy(), encoder=1, prefill=2, decode=2)
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
    service = Service(policy(), encoder=1, prefill=2, decode=2)
    busy(service, Role.PREFILL, 0.3)
    service.tick(3)
    service.finish("text", 60, prefill=4.0)
    found = service.tick(6)
    (text,) = found.attributions
    assert not text.attainable
    assert text.blocking_stage == "prefill"
    present = {Role.ENCODER: 1, Role.PREFILL: 2, Role.DECODE: 2}
    assert units(found).keys() == present.keys()
    for role, needed in units(found).items():
        assert 0 <= needed <= present[role], role
    assert not any(need.bottleneck for need in found.needs.values())


def test_a_bottleneck_pool_with_a_queue_that_models_do_not_explain_gets_one_more():
    service = Service(policy(), prefill=2)
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


def test_what_decode_lacks_and_what_prefill_lacks_are_ordered_in_one_tick():
    service = Service(policy(), prefill=1, decode=1)
    busy(service, Role.PREFILL, 0.95)
    (decode,) = service.of(Role.DECODE)
    decode.tokens, decode.queued_tokens = 9_000, 4_000
    found = service.tick(20)
    assert found.needs[Role.DECODE].units > 1
    assert found.needs[Role.PREFILL].units > 1, "a start-up later would be a second wave"


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


def test_memory_is_bounded_and_what_lasts_does_not_change_while_idle():
    service = Service(policy(), encoder=1, prefill=2, decode=2)
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
    assert len(memory.window.slots) <= 12
    assert set(memory.demands) == set(POOL_ROLES)
    assert all(len(item.trend) <= 13 for item in memory.demands.values())
    for pod in service.pods:
        pod.rate = 0.0
    service.tick(450)  # the last hour with work is over
    lasting = service.memory.lasting
    service.tick(400)
    assert service.memory.lasting == lasting
    assert service.now > NOW


def test_requests_held_for_kv_room_count_as_tokens_of_decode():
    reading = pool_reading(running=8_000, promised=2_000, inflight=10)
    without, _ = demand_of(policy(), reading, DemandMemory(), now=NOW)
    held, _ = demand_of(policy(), reading, DemandMemory(), now=NOW, held=5)
    assert without.tokens == pytest.approx(10_000)
    assert held.tokens == pytest.approx(15_000)
    assert held.queued_tokens == pytest.approx(5_000)


def test_room_promised_to_prompts_stuck_before_prefill_is_no_load_of_decode():
    reading = pool_reading(running=8_000, promised=2_000, inflight=10)
    found, _ = demand_of(policy(), reading, DemandMemory(), now=NOW, held=5, flow=0.1)
    assert found.tokens == pytest.approx(8_000 + 0.1 * 7_000)


def pool_reading(*, running: int, promised: int, inflight: int) -> PoolReading:
    last = LastSample(NOW, "b", 0.0, 0.0, 0.0, inflight, running, promised, 0, 24_000, 0.0, {})
    pod = PodReading("uid", "default", 1.0, answered=True, last=last)
    return PoolReading(Role.DECODE, (pod,), known=True, coming_units=0.0, replicas=1)
