"""An encoder between zero and one: what wakes it, what does not, and when it may go."""

import dataclasses

from support.estimates import TICK, ZERO, Pod, Service, busy, policy, signals
from vlm_operator.api.enums import WhileAtZero
from vlm_operator.autoscale.policy import VariantPolicy
from vlm_operator.names import Role


def zero_service(while_at_zero=WhileAtZero.INLINE_AT_PREFILL, *, encoder=0, **changes) -> Service:
    zero = dataclasses.replace(ZERO, while_at_zero=while_at_zero)
    rules = {"zero": zero, "minimum": 0, **changes}
    return Service(policy(encoder=rules), encoder=encoder, prefill=2)


def encode_inline(service: Service, seconds: float) -> None:
    for pod in service.of(Role.PREFILL):
        share = seconds * TICK / 2
        pod.work("encode", seconds=share, calls=1, items=1, units=100, squares=1e4)


def test_at_zero_and_without_images_it_stays_there():
    need = zero_service().tick(10).needs[Role.ENCODER]
    assert (need.units, need.least_units, need.idle, need.known) == (0, 0, True, True)


def test_a_request_that_is_held_wakes_it_at_once():
    service = zero_service(WhileAtZero.QUEUE)
    service.held = 1
    need = service.tick().needs[Role.ENCODER]
    assert need.units == 1
    assert need.bottleneck
    assert need.known
    assert signals(need)["held"] == 1


def test_a_few_images_do_not_pay_for_an_encoder():
    service = zero_service()
    for _ in range(60):
        encode_inline(service, 0.1)
        need = service.tick().needs[Role.ENCODER]
    assert need.units == 0
    assert need.known


def test_images_that_cost_more_inline_than_an_encoder_wake_it():
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


def test_images_that_keep_prefill_busy_wake_it():
    service = zero_service()
    busy(service, Role.PREFILL, 0.8)
    for _ in range(60):
        encode_inline(service, 0.6)
        for pod in service.of(Role.PREFILL):
            pod.work("prefill", seconds=3.4, calls=1, items=1, units=100)
        need = service.tick().needs[Role.ENCODER]
    assert need.units >= 1
    assert "prefill is busy" in need.message


def test_prompts_that_keep_prefill_busy_do_not_wake_it():
    service = zero_service()
    busy(service, Role.PREFILL, 0.9)
    for _ in range(60):
        encode_inline(service, 0.05)
        need = service.tick().needs[Role.ENCODER]
    assert need.units == 0


def test_one_that_starts_is_not_sent_away():
    service = zero_service()
    service.pods.append(Pod("new", Role.ENCODER, phase="starting"))
    need = service.tick(3).needs[Role.ENCODER]
    assert (need.units, need.known, need.idle) == (1, True, False)


def test_it_is_idle_without_images_while_prefill_could_encode():
    service = zero_service(encoder=1)
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


def test_text_that_is_lent_to_it_does_not_keep_it():
    service = zero_service(encoder=1)
    (encoder,) = service.of(Role.ENCODER)
    encoder.lends, encoder.tokens, encoder.inflight = True, 9_000, 4
    need = service.tick(5).needs[Role.ENCODER]
    assert (need.idle, need.least_units, need.units) == (True, 0, 0)


def test_silent_pods_never_send_it_to_zero():
    service = zero_service(encoder=1)
    (encoder,) = service.of(Role.ENCODER)
    encoder.answers = False
    need = service.tick(60).needs[Role.ENCODER]
    assert not need.known
    assert not need.idle
