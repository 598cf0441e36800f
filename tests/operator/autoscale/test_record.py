"""Memory that outlives the operator, ticks that can be replayed, and what they say to people."""

import dataclasses
import json
import math
import random
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from support.samples import Reports
from support.sizing import NOW, World, attribution, need, pool, service, variant
from vlm_operator.autoscale.decide import Memory, decide
from vlm_operator.autoscale.estimate import EstimateMemory
from vlm_operator.autoscale.explain import NEXT, explain, explain_status
from vlm_operator.autoscale.history import ExternalWrite, ScalingMemory
from vlm_operator.autoscale.memory import dump, load, worth_writing
from vlm_operator.autoscale.outcome import Attribution, Bound, Candidate, Reason
from vlm_operator.autoscale.policy import Budget
from vlm_operator.autoscale.record import (
    Record,
    RecordError,
    as_json,
    differences,
    load_record,
    read_log,
    replay,
)
from vlm_operator.names import Role

DECODE, PREFILL = Role.DECODE, Role.PREFILL
counts = st.integers(0, 10_000)


def lived(seed: int, ticks: int):
    """A service through made-up ticks, as records."""
    rng = random.Random(seed)
    policy = service(
        pool(DECODE, variant(), variant("b", cost_per_hour=None, max_replicas=2)),
        pool(PREFILL),
        ttft_seconds={"text": 1.0},
        budget=Budget(accelerators=9),
    )
    world = World(policy, {DECODE: {"a": 2}, PREFILL: {"a": 1}}, seed=seed)
    memory, reports = Memory(), Reports(rng)
    for _ in range(ticks):
        view = reports.on(world.view())
        outcome = decide(policy, view, memory)
        yield Record("ns/demo", policy, view, memory, outcome, epoch=7)
        memory = outcome.memory
        world.carry_out(outcome.decisions)
        world.advance(5.0)


@given(st.integers(0, 2**32), st.integers(1, 20))
@settings(max_examples=20)
def test_a_record_comes_back_from_its_line_and_replays_to_the_bit(seed, ticks):
    *_, record = lived(seed, ticks)
    line = record.dump()
    assert "\n" not in line
    again = load_record(line)
    assert as_json(again) == as_json(record)
    assert differences(again, replay(again)) == []
    assert again.dump() == line


def test_a_record_is_found_in_the_line_of_a_log_and_a_change_of_it_shows():
    *_, record = lived(1, 3)
    line = json.dumps({"message": "decision", "level": "info", "record": json.loads(record.dump())})
    found = load_record(line)
    assert found.epoch == 7
    decisions = dict(found.outcome.decisions)
    decisions[DECODE] = dataclasses.replace(decisions[DECODE], to=99)
    changed = dataclasses.replace(
        found, outcome=dataclasses.replace(found.outcome, decisions=decisions)
    )
    said = differences(changed, replay(changed))
    assert len(said) == 1
    assert said[0].startswith("outcome.decisions.decode.to: recorded 99, now ")


@given(st.integers(0, 2**32), st.integers(1, 20))
@settings(max_examples=10)
def test_packed_records_come_back_from_a_log_however_their_lines_are_mixed(seed, ticks):
    records = list(lived(seed, ticks))
    lines = [json.dumps({"record": part}) for one in records for part in one.packed()]
    lines += ['{"message": "hello"}', "starting"]
    random.Random(seed).shuffle(lines)
    found = [one.dump() for _, one in read_log(lines) if isinstance(one, Record)]
    assert sorted(found) == sorted(one.dump() for one in records)


def test_a_large_record_is_cut_into_lines_that_log_collectors_take(monkeypatch):
    *_, record = lived(3, 5)
    monkeypatch.setattr("vlm_operator.autoscale.record.PART_CHARACTERS", 100)
    parts = record.packed()
    assert len(parts) > 3
    assert max(len(part["data"]) for part in parts) <= 100
    lines = [json.dumps({"record": part}) for part in parts]
    ((number, found),) = read_log(lines)
    assert number == len(lines)
    assert found.dump() == record.dump()
    assert list(read_log(lines[:-1])) == []
    damaged = json.loads(lines[0])
    damaged["record"]["data"] = "!" * 100
    ((_, error),) = read_log([json.dumps(damaged), *lines[1:]])
    assert isinstance(error, RecordError)
    assert "damaged" in str(error)


@pytest.mark.parametrize(
    "line", ["", "{", "[]", "3", '{"version": 9}', '{"version": 1}', '{"version": 4, "x": 2}']
)
def test_what_is_no_record_is_refused(line):
    with pytest.raises(RecordError):
        load_record(line)


floats = st.floats(allow_nan=False)


@given(
    st.builds(
        Attribution,
        modality=st.text(),
        count=counts,
        missed=counts,
        p95_seconds=floats,
        target_seconds=st.none() | floats,
        shares=st.dictionaries(st.text(), floats),
        service_seconds=st.dictionaries(st.text(), floats),
        attainable=st.booleans(),
    )
)
def test_values_come_back_from_json_as_they_were(value):
    assert TypeAdapter(Attribution).validate_python(as_json(value)) == value


def test_numbers_that_json_does_not_have_and_keys_of_tuples_come_back():
    *_, record = lived(2, 3)
    startup = {(DECODE, "a,b"): math.nan, (PREFILL, "c"): -math.inf}
    estimate = dataclasses.replace(record.outcome.estimate, startup=startup)
    outcome = dataclasses.replace(record.outcome, estimate=estimate)
    line = dataclasses.replace(record, outcome=outcome).dump()
    found = load_record(line).outcome.estimate.startup
    assert found.keys() == startup.keys()
    assert math.isnan(found[DECODE, "a,b"])
    assert found[PREFILL, "c"] == -math.inf
    assert load_record(line).dump() == line


