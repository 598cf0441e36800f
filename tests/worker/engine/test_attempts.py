"""The laws of attempts (`engine.attempts`): totals, order of release, and when a record closes."""

from __future__ import annotations

import dataclasses
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vlm_worker.engine.attempts import NUM_REMEMBERED, Attempt, AttemptTable, ResourceKind, Track
from vlm_worker.types import RequestKey

KEYS = [RequestKey(name, 0) for name in "abc"]


@dataclasses.dataclass(eq=False)
class FakeResource:
    """A resource that records its release. A loan is released once its writer has confirmed.

    Its release asks the attempt to release it again, as the pin of a queued image does.
    """

    number: int
    kind: ResourceKind
    num_bytes: int
    log: list[FakeResource]
    attempt: Attempt
    is_confirmed: bool = False

    def release(self) -> bool:
        self.attempt.release(self)
        if self.kind is ResourceKind.BLOCK_LOAN and not self.is_confirmed:
            return False
        self.log.append(self)
        return True


class AttemptMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.table = AttemptTable()
        self.held: dict[RequestKey, list[FakeResource]] = {key: [] for key in KEYS}
        self.released: list[FakeResource] = []
        self.num_made = 0

    @rule(
        key=st.sampled_from(KEYS),
        kind=st.sampled_from(list(ResourceKind)),
        num_bytes=st.integers(0, 9),
    )
    def acquire(self, key: RequestKey, kind: ResourceKind, num_bytes: int) -> None:
        self.num_made += 1
        attempt = self.table.open(key)
        resource = FakeResource(self.num_made, kind, num_bytes, self.released, attempt)
        attempt.acquire(resource)
        self.held[key].append(resource)

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data(), is_confirmed=st.booleans())
    def release(self, data: st.DataObject, is_confirmed: bool) -> None:
        key = data.draw(st.sampled_from([key for key in KEYS if self.held[key]]))
        resource = data.draw(st.sampled_from(self.held[key]))
        resource.is_confirmed |= is_confirmed
        attempt = self.table.get(key)
        assert attempt is not None
        attempt.release(resource)
        attempt.release(resource)
        if resource in self.released:
            self.held[key].remove(resource)
        else:
            assert resource.kind is ResourceKind.BLOCK_LOAN

    @rule(key=st.sampled_from(KEYS), track=st.sampled_from(Track))
    def end(self, key: RequestKey, track: Track) -> None:
        before = len(self.released)
        attempt = self.table.get(key)
        if attempt is not None:
            attempt.end(track)
            attempt.end(track)
        ended = self.released[before:]
        numbers = [resource.number for resource in ended]
        assert numbers == sorted(numbers, reverse=True)
        self.held[key] = [resource for resource in self.held[key] if resource not in ended]
        left = [resource.kind for resource in self.held[key] if resource.kind.track is track]
        assert set(left) <= {ResourceKind.BLOCK_LOAN}

    @invariant()
    def totals_and_records_agree(self) -> None:
        self.table.check()
        assert set(self.table.by_key) == {key for key in KEYS if self.held[key]}
        assert len(set(self.released)) == len(self.released)
        for kind, totals in self.table.totals.items():
            held: list[Any] = [one for of in self.held.values() for one in of if one.kind is kind]
            assert totals.count == len(held)
            assert totals.num_bytes == sum(resource.num_bytes for resource in held)


TestAttempts = AttemptMachine.TestCase
TestAttempts.settings = settings(max_examples=50, stateful_step_count=40)


def test_the_keys_of_ended_generations_are_bounded() -> None:
    table = AttemptTable()
    for number in range(NUM_REMEMBERED + 1):
        table.remember(RequestKey(str(number), 0))
    assert not table.has_ended(RequestKey("0", 0))
    assert table.has_ended(RequestKey("1", 0))
    assert table.has_ended(RequestKey(str(NUM_REMEMBERED), 0))
