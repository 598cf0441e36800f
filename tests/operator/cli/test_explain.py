"""`vlm why`: from a service's status and memory, or from a recorded tick."""

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest

from support.sizing import World, need, pool, service
from vlm_cli.output import CliError
from vlm_cli.why import memory_notes, replay_file, why
from vlm_operator.autoscale.decide import Memory, decide
from vlm_operator.autoscale.explain import NEXT
from vlm_operator.autoscale.history import Exhausted
from vlm_operator.autoscale.memory import dump
from vlm_operator.autoscale.outcome import Reason
from vlm_operator.autoscale.pace import LONG_WINDOWS
from vlm_operator.autoscale.record import Record
from vlm_operator.names import Role

DECISION = {
    "time": "2026-11-21T10:00:00Z", "from": 1, "to": 2, "reason": "ScaleUp",
    "message": "kvTokens needs 1.8 units", "limitedBy": "Budget",
    "candidates": [{"signal": "kvTokens", "replicas": 4}], "shares": {"decode_reserve": 60},
}  # fmt: skip


def recorded(ticks: int) -> list[Record]:
    world, memory, found = World(service(pool()), {Role.DECODE: {"a": 2}}), Memory(), []
    for _ in range(ticks):
        view = world.view()
        outcome = decide(world.policy, view, memory)
        found.append(Record("ns/demo", world.policy, view, memory, outcome))
        memory = outcome.memory
        world.advance(5.0)
    return found


def remembered() -> Memory:
    world = World(service(pool()), {Role.DECODE: {"a": 1}})
    world.now = time.time()
    world.tick([need(1.8)])
    pace = world.memory.pools[Role.DECODE]
    until = world.now + 600
    pace = dataclasses.replace(pace, exhausted={"a": Exhausted(world.now, until, times=3)})
    return Memory(pace=dataclasses.replace(world.memory, pools={Role.DECODE: pace}))


async def test_a_service_is_explained_from_its_status_and_its_memory(
    kubeconfig: str, api: Any, add_service: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    active = {"type": "ScalingActive", "status": "True", "reason": "Limited", "message": "budget"}
    pools = {"decode": {"desiredReplicas": 2, "lastDecision": DECISION, "recommendation": 4}}
    add_service("demo", conditions=[active], pools=pools)
    api.add(
        "/api/v1/namespaces/vision/configmaps",
        {"metadata": {"name": "demo-autoscaler"}, "data": {"memory.json": dump(remembered())}},
    )
    await why("demo", kubeconfig=kubeconfig)
    assert capsys.readouterr().out.splitlines() == [
        "vision/demo",
        "ScalingActive True: budget",
        "",
        "decode: 2 replicas",
        "  why      ScaleUp, 1 → 2 at 2026-11-21 10:00:00 UTC: kvTokens needs 1.8 units",
        "  signals  kvTokens 4 replicas",
        "  misses   decode_reserve 60 %",
        "  bound    Budget",
        "  next     more needs a greater budget (spec.budget), or less need elsewhere",
        "  note     the need alone asks for 4",
        "  note     variant a got no ready pod in time (3 times in a row), tried again in 10 min",
        "  note     1 → 2 0 min ago",
    ]


@pytest.mark.parametrize("reason", [Reason.STEADY, Reason.SCALE_UP, Reason.STABILIZING])
def test_the_next_step_down_names_both_windows(reason: Reason) -> None:
    assert LONG_WINDOWS == 6
    assert NEXT[reason].endswith("less for a whole window (for one surplus replica: six windows)")


async def test_all_services_are_explained_and_a_missing_status_is_said(
    kubeconfig: str, add_service: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CliError, match="no VLMService in namespace 'vision'"):
        await why(kubeconfig=kubeconfig)
    add_service("one")
    add_service("two")
    await why(kubeconfig=kubeconfig)
    out = capsys.readouterr().out
    assert "vision/one" in out
    assert "vision/two" in out
    assert out.count("No pool has a status yet") == 2


async def test_records_are_replayed_line_by_line_and_other_lines_of_a_log_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "operator.log"
    lines = [json.dumps({"record": json.loads(item.dump())}) for item in recorded(3)]
    log.write_text("\n".join(["starting", '{"message": "hello"}', *lines]) + "\n")
    await replay_file(log, last=False)
    out = capsys.readouterr().out
    assert out.count("replayed: the same") == 3
    assert out.count("stays at 2") == 3
    await replay_file(log, last=True)
    assert capsys.readouterr().out.count("replayed: the same") == 1


async def test_a_record_that_comes_out_differently_is_said_where_it_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    value = json.loads(recorded(1)[0].dump())
    value["outcome"]["decisions"]["decode"]["to"] = 7
    log = tmp_path / "changed.log"
    log.write_text(json.dumps(value))
    with pytest.raises(CliError, match=r"line 1 of .*changed.log has a different result"):
        await replay_file(log, last=False)
    assert "differs in outcome.decisions.decode.to: recorded 7, now 2" in capsys.readouterr().out


async def test_a_file_without_records_or_no_file_is_an_error_in_words(tmp_path: Path) -> None:
    (tmp_path / "empty.log").write_text('{"version": 9}\n')
    with pytest.raises(CliError, match=r"has no record of a decision: line 1: .*version 9"):
        await replay_file(tmp_path / "empty.log", last=False)
    with pytest.raises(CliError, match="cannot be read: No such file"):
        await replay_file(tmp_path / "none.log", last=False)


def test_an_empty_memory_has_nothing_to_note() -> None:
    assert memory_notes(Memory(), now=0.0) == {}
