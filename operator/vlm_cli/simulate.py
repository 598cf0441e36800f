"""`vlm simulate`: runs autoscalers on generated or recorded traffic, in simulated time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any, TextIO

import yaml

from vlm_cli.output import CliError, Format, console, emit, plain_table
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
from vlm_cli.simulator.hardware import Hardware
from vlm_cli.simulator.run import Setup, simulate
from vlm_cli.simulator.scenario import standard
from vlm_cli.simulator.score import Score, front, score
from vlm_cli.simulator.settings import HardwareError, read_hardware
from vlm_cli.simulator.trace import Trace, TraceError, read_trace
from vlm_operator.api import parse, resolve
from vlm_operator.api.enums import ScalingMode
from vlm_operator.autoscale.decide import Memory, Outcome
from vlm_operator.autoscale.inputs import service_policy
from vlm_operator.autoscale.policy import ServicePolicy
from vlm_operator.autoscale.record import Record
from vlm_operator.autoscale.view import View
from vlm_operator.errors import SpecError
from vlm_operator.names import KIND_NODE_CLASS, KIND_SERVICE, Role
from vlm_operator.observe import node_class
from vlm_operator.pods.worker import place


@dataclasses.dataclass(frozen=True)
class SimulateOptions:
    """Arguments of the command line.

    Attributes:
        traces: names of generated traces, or files.
        policy: file with a VLMService; None means the comparison's service.
        hardware: file with the hardware's speeds; None means the simulator's defaults.
        against: names of baselines; if empty, only our autoscaler runs.
        seconds: length of generated traces.
        scale: factor of their rate.
        record: file for every decision that changes a replica count, for `vlm why --record`.
    """

    traces: tuple[str, ...]
    policy: Path | None
    hardware: Path | None
    against: tuple[str, ...]
    seed: int
    seconds: float
    scale: float
    plot: Path | None
    record: Path | None


def run_simulation(options: SimulateOptions, *, form: Format) -> None:
    """Run every trace under every autoscaler, and print the scores.

    Raises:
        CliError: a trace, a baseline or a file is unknown or invalid.
    """
    unknown = sorted(set(options.against) - set(BASELINES))
    if unknown:
        raise CliError(f"no baseline {unknown[0]!r}", f"there are {', '.join(BASELINES)}")
    if options.plot is not None and options.plot.suffix != ".svg":
        raise CliError(f"{options.plot} is not the name of an SVG file", "write FILE.svg")
    tuned = _tuned()
    rows: list[dict[str, Any]] = []
    with _records(options.record) as watch_for:
        for name in options.traces:
            trace = _trace(name, options)
            setup = _setup(name, options, tuned[OURS])
            for rival in (OURS, *options.against):
                watch = watch_for(setup.policy) if rival == OURS else None
                autoscaler = (
                    TriptychAutoscaler(setup.policy, watch=watch)
                    if rival == OURS
                    else contender(rival, setup.policy, tuned[rival])
                )
                found = score(simulate(setup, trace, autoscaler, seed=options.seed), setup.policy)
                rows.append(_row(trace.name, rival, found))
    if options.plot is not None:
        _write(options.plot, _chart(rows))
    if form is Format.TABLE:
        _print(rows)
    else:
        emit({"seed": options.seed, "runs": rows}, form)


def read_service(text: str) -> tuple[ServicePolicy, dict[Role, int]]:
    """Read a manifest: one VLMService, and the VLMNodeClasses that it names.

    Returns:
        The autoscaling policy, and the initial replicas of each pool: `replicas` in mode Manual,
        else `minReplicas`, at least 1.

    Raises:
        CliError: the manifest has not exactly one VLMService, or an invalid one.
    """
    try:
        documents = [item for item in yaml.safe_load_all(text) if isinstance(item, dict)]
    except yaml.YAMLError as error:
        raise CliError(f"the policy is not YAML: {error}") from None
    services = [item for item in documents if item.get("kind") == KIND_SERVICE]
    if len(services) != 1:
        raise CliError(
            f"the policy has {len(services)} VLMServices", "write one, and its VLMNodeClasses"
        )
    classes = {
        item.name: item
        for item in map(node_class, (d for d in documents if d.get("kind") == KIND_NODE_CLASS))
    }
    meta = {"name": "simulated", "namespace": "default", "uid": "simulated", "generation": 1}
    body = {**services[0], "metadata": meta | services[0].get("metadata", {})}
    try:
        service = resolve(place(parse(body), classes), worker_image="simulated")
        policy = service_policy(service, classes)
    except SpecError as error:
        raise CliError(str(error)) from None
    lacking = [role for role in (Role.PREFILL, Role.DECODE) if role not in policy.pools]
    if lacking:
        raise CliError(
            f"the service has no {lacking[0]} pool", "what is simulated prefills and decodes apart"
        )
    start = {
        role: pool.replicas if pool.mode is ScalingMode.MANUAL else max(1, pool.minimum)
        for role, pool in policy.pools.items()
    }
    return policy, start


def _tuned() -> dict[str, dict[str, Any]]:
    """Return the settings of all autoscalers that `bench/simulate.py --tune` found."""
    return read_tuned(resources.files("vlm_cli.simulator").joinpath("tuned.json").read_text())


def _setup(trace: str, options: SimulateOptions, ours: Mapping[str, Any]) -> Setup:
    """Return the simulated service: the manifest's, or the comparison's with tuned settings."""
    if options.policy is None:
        setup = standard(trace)
        setup = dataclasses.replace(setup, policy=adjusted(setup.policy, ours))
    else:
        policy, start = read_service(_read(options.policy))
        setup = Setup(policy, Hardware(), start)
    if options.hardware is None:
        return setup
    try:
        hardware = read_hardware(yaml.safe_load(_read(options.hardware)) or {})
    except (HardwareError, yaml.YAMLError) as error:
        raise CliError(f"{options.hardware}: {error}") from None
    return dataclasses.replace(setup, hardware=hardware)


def _trace(name: str, options: SimulateOptions) -> Trace:
    if name in ALL_SHAPES:
        return generate(name, seed=options.seed, seconds=options.seconds, scale=options.scale)
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


def _print(rows: Iterable[Mapping[str, Any]]) -> None:
    numbers = ("Missed", "Hours", "Cost/1k", "Turns", "Unserved")
    table = plain_table("Trace", "Autoscaler", *numbers, "Front", numbers=numbers)
    known = list(rows)
    for row in known:
        same = {
            item["autoscaler"]: (item["acceleratorHours"], item["missedMinutes"])
            for item in known
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


def _chart(rows: Iterable[Mapping[str, Any]]) -> str:
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
