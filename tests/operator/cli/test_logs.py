"""`vlm logs` merges the logs of pods in order of time, selects lines, and follows new ones."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from vlm_cli.logs.command import logs
from vlm_cli.logs.lines import Line, LogLevel, Selection, parse_duration, parse_line
from vlm_cli.output import CliError
from vlm_operator.names import Role

PODS = "/api/v1/namespaces/vision/pods"


def add_pod(
    api: Any, role: str, *lines: str, number: int = 0, containers: Any = ("worker",)
) -> str:
    """Adds a pod whose first container has these lines in its log."""
    name = f"demo-{role}-{number}"
    labels = {"triptych.dev/service": "demo", "triptych.dev/role": role}
    metadata = {"name": name, "namespace": "vision", "labels": labels}
    spec = {"containers": [{"name": container} for container in containers]}
    api.add(PODS, {"metadata": metadata, "spec": spec, "status": {"phase": "Running"}})
    api.logs[f"{name}/{containers[0]}"] = list(lines)
    return name


def at(second: int, text: str = "", **fields: Any) -> str:
    """A line of the log endpoint; with fields, a worker's JSON."""
    text = json.dumps({"level": "info", **fields}) if fields else text
    return f"2026-11-21T10:00:{second:02d}.123456789Z {text}"


async def shown(capsys: Any, kubeconfig: str, **options: Any) -> list[tuple[str, str]]:
    await logs("demo", kubeconfig=kubeconfig, **options)
    lines = capsys.readouterr().out.splitlines()
    return [(source, text) for source, _, text in (line.partition("  ") for line in lines)]


async def test_lines_of_all_pods_are_in_order_of_time(api, kubeconfig, capsys):
    decode = add_pod(api, "decode", at(1, "a"), at(4, "d"))
    gateway = add_pod(api, "gateway", at(2, "b"), at(3, "c"), containers=("gateway",))
    assert await shown(capsys, kubeconfig) == [
        (decode, "a"), (gateway, "b"), (gateway, "c"), (decode, "d"),
    ]  # fmt: skip


async def test_a_sidecar_is_in_the_prefix(api, kubeconfig, capsys):
    name = add_pod(api, "decode", at(1, "a"), containers=("worker", "proxy"))
    api.logs[f"{name}/proxy"] = [at(0, "p")]
    assert await shown(capsys, kubeconfig) == [(f"{name}/proxy", "p"), (f"{name}/worker", "a")]


async def test_a_role_and_a_pod_limit_the_sources(api, kubeconfig, capsys):
    decode = add_pod(api, "decode", at(1, "a"))
    other = add_pod(api, "decode", at(2, "b"), number=1)
    add_pod(api, "prefill", at(3, "c"))
    assert await shown(capsys, kubeconfig, role=Role.DECODE) == [(decode, "a"), (other, "b")]
    assert await shown(capsys, kubeconfig, pod=other) == [(other, "b")]


async def test_a_request_is_found_over_all_roles_by_its_client_id(api, kubeconfig, capsys):
    first = {"message": "attempt lost", "request_id": "r-1"}
    last = {"message": "request", "request_id": "r-1", "client_request_id": "mine"}
    gateway = add_pod(api, "gateway", at(1, **first), at(3, request_id="r-2"), at(4, **last))
    decode = add_pod(api, "decode", at(2, error="r-1 lost its lease"), at(3, "no JSON"))
    for wanted in ("mine", "r-1"):
        found = await shown(capsys, kubeconfig, request=wanted)
        assert [source for source, _ in found] == [gateway, decode, gateway]
        assert not [text for _, text in found if "r-2" in text]


async def test_lines_without_a_level_pass_the_filter(api, kubeconfig, capsys):
    add_pod(api, "decode", at(1, level="debug"), at(2, "Segmentation fault"), at(3, level="error"))
    found = await shown(capsys, kubeconfig, level=LogLevel.WARNING)
    assert [text for _, text in found] == ["Segmentation fault", '{"level": "error"}']


