"""Laws of the queue, over any sequence of causes, any length and end of turns, any worker count."""

from __future__ import annotations

import dataclasses
import heapq
import itertools

from hypothesis import given
from hypothesis import strategies as st

from vlm_operator.backoff import Backoff
from vlm_operator.reconcile.queue import (
    BURST,
    LIMITED,
    MAX_LAG_SECONDS,
    MIN_GAP_SECONDS,
    REFILL_SECONDS,
    TIMERS,
    Cause,
    Key,
    Outcome,
    WorkQueue,
)

A, B = ("ns", "a"), ("ns", "b")
RETRY = Backoff(longest=30.0)
EVENTS = tuple(cause for cause in Cause if cause not in (*TIMERS, Cause.RETRY))
KEYS = st.sampled_from([("ns", name) for name in "abcd"])
SECONDS = st.floats(0.0, 5.0, allow_nan=False)


@dataclasses.dataclass(frozen=True)
class Added:
    """One cause from outside of a turn."""

    at: float
    key: Key
    cause: Cause
    after: float


@dataclasses.dataclass
class Turn:
    """One turn that the queue started."""

    key: Key
    causes: frozenset[Cause]
    began: float
    ready: float  # when the queue said that it may start
    rank: float
    ended: float = 0.0
    outcome: Outcome = dataclasses.field(default_factory=Outcome)


def simulate(
    queue: WorkQueue,
    added: list[Added],
    endings: list[tuple[float, Outcome]],
    *,
    workers: int,
    until: float,
) -> list[Turn]:
    """Play the causes and the turns on a clock of its own, with so many workers.

    `endings` are length and outcome of the turns in order; further turns take no time and succeed.
    """
    waiting = sorted(added, key=lambda one: one.at)
    running: list[tuple[float, int]] = []
    turns: list[Turn] = []
    now = 0.0
    while now <= until:
        while waiting and waiting[0].at <= now:
            one = waiting.pop(0)
            queue.add(one.key, one.cause, now=now, after=one.after)
        while running and running[0][0] <= now:
            turn = turns[heapq.heappop(running)[1]]
            turn.ended = now
            queue.done(turn.key, turn.outcome, now=now)
        while len(running) < workers:
            ready = queue.ready_at()
            taken = queue.take(now=now)
            if taken is None:
                break
            assert ready is not None
            turn = Turn(taken.key, taken.causes, began=now, ready=ready, rank=taken.rank)
            length, turn.outcome = endings.pop(0) if endings else (0.0, Outcome())
            turns.append(turn)
            heapq.heappush(running, (now + length, len(turns) - 1))
        ready = queue.ready_at() if len(running) < workers else None
        nexts = [one.at for one in waiting[:1]] + [end for end, _ in running[:1]]
        nexts += [] if ready is None else [ready]
        if not nexts:
            break
        now = max(now, min(nexts))
    return turns


OUTCOMES = st.builds(
    Outcome,
    again=st.dictionaries(
        st.sampled_from(sorted(TIMERS, key=str)), st.floats(0.5, 5.0), max_size=2
    ),
    failures=st.dictionaries(st.sampled_from(["api", "child x"]), st.just(RETRY), max_size=1),
    gone=st.booleans(),
)
HISTORIES = {
    "added": st.lists(st.builds(Added, SECONDS, KEYS, st.sampled_from(EVENTS), SECONDS)),
    "endings": st.lists(st.tuples(SECONDS, OUTCOMES), max_size=40),
    "workers": st.integers(1, 3),
}


@given(**HISTORIES)
def test_no_cause_is_lost(added: list[Added], endings: list, workers: int):
    turns = simulate(WorkQueue(), added, endings, workers=workers, until=1e6)
    for one in added:
        after = [
            turn
            for turn in turns
            if turn.key == one.key and one.cause in turn.causes and turn.began >= one.at
        ]
        assert after, f"no turn began after {one}"


