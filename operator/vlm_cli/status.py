"""`vlm status`: prints pods, blocking causes, and TTFT by stage."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from vlm_cli import flags
from vlm_cli.access import condition, find_service, open_cluster
from vlm_cli.output import STAGES, CliError, Format, console, emit, plain_table
from vlm_operator.autoscale.outcome import Reason
from vlm_operator.cluster import VLM_SERVICE, Manifest
from vlm_operator.names import POOL_ROLES

# Conditions whose healthy value is False.
_NEGATIVE = ("RolloutProgressing", "Reconciling", "Stalled")
_COLUMNS = ("NAME", "READY", "MODEL", "ENC", "PRE", "DEC", "TTFT-P95", "KV%", "STAGE", "AGE")


async def status(
    name: flags.ServiceName = None,
    namespace: flags.Namespace = None,
    everywhere: flags.AllNamespaces = False,
    output: flags.Output = Format.TABLE,
    kubeconfig: flags.Kubeconfig = None,
    context: flags.Context = None,
) -> None:
    """Show what runs, what blocks and where the time goes.

    Raises:
        CliError: there is no such service, or the cluster does not answer.
    """
    now = datetime.datetime.now(datetime.UTC)
    async with open_cluster(kubeconfig, namespace, context) as access:
        if name is not None:
            view = service_view(await find_service(access, name), now)
            if output is Format.TABLE:
                print_service(view, console())
            else:
                emit(view, output)
            return
        services = await access.cluster.list(VLM_SERVICE, None if everywhere else access.namespace)
        if not services and output is Format.TABLE:
            where = "any namespace" if everywhere else f"namespace {access.namespace!r}"
            raise CliError(
                f"there is no VLMService in {where}", "look everywhere with -A, or apply one"
            )
        views = [service_view(service, now) for service in services]
        if output is Format.TABLE:
            print_services(views, console(), everywhere=everywhere)
        else:
            emit(views, output)


def service_view(service: Manifest, now: datetime.datetime) -> dict[str, Any]:
    """Return the output of `-o json`: stable names, no formatting.

    `ready` is True, False, or None if the operator has not written a status yet.
    """
    meta, status = service["metadata"], service.get("status") or {}
    ready = condition(service, "Ready")
    created = datetime.datetime.fromisoformat(meta["creationTimestamp"])
    return {
        "name": meta["name"],
        "namespace": meta["namespace"],
        "ready": None if ready is None else ready["status"] == "True",
        "reason": (ready or {}).get("reason"),
        "message": (ready or {}).get("message"),
        "model": service["spec"]["model"].get("servedName") or meta["name"],
        "url": status.get("url"),
        "topology": status.get("topology"),
        "revision": status.get("currentRevision"),
        "updateRevision": status.get("updateRevision"),
        "suspended": bool(service["spec"].get("stopped")),
        "paused": bool(service["spec"].get("paused")),
        "deleting": "deletionTimestamp" in meta,
        "summary": status.get("summary") or {},
        "pools": status.get("pools") or {},
        "slo": status.get("slo") or [],
        "cost": status.get("cost"),
        "conditions": status.get("conditions") or [],
        "ageSeconds": max(0, int((now - created).total_seconds())),
    }


def print_services(
    views: Sequence[dict[str, Any]], out: Console, *, everywhere: bool = False
) -> None:
    """Print the table of services, and the message of each that is not Ready."""
    table = plain_table(*(("NAMESPACE",) if everywhere else ()), *_COLUMNS)
    for view in views:
        summary = view["summary"]
        row = [
            view["name"],
            _ready(view),
            view["model"],
            *(_cell(summary.get(role)) for role in POOL_ROLES),
            _cell(summary.get("ttftP95")),
            _cell(summary.get("kvOccupancyPercent")),
            _cell(summary.get("dominantStage")),
            age(view["ageSeconds"]),
        ]
        table.add_row(*([view["namespace"]] if everywhere else []), *row)
    out.print(table)
    for view in views:
        if (view["ready"] is not True or _asleep(view)) and view["message"]:
            out.print(f"{view['name']}: {view['reason']}: {view['message']}", markup=False)


def print_service(view: dict[str, Any], out: Console) -> None:
    head = plain_table("", "")
    head.show_header = False
    states = [word for word in ("suspended", "paused", "deleting") if view[word]]
    states += ["asleep"] if _asleep(view) else []
    for label, value in (
        ("Name", f"{view['namespace']}/{view['name']}"),
        ("Ready", " ".join([_ready(view), *states])),
        ("Model", view["model"]),
        ("Topology", _cell(view["topology"])),
        ("URL", _url(view)),
        ("Revision", _revision(view)),
        ("Cost", _cost(view["cost"])),
        ("Age", age(view["ageSeconds"])),
    ):
        head.add_row(label, value)
    out.print(head)
    _print_pools(view["pools"], out)
    _print_slo(view["slo"], out)
    _print_conditions(view["conditions"], out)


def _print_pools(pools: dict[str, Any], out: Console) -> None:
    table = plain_table("POOL", "READY", "STARTING", "PENDING", "DRAINING", "UPDATED", "LAST SCALE")
    for role in POOL_ROLES:
        if pool := pools.get(role):
            table.add_row(
                role,
                f"{pool.get('readyReplicas', 0)}/{pool.get('desiredReplicas', 0)}",
                *(
                    str(pool.get(f"{what}Replicas", 0))
                    for what in ("starting", "pending", "draining", "updated")
                ),
                _decision(pool.get("lastDecision")),
            )
    if table.row_count:
        out.print()
        out.print(table)


def _print_slo(targets: Sequence[dict[str, Any]], out: Console) -> None:
    table = plain_table("MODALITY", "TTFT-P95", "TARGET", "SLOW TTFT WENT TO")
    for target in targets:
        shares = target.get("stages") or {}
        largest = sorted(
            shares, key=lambda s: (-shares[s], STAGES.index(s) if s in STAGES else len(STAGES))
        )
        table.add_row(
            target["modality"],
            _milliseconds(target.get("ttftP95Milliseconds")),
            _milliseconds(target.get("targetMilliseconds")),
            ", ".join(f"{stage} {shares[stage]}%" for stage in largest[:4]) or "-",
        )
    if table.row_count:
        out.print()
        out.print(table)


def _print_conditions(conditions: Sequence[dict[str, Any]], out: Console) -> None:
    if not conditions:
        out.print("\nNo status yet: is the operator running?")
        return
    table = plain_table("CONDITION", "STATUS", "REASON", "MESSAGE")
    table.columns[3].no_wrap = False
    for item in conditions:
        good = item["status"] == ("False" if item["type"] in _NEGATIVE else "True")
        colour = "green" if good else "yellow" if item["status"] == "Unknown" else "red"
        table.add_row(
            item["type"],
            f"[{colour}]{item['status']}[/]",
            item.get("reason", ""),
            item.get("message", "").replace("[", r"\["),
        )
    out.print()
    out.print(table)


def age(seconds: int) -> str:
    """Format an age as kubectl does; only ages of 2 to 10 minutes have two units."""
    minutes, hours, days = seconds // 60, seconds // 3600, seconds // 86400
    if seconds < 120:
        return f"{seconds}s"
    if minutes < 10 and seconds % 60:
        return f"{minutes}m{seconds % 60}s"
    if minutes < 180:
        return f"{minutes}m"
    return f"{hours}h" if hours < 48 else f"{days}d"


def _asleep(view: dict[str, Any]) -> bool:
    return bool(view["ready"]) and view["reason"] == Reason.SCALED_TO_ZERO


def _ready(view: dict[str, Any]) -> str:
    words = {True: "[green]True[/]", False: "[red]False[/]", None: "[yellow]Unknown[/]"}
    return words[view["ready"]]


def _cell(value: object) -> str:
    return "-" if value is None or value == "" else str(value)


def _milliseconds(value: int | None) -> str:
    return "-" if value is None else f"{value} ms"


def _url(view: dict[str, Any]) -> str:
    if not view["url"]:
        return "-"
    return f"{view['url']}  (inside the cluster; from here: vlm chat {view['name']})"


def _revision(view: dict[str, Any]) -> str:
    current, update = view["revision"], view["updateRevision"]
    return f"{current} → {update}" if update and update != current else _cell(current)


def _cost(cost: dict[str, Any] | None) -> str:
    if not cost or cost.get("perHour") is None:
        return "-"
    return f"{cost['perHour']} {cost.get('currency', '')} per hour".replace("  ", " ")


def _decision(decision: dict[str, Any] | None) -> str:
    if not decision:
        return "-"
    return f"{decision['from']} → {decision['to']} {decision['reason']}"