def remembered() -> Memory:
    world = World(service(pool()), {DECODE: {"a": 2}})
    world.nodes = {"a": 3}
    for units in [4.7] * 20 + [1.0] * 20:
        world.tick([need(units)], attributions=(attribution(),))
        world.now += 0.123
    world.write(DECODE, "hpa", 4)
    world.tick([need(1.0)])
    return Memory(pace=world.memory)


def test_memory_survives_a_process_rounded_and_its_windows_begin_anew():
    memory = remembered()
    text = dump(memory)
    found = load(text, now=NOW + 50)
    pace, old = found.pace.pools[DECODE], memory.pace.pools[DECODE]
    assert dump(found) == text
    assert pace.since == NOW + 50
    assert pace.wants == ()
    assert [(item.before, item.to) for item in pace.changes] == [
        (item.before, item.to) for item in old.changes
    ]
    assert pace.standing == old.standing
    assert pace.exhausted["a"].times == old.exhausted["a"].times
    assert pace.foreign is not None
    assert pace.foreign.manager == "hpa"
    assert [item.reason for item in pace.decisions] == [item.reason for item in old.decisions]
    assert all(item.time == round(item.time) for item in pace.decisions)
    assert len(text) < 8000


@pytest.mark.parametrize(
    "wrong",
    [None, "", "{", "[]", "3", '{"version": 1}', '{"version": 9}', '{"version": 4, "pace": 3}'],
)
def test_a_garbled_memory_is_an_empty_one(wrong):
    assert load(wrong, now=NOW) == Memory()


def test_an_idle_service_has_nothing_new_to_write():
    world = World(service(pool()), {DECODE: {"a": 1}})
    texts = set()
    for _ in range(50):
        world.tick([need(0.5)])
        texts.add(dump(Memory(pace=world.memory)))
    assert len(texts) == 1
    assert not worth_writing(Memory(pace=world.memory))
    assert worth_writing(remembered())


def test_every_reason_and_bound_says_what_would_change_it():
    assert set(NEXT) == {*Reason, *Bound}
    assert len(NEXT) == len(Reason) + len(Bound), "no reason has the name of a bound"


def test_a_record_is_explained_with_signals_shares_bound_and_what_would_change_it():
    *_, record = lived(4, 2)
    decision = dataclasses.replace(
        record.outcome.decisions[DECODE],
        before=4, to=6, reason="ScaleUp", limited_by="MaxPodsPerMinute", recommendation=8,
        candidates=(Candidate("kvTokens", 8), Candidate("itl", 3)), variants={"a": 4, "b": 2},
        message="kvTokens needs 7.6 units", shares={"decode_reserve": 0.62, "prefill": 0.38},
        cost_per_hour=12.0,
    )  # fmt: skip
    seen = attribution(p95_seconds=1.25, missed=30)
    outcome = dataclasses.replace(
        record.outcome,
        decisions={DECODE: decision},
        estimate=dataclasses.replace(record.outcome.estimate, attributions=(seen,), signals={}),
    )
    assert explain(dataclasses.replace(record, outcome=outcome)).splitlines() == [
        "ns/demo at 2027-01-15 08:00:05 UTC",
        "text: TTFT p95 1250 ms, target 1000, 30 of 100 missed",
        "",
        "decode: 6 replicas (a 4, b 2), 12.00 an hour",
        "  why      ScaleUp, 4 → 6 at 2027-01-15 08:00:05 UTC: kvTokens needs 7.6 units",
        "  signals  kvTokens 8, itl 3 replicas",
        "  misses   decode_reserve 62 %, prefill 38 %",
        "  bound    MaxPodsPerMinute",
        "  next     goes on within a minute: scaling.behavior.*.maxPodsPerMinute",
        "  note     the need alone asks for 8",
    ]


def test_a_status_is_explained_pool_by_pool_and_one_without_a_decision_says_so():
    last = {
        "time": "2027-01-15T08:00:05Z", "from": 2, "to": 2, "reason": "NotBottleneck",
        "message": "time is lost elsewhere",
    }  # fmt: skip
    status = {
        "pools": {
            "decode": {"desiredReplicas": 2, "lastDecision": last, "recommendation": 3},
            "encoder": {"desiredReplicas": 1, "variants": [{"name": "cpu", "replicas": 1}]},
        }
    }
    assert explain_status({"status": status}, {DECODE: ["2 → 3 4 min ago"]}).splitlines() == [
        "encoder: 1 replica (cpu 1)",
        "  why      nothing has been decided yet",
        "",
        "decode: 2 replicas",
        "  why      NotBottleneck, stays at 2 at 2027-01-15 08:00:05 UTC: time is lost elsewhere",
        "  next     growth of its own queue or use: more replicas would not shorten TTFT",
        "  note     the need alone asks for 3",
        "  note     2 → 3 4 min ago",
    ]
    assert explain_status({}, {}) == ""


def test_what_a_memory_is_made_of_is_what_it_says():
    memory = Memory(EstimateMemory(), ScalingMemory())
    for value in (memory, service(pool()), ExternalWrite("hpa", 3, 1.5)):
        assert TypeAdapter(type(value)).validate_python(as_json(value)) == value


def test_the_page_on_sizes_names_every_reason_and_bound_and_no_other():
    page = (Path(__file__).parents[3] / "docs" / "autoscaling.md").read_text()
    table = page.partition("## Reasons and bounds")[2].partition("\n## ")[0]
    named = set(re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE)) - {"reason", "limitedBy"}
    assert named == {item.value for item in (*Reason, *Bound)}
