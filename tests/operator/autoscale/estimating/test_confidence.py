"""What is not known well enough yet: no size rests on it."""

from support.estimates import Service, busy, policy
from vlm_operator.names import Role


def prompts(service: Service, ticks: int, *, size: int = 500) -> None:
    """Prompts of one size, ten a tick."""
    for _ in range(ticks):
        for pod in service.of(Role.PREFILL):
            pod.work("prefill", seconds=2.0, calls=10, items=10, units=10 * size)
        found = service.tick()
    service.last = found


def test_a_pool_is_credible_once_enough_of_its_work_was_seen_however_alike_it_is():
    service = Service(policy())
    busy(service, Role.PREFILL, 0.4)
    for ticks, credible in ((10, False), (3, True)):
        prompts(service, ticks)
        assert service.last.needs[Role.PREFILL].credible is credible
    assert service.last.needs[Role.DECODE].credible, "tokens are counted, not timed"
    assert not service.last.needs[Role.ENCODER].credible, "nobody sent an image"


def test_what_was_known_well_is_still_known_by_the_next_process():
    service = Service(policy())
    for size in (100, 900, 300, 700) * 5:
        prompts(service, 1, size=size)
    service.memory = service.memory.lasting
    prompts(service, 1)
    assert service.last.needs[Role.PREFILL].credible