@given(**HISTORIES)
def test_a_key_has_one_turn_at_a_time_and_a_pause_between_two(
    added: list[Added], endings: list, workers: int
):
    turns = simulate(WorkQueue(), added, endings, workers=workers, until=200.0)
    for key in {turn.key for turn in turns}:
        own = [turn for turn in turns if turn.key == key]
        for before, after in itertools.pairwise(own):
            pause = 0.0 if before.outcome.gone else MIN_GAP_SECONDS
            assert after.began >= before.ended + pause


@given(**HISTORIES)
def test_the_least_rank_is_first_and_no_key_starves(
    added: list[Added], endings: list, workers: int
):
    turns = simulate(WorkQueue(), added, endings, workers=workers, until=200.0)
    for turn in turns:
        assert turn.ready <= turn.began
        assert turn.rank <= turn.began + MAX_LAG_SECONDS
        # a turn that waits keeps its rank, unless another cause of its key lowers it
        overtaken = [
            other
            for other in turns
            if other.ready < turn.began < other.began and other.rank < turn.rank
        ]
        lowered = [one for one in added if one.at > turn.began]
        assert all(other.key in {one.key for one in lowered} for other in overtaken)


@given(**HISTORIES)
def test_a_fixed_point_is_silent(added: list[Added], endings: list, workers: int):
    quiet = [(length, dataclasses.replace(one, again={}, failures={})) for length, one in endings]
    queue = WorkQueue()
    turns = simulate(queue, added, quiet, workers=workers, until=1e6)
    assert len(turns) <= len(added), "only causes start turns"
    assert queue.ready_at() is None


@given(times=st.lists(st.floats(0.0, 60.0, allow_nan=False), max_size=80))
def test_events_of_children_alone_start_a_bounded_number_of_turns(times: list[float]):
    added = [Added(at, A, Cause.POD, 0.0) for at in times]
    turns = simulate(WorkQueue(), added, [], workers=1, until=1e6)
    for first in turns:
        window = [turn for turn in turns if first.began <= turn.began <= first.began + 10.0]
        assert len(window) <= BURST + 10.0 / REFILL_SECONDS + 1


def take(queue: WorkQueue, *, now: float) -> frozenset[Cause]:
    taken = queue.take(now=now)
    assert taken is not None
    return taken.causes


def test_a_limited_key_still_gets_its_ticks_and_a_changed_spec_at_once():
    queue = WorkQueue()
    now = 0.0
    queue.add(A, Cause.CHILD, now=now)
    while (ready := queue.ready_at()) is not None and ready <= now + 1.0:
        now = ready
        take(queue, now=now)
        queue.add(A, Cause.CHILD, now=now)
        queue.done(A, Outcome(), now=now)
    queue.add(A, Cause.SPEC, now=now)
    assert queue.ready_at() == now + MIN_GAP_SECONDS
    assert take(queue, now=now + MIN_GAP_SECONDS) == {Cause.SPEC, Cause.CHILD}


def test_causes_that_are_due_together_are_one_turn():
    queue = WorkQueue()
    for cause in LIMITED:
        queue.add(A, cause, now=1.0, after=0.05)
    assert queue.take(now=1.0) is None
    assert take(queue, now=1.05) == LIMITED
    queue.done(A, Outcome(), now=1.1)
    assert queue.ready_at() is None


def test_a_turn_replaces_the_timers_of_the_turn_before():
    queue = WorkQueue()
    queue.add(A, Cause.SPEC, now=0.0)
    take(queue, now=0.0)
    queue.done(A, Outcome(again={Cause.DRAIN: 1.0}), now=0.0)
    queue.add(A, Cause.POD, now=0.5)
    take(queue, now=0.5)
    queue.done(A, Outcome(again={Cause.TICK: 5.0}), now=0.6)
    assert queue.ready_at() == 5.6


