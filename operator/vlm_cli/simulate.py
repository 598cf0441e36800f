"""`vlm simulate`: runs autoscalers on generated or recorded traffic, in simulated time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
import yaml

from vlm_cli import flags
from vlm_cli.offline import read_documents
from vlm_cli.output import CliError, Format, console, emit, plain_table
from vlm_cli.simulator import run as simulator
from vlm_cli.simulator.baselines import BASELINES
from vlm_cli.simulator.chart import Point, draw
from vlm_cli.simulator.contenders import (
    OURS,
    TriptychAutoscaler,
    Watch,
    adjusted,
    contender,
    read_tuned,
)
from vlm_cli.simulator.generate import ALL_SHAPES, generate
from vlm_cli.simulator.hardware import Hardware, HardwareError, read_hardware
from vlm_cli.simulator.run import Setup
from vlm_cli.simulator.scenario import standard
from vlm_cli.simulator.score import Score, front, score
from vlm_cli.simulator.trace import Trace, TraceError, read_trace
from vlm_operator.api import resolve
from vlm_operator.api.enums import ScalingMode
from vlm_operator.autoscale.decide import Memory, Outcome
from vlm_operator.autoscale.inputs import service_policy
from vlm_operator.autoscale.policy import ServicePolicy
from vlm_operator.autoscale.record import Record
from vlm_operator.autoscale.view import View
from vlm_operator.errors import SpecError
from vlm_operator.names import Role
from vlm_operator.pods.worker import place


async def simulate(
    trace: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME|FILE", help="Generated, or JSON lines; repeatable."),
    ] = None,
    policy: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A VLMService with its VLMNodeClasses."),
    ] = None,
    hardware: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What the hardware can do, as YAML.")
    ] = None,
    against: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A baseline, or all; repeatable.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same run.")] = 1,
    seconds: Annotated[float, typer.Option(min=60, help="Of generated traces.")] = 3600.0,
    scale: Annotated[float, typer.Option(min=0.01, help="Multiplies their rate.")] = 1.0,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.svg", help="Missed minutes by device-hours.")
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Decisions, for `vlm why --record`."),
    ] = None,
    output: flags.Output = Format.TABLE,
) -> None:
    """Try a policy on traffic, in simulated time, beside what other autoscalers do.

    Raises:
        CliError: a trace, a baseline or a file is unknown or invalid.
    """
    rivals = tuple(BASELINES) if against == ["all"] else tuple(against or ())
    unknown = sorted(set(rivals) - set(BASELINES))
    if unknown:
        raise CliError(f"no baseline {unknown[0]!r}", f"there are {', '.join(BASELINES)}")
    if plot is not None and plot.suffix != ".svg":
        raise CliError(f"{plot} is not the name of an SVG file", "write FILE.svg")
    tuned = _tuned()
    rows: list[dict[str, Any]] = []
    with _records(record) as watch_for:
        for name in trace or ["bursty-images"]:
            requests = _trace(name, seed=seed, seconds=seconds, scale=scale)
            setup = _setup(name, policy, hardware, tuned[OURS])
            for rival in (OURS, *rivals):
                watch = watch_for(setup.policy) if rival == OURS else None
                autoscaler = (
                    TriptychAutoscaler(setup.policy, watch=watch)
                    if rival == OURS
                    else contender(rival, setup.policy, tuned[rival])
                )
                run = simulator.simulate(setup, requests, autoscaler, seed=seed)
                rows.append(_row(requests.name, rival, score(run, setup.policy)))
    if plot is not None:
        _write(plot, _chart(rows))
    if output is Format.TABLE:
        _print(rows)
    else:
        emit({"seed": seed, "runs": rows}, output)


def read_service(path: Path) -> tuple[ServicePolicy, dict[Role, int]]:
    """Read a manifest with one VLMService, and with the VLMNodeClasses that it names.

    Returns:
        The autoscaling policy, and the initial replicas of each pool: `replicas` in mode Manual,
        else `minReplicas`, at least 1.

    Raises:
        CliError: the manifest has not exactly one VLMService, or an invalid one.
    """
    manifest = read_documents(path)
    classes = manifest.node_classes
    try:
        service = resolve(place(manifest.service, classes), worker_image="simulated")
        policy = service_policy(service, classes)
    except SpecError as error:
        raise CliError(str(error)) from None
    missing = [role for role in (Role.PREFILL, Role.DECODE) if role not in policy.pools]
    if missing:
        raise CliError(
            f"the service has no {missing[0]} pool", "the simulator needs both prefill and decode"
        )
    start = {
        role: pool.replicas if pool.mode is ScalingMode.MANUAL else max(1, pool.minimum)
        for role, pool in policy.pools.items()
    }
    return policy, start


def _tuned() -> dict[str, dict[str, Any]]:
    """Return the settings of all autoscalers that `bench/simulate.py --tune` found."""
    return read_tuned(resources.files("vlm_cli.simulator").joinpath("tuned.json").read_text())


def _setup(
    trace: str, manifest: Path | None, hardware_file: Path | None, ours: Mapping[str, Any]
) -> Setup:
    """Return the simulated service: the manifest's, or the comparison's with tuned settings."""
    if manifest is None:
        setup = standard(trace)
        setup = dataclasses.replace(setup, policy=adjusted(setup.policy, ours))
    else:
        policy, start = read_service(manifest)
        setup = Setup(policy, Hardware(), start)
    if hardware_file is None:
        return setup
    try:
        hardware = read_hardware(yaml.safe_load(_read(hardware_file)) or {})
    except (HardwareError, yaml.YAMLError) as error:
        raise CliError(f"{hardware_file}: {error}") from None
    return dataclasses.replace(setup, hardware=hardware)


def _trace(name: str, *, seed: int, seconds: float, scale: float) -> Trace:
    if name in ALL_SHAPES:
        return generate(name, seed=seed, seconds=seconds, scale=scale)
    path = Path(name)
    if not path.exists():
        raise CliError(f"no trace {name!r}", f"write a file, or one of {', '.join(ALL_SHAPES)}")
    try:
        return read_trace(path.stem, _read(path).splitlines())
    except TraceError as error:
        raise CliError(f"{name}: {error}") from None


@contextmanager
def _records(path: Path | None) -> Iterator[Any]:
    """Yield a function from a policy to its `Watch`, which writes records to the file."""
    if path is None:
        yield lambda _policy: None
        return
    try:
        with path.open("w") as file:
            yield lambda policy: _watch(policy, file)
    except OSError as error:
        raise CliError(f"cannot write {path}: {error.strerror}") from None


def _watch(policy: ServicePolicy, file: TextIO) -> Watch:
    """Return a `Watch` that writes decisions that change a replica count."""

    def write(view: View, before: Memory, outcome: Outcome) -> None:
        record = Record("simulated", policy, view, before, outcome)
        if record.changes_something:
            file.write(record.dump() + "\n")

    return write


def _row(trace: str, name: str, found: Score) -> dict[str, Any]:
    return {
        "trace": trace,
        "autoscaler": name,
        "missedMinutes": found.missed,
        "minutes": found.minutes,
        "acceleratorHours": round(found.accelerator_hours, 2),
        "cost": round(found.cost, 2),
        "costPer1000": round(found.cost_per_1000, 3),
        "turnsPerWindow": found.turns,
        "turns": found.turns_total,
        "requests": found.requests,
        "unserved": found.unserved + found.refused,
    }


def _print(rows: Sequence[Mapping[str, Any]]) -> None:
    numbers = ("Missed", "Hours", "Cost/1k", "Turns", "Unserved")
    table = plain_table("Trace", "Autoscaler", *numbers, "Front", numbers=numbers)
    for row in rows:
        same = {
            item["autoscaler"]: (item["acceleratorHours"], item["missedMinutes"])
            for item in rows
            if item["trace"] == row["trace"]
        }
        table.add_row(
            row["trace"],
            row["autoscaler"],
            f"{row['missedMinutes']}/{row['minutes']} min",
            f"{row['acceleratorHours']:.2f}",
            f"{row['costPer1000']:.2f}",
            f"{row['turnsPerWindow']}",
            f"{row['unserved']}",
            "*" if row["autoscaler"] in front(same) else "",
        )
    console().print(table)


def _chart(rows: Sequence[Mapping[str, Any]]) -> str:
    points = [
        Point(row["acceleratorHours"], row["missedMinutes"], row["autoscaler"]) for row in rows
    ]
    names = sorted({point.name for point in points})
    sums = [
        Point(
            sum(point.x for point in points if point.name == name),
            sum(point.y for point in points if point.name == name),
            name,
        )
        for name in names
    ]
    return draw(
        "SLO-miss minutes by accelerator-hours",
        x_name="accelerator-hours, all traces",
        cloud=(),
        named=sums,
        highlight=OURS,
    )


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise CliError(f"cannot read {path}: {error}") from None


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise CliError(f"cannot write {path}: {error.strerror}") from None
