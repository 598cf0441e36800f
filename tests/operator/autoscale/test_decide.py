"""Who owns the number, and what the plain rule makes of samples."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_operator import names
from vlm_operator.api import ScalingMode
from vlm_operator.autoscale import (
    Decision,
    History,
    Policy,
    PoolNow,
    decide,
    dump_history,
    load_history,
    record,
)
from vlm_operator.names import Role
from vlm_operator.state import KvTokens, Sample

NOW = 1_800_000_000.0
AUTO = Policy(
    role=Role.DECODE,
    mode=ScalingMode.AUTO,
    replicas=0,
    minimum=1,
    maximum=8,
    utilization=0.75,
    kv_occupancy=0.8,
    up_pods=4,
    up_share=1.0,
    down_seconds=300,
    down_pods=1,
)
OLD = History(since=NOW - 10_000)


def now(replicas: int | None = 2, *, ready: int = 2, **changes) -> PoolNow:
    plain = PoolNow(
        replicas=replicas,
        owner=names.MANAGER_AUTOSCALER,
        live=replicas or 0,
        ready=frozenset(f"uid-{index}" for index in range(ready)),
        starting=0,
        pending=0,
        rolling=False,
    )
    return dataclasses.replace(plain, **changes)


def sample(index: int, *, running=0, queued=0, work=0.0, admitted=0.0, kv=True) -> Sample:
    tokens = KvTokens(1000, running, 0, 0, 1000 - min(running, 1000), queued)
    return Sample(
        pod_uid=f"uid-{index}",
        boot_id="0" * 32,
        role=Role.DECODE,
        phase="ready",
        message="",
        accepting=True,
        inflight=0,
        queued_requests=0,
        queued_work_seconds=work,
        admitted_work_seconds=admitted,
        kv=tokens if kv else None,
        model=None,
        ttft={},
        config_hash=None,
    )


def samples(*found: Sample) -> dict[str, Sample]:
    return {item.pod_uid: item for item in found}


def ask(policy=AUTO, pool=None, seen=None, history=OLD, at=NOW) -> Decision:
    return decide(policy, pool or now(), seen or {}, now=at, history=history)[0]


@pytest.mark.parametrize(
    ("asked", "to", "limit"),
    [
        pytest.param(3, 3, None, id="within bounds"),
        pytest.param(9, 8, "Max", id="above the maximum"),
        pytest.param(0, 1, "Min", id="below the minimum"),
    ],
)
def test_external_follows_vlmpool_and_never_writes_it(asked, to, limit):
    policy = dataclasses.replace(AUTO, mode=ScalingMode.EXTERNAL)
    found = ask(policy, now(asked, owner="kubectl"))
    assert (found.to, found.limited_by, found.claim) == (to, limit, None)
    assert limit is None or limit.lower() in found.message


def test_a_new_pool_of_mode_external_starts_at_the_live_count_or_the_minimum():
    policy = dataclasses.replace(AUTO, mode=ScalingMode.EXTERNAL, minimum=2)
    assert ask(policy, now(None, live=0)).claim == 2
    assert ask(policy, now(None, live=5)).claim == 5


@pytest.mark.parametrize(
    ("owner", "reason"), [(names.MANAGER_AUTOSCALER, "Manual"), ("kubectl", "PutBack")]
)
def test_manual_claims_what_the_manifest_says(owner, reason):
    policy = dataclasses.replace(AUTO, mode=ScalingMode.MANUAL, replicas=3)
    found = ask(policy, now(5, owner=owner))
    assert (found.to, found.claim, found.reason) == (3, 3, reason)


@pytest.mark.parametrize(
    ("running", "queued", "to"),
    [
        pytest.param(1600, 0, 2, id="at the target"),
        pytest.param(1700, 0, 3, id="above it"),
        pytest.param(1000, 1500, 4, id="waiting tokens count"),
        pytest.param(1000, 90_000, 6, id="four pods a minute at most"),
    ],
)
def test_decode_is_sized_by_kv_tokens(running, queued, to):
    half = [sample(i, running=running // 2, queued=queued // 2) for i in range(2)]
    assert ask(seen=samples(*half)).to == to


def test_prefill_is_sized_by_seconds_of_work():
    policy = dataclasses.replace(AUTO, role=Role.PREFILL)
    idle = samples(sample(0, admitted=100.0), sample(1, admitted=50.0))
    _, history = decide(policy, now(), idle, now=NOW, history=OLD)
    busy = samples(sample(0, admitted=110.0), sample(1, admitted=60.0, work=30.0))
    found, _ = decide(policy, now(), busy, now=NOW + 5, history=history)
    # (10 + 10) / 5 s = 4 Erlang, and 30 s of queue within 30 s: 5 / 0.75
    assert found.to == 6
    assert found.limited_by == "MaxPodsPerMinute"
    assert {item.signal: item.replicas for item in found.candidates} == {
        "queueSeconds": 2,
        "utilization": 7,
    }


def test_down_takes_a_whole_window_and_one_pod_at_a_time():
    seen = samples(*(sample(i) for i in range(4)))
    history, size, at = OLD, 4, NOW
    sizes = []
    for _ in range(200):
        at += 5
        found, history = decide(AUTO, now(size, ready=4), seen, now=at, history=history)
        assert size - found.to in (0, 1)
        size = found.to
        sizes.append(size)
    assert sizes[0] == 3  # the window began long ago
    assert sizes[11] == 3
    assert min(sizes) == 1


def test_a_new_process_never_begins_with_a_scale_down():
    seen = samples(*(sample(i) for i in range(4)))
    history = load_history(None, now=NOW)
    for at in range(0, 300, 5):
        found, history = decide(AUTO, now(4, ready=4), seen, now=NOW + at, history=history)
        assert found.to == 4
        assert found.reason == "Stabilizing"
    found, _ = decide(AUTO, now(4, ready=4), seen, now=NOW + 301, history=history)
    assert found.to == 3


numbers = st.integers(0, 5000)


@given(
    st.integers(1, 8),
    st.lists(st.tuples(numbers, numbers), max_size=8),
    st.integers(0, 8),
    st.floats(0, 10_000),
)
def test_missing_data_never_scales_down(size, loads, ready, age):
    seen = samples(*(sample(i, running=a, queued=b) for i, (a, b) in enumerate(loads)))
    pool = now(size, ready=ready)
    history = dataclasses.replace(OLD, since=NOW - age)
    found = ask(pool=pool, seen=seen, history=history)
    answered = len(pool.ready & set(seen))
    if answered < 0.7 * len(pool.ready) or not pool.ready:
        assert (found.to, found.held) == (size, True)


@given(
    st.integers(1, 8), st.lists(st.tuples(numbers, numbers), min_size=1, max_size=8), st.booleans()
)
def test_a_decision_is_within_bounds_and_more_load_never_wants_fewer(size, loads, prefill):
    policy = dataclasses.replace(AUTO, role=Role.PREFILL if prefill else Role.DECODE)
    pool = now(size, ready=len(loads))
    light = samples(*(sample(i, running=a, work=float(a)) for i, (a, _) in enumerate(loads)))
    heavy = samples(
        *(sample(i, running=a + b, work=float(a + b)) for i, (a, b) in enumerate(loads))
    )
    less, more = ask(policy, pool, light), ask(policy, pool, heavy)
    assert policy.minimum <= less.to <= more.to <= policy.maximum


def test_a_foreign_number_is_the_baseline_for_one_window_and_then_ours_again():
    seen = samples(sample(0), sample(1))
    pool = now(5, owner="kubectl")
    found, history = decide(AUTO, pool, seen, now=NOW, history=OLD)
    assert (found.to, found.claim, found.reason) == (5, None, "ForeignWrite")
    later, _ = decide(AUTO, pool, seen, now=NOW + 301, history=history)
    assert later.reason != "ForeignWrite"
    assert later.claim is not None


def test_a_second_foreign_number_within_the_window_is_a_conflict_and_is_held():
    _, history = decide(AUTO, now(5, owner="hpa"), {}, now=NOW, history=OLD)
    found, history = decide(AUTO, now(6, owner="hpa"), {}, now=NOW + 10, history=history)
    assert found.conflict
    assert found.claim is None
    held, _ = decide(AUTO, now(6, owner="hpa"), {}, now=NOW + 9999, history=history)
    assert held.conflict


def test_memory_survives_a_process_and_garbage_is_an_empty_memory():
    pool = now(2)
    full = samples(sample(0, running=1000), sample(1, running=1000))
    _, history = decide(AUTO, pool, full, now=NOW, history=OLD)
    text = dump_history(history)
    again = load_history(text, now=NOW + 50)
    assert dump_history(again) == text
    assert again.since == NOW + 50
    assert again.changes == ((NOW, 2, 3),)
    for wrong in ("", "{", "[]", json.dumps({"version": 9}), json.dumps({"version": 1})):
        assert load_history(wrong, now=1.0) == History(since=1.0)


def test_an_idle_pool_remembers_nothing_new():
    seen = samples(sample(0))
    history = OLD
    texts = set()
    for at in range(50):
        _, history = decide(AUTO, now(1, ready=1), seen, now=NOW + 5 * at, history=history)
        texts.add(dump_history(history))
    assert len(texts) == 1


def test_a_record_says_what_why_and_limited_by_what():
    half = [sample(i, running=500, queued=45_000) for i in range(2)]
    found = record(ask(seen=samples(*half)), epoch=7)
    assert found == {
        "time": "2027-01-15T08:00:00Z",
        "epoch": 7,
        "from": 2,
        "to": 6,
        "reason": "ScaleUp",
        "limitedBy": "MaxPodsPerMinute",
        "candidates": [
            {"signal": "kvTokens", "replicas": 2},
            {"signal": "kvTokensWithQueue", "replicas": 114},
        ],
        "message": "kvTokensWithQueue needs 114",
    }
