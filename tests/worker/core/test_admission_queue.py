"""The admission queue against a model: a list that is sorted on each question."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vlm_worker.core.admission_policy import (
    MAX_UNFIT,
    AdmissionQueue,
    AdmissionReason,
    AdmissionRound,
    lane_bound,
    lane_quotas,
)
from vlm_worker.core.sequence import Lane, Sequence
from vlm_worker.settings import AdmissionPolicy, AdmissionSettings
from vlm_worker.types import Request, RequestKey, SamplingParams

AGEING = 10.0


def waiting_sequence(
    arrival: int, *, priority: int = 0, lane: Lane = Lane.TEXT, now: float = 0.0
) -> Sequence:
    """A sequence that has just arrived, of as many tokens as its number says."""
    request = Request(RequestKey(str(arrival), 0), (), 1, SamplingParams(1), priority=priority)
    token_ids = np.zeros(arrival % 7 + 1, np.int32)
    positions = np.zeros((1, 1), np.int64)
    return Sequence(request, arrival, token_ids, positions, 0, arrived_at=now, lane=lane)


@dataclasses.dataclass
class NaiveQueue:
    """All that wait, in a list."""

    settings: AdmissionSettings
    waiting: list[Sequence] = dataclasses.field(default_factory=list)
    last_first: Lane = Lane.VISION

    def next(
        self, seen: list[Sequence], entered: dict[Lane, int], backlog: dict[Lane, int], now: float
    ) -> tuple[Sequence, AdmissionReason] | None:
        """Whom a wave meets next that began with `backlog` and has `seen` and `entered` some."""
        left = [s for s in self.waiting if not s.is_blocked and s not in seen]
        dual = self.settings.policy is AdmissionPolicy.DUAL_QUEUE
        bound = {lane: lane_bound(self.settings, lane) if dual else 10**9 for lane in Lane}
        aged = [s for s in left if now - s.arrived_at >= AGEING and entered[s.lane] < bound[s.lane]]
        if aged:
            return min(aged, key=lambda s: s.arrival), AdmissionReason.AGED
        ranked = sorted(left, key=lambda s: (-s.priority, s.arrival))
        if not dual:
            return (ranked[0], AdmissionReason.ORDER) if ranked else None
        for quota in lane_quotas(backlog, self.settings, last_first=self.last_first):
            of_lane = [s for s in ranked if s.lane is quota.lane]
            unfit = [s for s in seen if s.on_unblock is not None and not s.is_blocked]
            if sum(s.lane is quota.lane for s in unfit) >= MAX_UNFIT:
                continue
            if of_lane and entered[quota.lane] < quota.count:
                return of_lane[0], quota.reason
        return None

    def next_reserved(self, seen: list[Sequence]) -> tuple[Sequence, AdmissionReason] | None:
        """Whom a wave meets next out of turn."""
        left = [s for s in self.waiting if s.reserved_blocks and not s.is_blocked and s not in seen]
        oldest = min(left, key=lambda s: s.arrival, default=None)
        return None if oldest is None else (oldest, AdmissionReason.RESERVED)


class QueueMachine(RuleBasedStateMachine):
    """Both queues live through the same."""

    policy = AdmissionPolicy.FCFS

    def __init__(self) -> None:
        super().__init__()
        settings = AdmissionSettings(self.policy, max_text=4, max_vision=2, ageing_seconds=AGEING)
        self.queue = AdmissionQueue(settings)
        self.naive = NaiveQueue(settings)
        self.now = 0.0
        self.num_arrivals = 0

    @rule(
        priority=st.integers(-1, 1),
        lane=st.sampled_from(Lane),
        stalled=st.booleans(),
        promised=st.sampled_from([0, 0, 3]),
        count=st.integers(1, 5),
    )
    def arrive(self, priority: int, lane: Lane, stalled: bool, promised: int, count: int) -> None:
        for _ in range(count):
            self.num_arrivals += 1
            sequence = waiting_sequence(
                self.num_arrivals, priority=priority, lane=lane, now=self.now
            )
            sequence.reserved_blocks = promised
            if stalled:
                sequence.is_blocked = True
            self.queue.add(sequence)
            self.naive.waiting.append(sequence)

    @rule(seconds=st.sampled_from([1.0, 5.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.naive.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.naive.waiting))
        self.queue.remove(sequence)
        self.naive.waiting.remove(sequence)
        assert sequence.on_unblock is None

    @precondition(lambda self: any(s.is_blocked for s in self.naive.waiting))
    @rule(data=st.data())
    def unblock(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from([s for s in self.naive.waiting if s.is_blocked])).unblock()

    @rule(
        fates=st.lists(
            st.tuples(st.booleans(), st.sampled_from(["admit", "stall", "pass"])), max_size=12
        )
    )
    def admit(self, fates: list[tuple[bool, str]]) -> None:
        seen: list[Sequence] = []
        in_turn = False
        entered = dict.fromkeys(Lane, 0)
        awake = [s for s in self.naive.waiting if not s.is_blocked]
        backlog = {lane: sum(s.lane is lane for s in awake) for lane in Lane}
        first = lane_quotas(backlog, self.queue.settings, last_first=self.naive.last_first)[0].lane
        with AdmissionRound(self.queue, now=self.now) as admission_round:
            for out_of_turn, fate in fates:
                if out_of_turn:
                    expected = self.naive.next_reserved(seen)
                    sequence = admission_round.next_reserved()
                else:
                    expected = self.naive.next(seen, entered, backlog, self.now)
                    sequence = admission_round.next()
                assert sequence is (expected[0] if expected else None)
                if sequence is None or expected is None:
                    continue
                seen.append(sequence)
                if fate == "stall":
                    sequence.is_blocked = True
                if fate == "admit":
                    assert admission_round.admit(sequence) is expected[1]
                    entered[sequence.lane] += 1
                    in_turn |= expected[1] not in {AdmissionReason.AGED, AdmissionReason.RESERVED}
        for sequence in seen:
            if sequence.on_unblock is None:
                self.naive.waiting.remove(sequence)
        if in_turn:
            self.naive.last_first = first

    @invariant()
    def they_tell_the_same(self) -> None:
        waiting = self.naive.waiting
        assert len(self.queue) == len(waiting)
        assert self.queue.num_tokens == sum(s.num_tokens for s in waiting)
        for lane in Lane:
            assert self.queue.count(lane) == sum(s.lane is lane for s in waiting)
        assert self.queue.oldest is min(waiting, key=lambda s: s.arrival, default=None)


class DualQueueMachine(QueueMachine):
    policy = AdmissionPolicy.DUAL_QUEUE


TestFirstComeFirstServed = QueueMachine.TestCase
TestFirstComeFirstServed.settings = settings(max_examples=50, stateful_step_count=40)
TestDualQueue = DualQueueMachine.TestCase
TestDualQueue.settings = settings(max_examples=50, stateful_step_count=40)


@pytest.mark.full
@pytest.mark.timeout(1800)
class TestFirstComeFirstServedAtLength(QueueMachine.TestCase):  # type: ignore[misc]
    settings = settings(max_examples=3_000, stateful_step_count=100)


@pytest.mark.full
@pytest.mark.timeout(1800)
class TestDualQueueAtLength(DualQueueMachine.TestCase):  # type: ignore[misc]
    settings = settings(max_examples=3_000, stateful_step_count=100)
