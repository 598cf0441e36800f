"""`vlm why`: explains the sizes of pools, now or at a recorded tick."""

from __future__ import annotations

import asyncio
import datetime
from pathlib import Path
from typing import Annotated

import typer

from vlm_cli import flags
from vlm_cli.access import Access, condition, find_service, open_cluster
from vlm_cli.output import CliError, console
from vlm_operator import names
from vlm_operator.apply.pod_and_status_writes import MEMORY_KEY
from vlm_operator.autoscale import memory as memories
from vlm_operator.autoscale.decide import Memory
from vlm_operator.autoscale.explain import explain, explain_status
from vlm_operator.autoscale.outcome import Reason
from vlm_operator.autoscale.record import Record, RecordError, differences, read_log, replay
from vlm_operator.cluster import CONFIG_MAP, VLM_SERVICE, Manifest
from vlm_operator.names import Role
from vlm_operator.status.inputs import ConditionReason

# Conditions about sizes of pools.
_CONDITIONS = ("ScalingActive", "MetricsAvailable", "CapacitySufficient", "SLOAttainable")


# Reasons of Ready that explain the sizes of all pools at once.
_SLEEP = (Reason.SCALED_TO_ZERO, ConditionReason.WAKING)


async def why(
    name: flags.ServiceName = None,
    record: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Decide again what the operator logged, and say why."),
    ] = None,
    last: Annotated[bool, typer.Option("--last", help="Only the last record of FILE.")] = False,
    namespace: flags.Namespace = None,
    kubeconfig: flags.Kubeconfig = None,
    context: flags.Context = None,
) -> None:
    """Say why each pool has its size, and what would change it.

    Raises:
        CliError: there is no such service, or the cluster does not answer; or see `replay_file`.
    """
    if record is not None:
        await replay_file(record, last=last)
        return
    async with open_cluster(kubeconfig, namespace, context) as access:
        if name is not None:
            services = [await find_service(access, name)]
        else:
            services = await access.cluster.list(VLM_SERVICE, access.namespace)
        if not services:
            raise CliError(f"there is no VLMService in namespace {access.namespace!r}")
        texts = [await explanation(access, service) for service in services]
    console().print("\n\n".join(texts), markup=False)


async def replay_file(path: Path, *, last: bool) -> None:
    """Replay each record of a file; print its explanation, and whether the result is the same.

    Raises:
        CliError: the file has no record, or a replay has a different result.
    """
    try:
        lines = (await asyncio.to_thread(path.read_text)).splitlines()
    except OSError as error:
        raise CliError(f"{path} cannot be read: {error.strerror}") from error
    records = list(_records(path, lines))
    different = []
    for number, record in records[-1:] if last else records:
        found = differences(record, replay(record))
        same = "replayed: the same" if not found else f"replayed: differs in {found[0]}"
        console().print(f"{explain(record)}\n\n{same}\n", markup=False)
        different += [number] if found else []
    if different:
        raise CliError(
            f"line {different[0]} of {path} has a different result",
            "was it written by another version of the operator?",
        )


def _records(path: Path, lines: list[str]) -> list[tuple[int, Record]]:
    """Return the records in a log with their line numbers; other lines are ignored.

    Raises:
        CliError: there is no valid record.
    """
    found, problem = [], ""
    for number, record in read_log(lines):
        if isinstance(record, RecordError):
            problem = problem or f"line {number}: {record}"
        else:
            found.append((number, record))
    if not found:
        raise CliError(
            f"{path} has no record of a decision" + (f": {problem}" if problem else ""),
            'take the operator\'s log lines with "record"',
        )
    return found


async def explanation(access: Access, service: Manifest) -> str:
    """Return the text of `vlm why` of one service."""
    meta = service["metadata"]
    head = [f"{meta['namespace']}/{meta['name']}"]
    for kind in _CONDITIONS:
        found = condition(service, kind)
        if found is not None and found.get("message"):
            head.append(f"{kind} {found['status']}: {found['message']}")
    ready = condition(service, "Ready") or {}
    if ready.get("reason") in _SLEEP:
        head.append(f"Ready {ready['status']}: {ready['message']}")
    stored = await access.cluster.get(
        CONFIG_MAP, meta["namespace"], names.child(meta["name"], "autoscaler")
    )
    data = (stored or {}).get("data") or {}
    now = datetime.datetime.now(datetime.UTC).timestamp()
    memory = memories.load(data.get(MEMORY_KEY), now=now)
    body = explain_status(service, memory_notes(memory, now=now))
    if not body:
        body = "No pool has a status yet: is the operator running?"
    return "\n".join([*head, "", body])


def memory_notes(memory: Memory, *, now: float) -> dict[Role, list[str]]:
    """Return notes by pool from the autoscaler's memory that the status does not show.

    `now` is in seconds since the epoch.
    """
    notes_by_role: dict[Role, list[str]] = {}
    for role, pace in memory.pace.pools.items():
        notes = notes_by_role.setdefault(role, [])
        for name, item in sorted(pace.exhausted.items()):
            if now < item.until:
                minutes = (item.until - now) / 60
                notes.append(
                    f"variant {name} {item.what} ({item.times} times in a row), "
                    f"tried again in {minutes:.0f} min"
                )
        if pace.foreign is not None:
            notes.append(f"{pace.foreign.manager} set VLMPool to {pace.foreign.replicas}")
        for change in pace.changes[-3:]:
            minutes = max(0.0, now - change.at) / 60
            notes.append(f"{change.before} → {change.to} {minutes:.0f} min ago")
    return notes_by_role