async def test_previous_logs_are_read_where_there_are_any(api, kubeconfig, capsys):
    decode = add_pod(api, "decode", at(9, "now"))
    add_pod(api, "prefill", at(9, "now"))
    api.logs[f"{decode}/worker/previous"] = [at(1, "before")]
    await logs("demo", previous=True, kubeconfig=kubeconfig)
    printed = capsys.readouterr()
    assert printed.out == f"{decode}  before\n"
    assert printed.err == "demo-prefill-0: demo-prefill-0/worker/previous has no log\n"


async def test_new_lines_pods_and_restarts_are_followed_once(api, kubeconfig, capsys):
    decode = add_pod(api, "decode", at(1, "old"), at(2, "older than none"))
    task = asyncio.create_task(logs("demo", follow=True, since="1h", kubeconfig=kubeconfig))
    api.logs[f"{decode}/worker"] = [
        line.replace("2026", "2126") for line in api.logs[f"{decode}/worker"]
    ]
    lines: list[str] = []

    async def until(text: str) -> None:
        async with asyncio.timeout(20):
            while not any(line.endswith(text) for line in lines):
                await asyncio.sleep(0.02)
                lines.extend(capsys.readouterr().out.splitlines())

    try:
        await until("older than none")
        api.logs[f"{decode}/worker"].append(at(5, "new").replace("2026", "2126"))
        await until("new")
        name = add_pod(api, "decode", at(6, "of a new pod").replace("2026", "2126"), number=1)
        await until("of a new pod")
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    assert lines == [
        f"{decode}  old", f"{decode}  older than none", f"{decode}  new", f"{name}  of a new pod",
    ]  # fmt: skip


async def test_a_duration_becomes_the_time_of_the_oldest_line(api, kubeconfig, capsys):
    add_pod(api, "decode", at(1, "old"))
    await shown(capsys, kubeconfig, since="10m")
    assert api.log_queries[0]["sinceTime"].endswith("Z")
    with pytest.raises(typer.BadParameter):
        await logs("demo", since="ten minutes", kubeconfig=kubeconfig)
    with pytest.raises(typer.BadParameter):
        await logs("demo", follow=True, previous=True, kubeconfig=kubeconfig)


async def test_what_does_not_exist_is_named(api, kubeconfig, add_service):
    with pytest.raises(CliError) as refused:
        await logs("demo", kubeconfig=kubeconfig)
    assert "there is no VLMService 'demo'" in refused.value.problem
    add_service()
    with pytest.raises(CliError) as refused:
        await logs("demo", role=Role.ENCODER, kubeconfig=kubeconfig)
    assert refused.value.problem == "demo has no encoder pod"


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from("abc"))))
def test_each_pod_keeps_the_order_of_its_lines(items: list[tuple[int, str]]):
    """Lines of one pod are never exchanged, even if they have the same time."""
    by_pod = {name: sorted(at for at, pod in items if pod == name) for name in "abc"}
    lines = [
        Line(float(when), name, str(number))
        for name, times in by_pod.items()
        for number, when in enumerate(times)
    ]
    found = Selection().select(lines)
    assert [line.at for line in found] == sorted(line.at for line in lines)
    for name in "abc":
        own = [line.text for line in found if line.source == name]
        assert own == [str(number) for number in range(len(own))]


def test_a_line_without_a_time_gets_that_of_the_line_before():
    line = parse_line(b"unable to retrieve container logs", source="p", last=7.0)
    assert line == Line(7.0, "p", "unable to retrieve container logs")
    assert parse_line(b"2026-11-21T10:00:00.5+01:00 x", source="p", last=0.0).at % 1 == 0.5


def test_durations():
    assert [parse_duration(text).total_seconds() for text in ("45s", "10m", "1h30m", "2d")] == [
        45, 600, 5400, 172_800,
    ]  # fmt: skip
    for wrong in ("", "10", "m", "10m5", "1.5h"):
        with pytest.raises(ValueError, match="is no duration"):
            parse_duration(wrong)