def test_pauses_grow_for_each_part_alone_and_a_success_ends_them():
    queue = WorkQueue()
    queue.add(A, Cause.SPEC, now=0.0)
    now, pauses = 0.0, []
    for _ in range(8):
        take(queue, now=now)
        queue.done(A, Outcome(failures={"api": RETRY}), now=now)
        ready = queue.ready_at()
        assert ready is not None
        pauses.append(ready - now)
        now = ready
    assert pauses[0] <= 1.3
    assert all(after > before for before, after in zip(pauses[:4], pauses[2:6], strict=True))
    assert max(pauses) <= 39.0
    take(queue, now=now)
    queue.done(A, Outcome(failures={"child": RETRY}), now=now)
    assert queue.ready_at() - now <= 1.3
    take(queue, now=now + 1.3)
    queue.done(A, Outcome(), now=now + 1.3)
    assert queue.ready_at() is None


def test_a_failed_part_delays_no_timer():
    queue = WorkQueue()
    queue.add(A, Cause.SPEC, now=0.0)
    for _ in range(6):
        now = queue.ready_at()
        assert now is not None
        take(queue, now=now)
        slow = Backoff(longest=300.0, first=100.0)
        queue.done(A, Outcome(again={Cause.TICK: 5.0}, failures={"child": slow}), now=now)
        assert queue.ready_at() == now + 5.0


def test_a_key_that_is_gone_is_forgotten_with_its_timers():
    queue = WorkQueue()
    queue.add(A, Cause.SPEC, now=0.0)
    queue.add(B, Cause.SPEC, now=0.0)
    take(queue, now=0.0)
    queue.done(A, Outcome(again={Cause.TICK: 5.0}), now=0.0)
    queue.add(A, Cause.DELETION, now=1.0)
    take(queue, now=1.0)
    take(queue, now=1.0)
    assert queue.running(now=3.0) == {A: 2.0, B: 2.0}
    queue.done(A, Outcome(gone=True), now=3.0)
    queue.done(B, Outcome(), now=3.0)
    assert A not in queue
    assert list(queue) == [B]
    assert queue.ready_at() is None


def test_a_service_that_is_created_again_during_the_last_turn_of_the_old_one_gets_its_turn():
    queue = WorkQueue()
    queue.add(A, Cause.DELETION, now=0.0)
    take(queue, now=0.0)
    queue.add(A, Cause.SPEC, now=0.1)
    queue.done(A, Outcome(gone=True), now=0.2)
    assert take(queue, now=0.2 + MIN_GAP_SECONDS) == {Cause.SPEC}


def test_a_changed_spec_overtakes_services_whose_pods_change_often():
    queue = WorkQueue()
    busy = [("ns", f"busy-{number}") for number in range(5)]
    now = 0.0
    for _ in range(3):  # each gets three turns for its pods, and is ready for the next one
        for key in busy:
            queue.add(key, Cause.POD, now=now)
        for _ in busy:
            ready = queue.ready_at()
            assert ready is not None
            now = max(now, ready)
            taken = queue.take(now=now)
            assert taken is not None
            queue.done(taken.key, Outcome(), now=now)
    for key in busy:
        queue.add(key, Cause.POD, now=now)
    now += REFILL_SECONDS
    queue.add(A, Cause.SPEC, now=now)
    queue.add(B, Cause.CHILD, now=now)
    queue.add(busy[0], Cause.SPEC, now=now)
    first = [queue.take(now=now) for _ in range(3)]
    assert {turn.key for turn in first if turn} == {A, B, busy[0]}


def test_events_during_a_rollout_share_turns_and_the_first_one_waits_for_none():
    queue = WorkQueue()
    queue.add(A, Cause.POD, now=100.0)
    times = []
    while (ready := queue.ready_at()) is not None and ready < 120.0:
        take(queue, now=ready)
        times.append(ready)
        queue.add(A, Cause.POD, now=ready)  # an event arrives during each turn
        queue.done(A, Outcome(), now=ready)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert times[0] == 100.0
    assert gaps[0] == REFILL_SECONDS / BURST
    assert all(before <= after <= REFILL_SECONDS for before, after in itertools.pairwise(gaps))
