"""`vlm rollout-plan`: the steps from one manifest to another, or the state of a rollout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from vlm_cli import flags
from vlm_cli.access import condition, find_service, open_cluster
from vlm_cli.offline import operator_options, read_documents
from vlm_cli.output import CliError, Format, console, emit, plain_table
from vlm_cli.preview import Row, preview
from vlm_operator import names
from vlm_operator.cluster import DEPLOYMENT, Manifest
from vlm_operator.errors import SpecError
from vlm_operator.names import Role
from vlm_operator.reconcile.decisions import Options
from vlm_operator.state import DeploymentState, owned_by

_ORDER = [*names.POOL_ROLES, Role.GATEWAY]


async def rollout_plan(
    name: Annotated[
        str | None, flags.service_argument("A VLMService; left out with --from.")
    ] = None,
    old: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help="The manifest that runs.")
    ] = None,
    new: Annotated[
        Path | None, typer.Option("--to", metavar="FILE", help="The manifest to apply.")
    ] = None,
    worker_image: flags.WorkerImage = None,
    gateway_image: flags.GatewayImage = None,
    namespace: flags.Namespace = None,
    output: flags.Output = Format.TABLE,
    kubeconfig: flags.Kubeconfig = None,
    context: flags.Context = None,
) -> None:
    """Print the steps from one manifest to another, offline; or where a service's rollout is.

    Raises:
        CliError: the service does not exist, or the cluster does not answer; or a file cannot be
            read, has not exactly one service, or has an invalid one.
    """
    if (old is None) != (new is None) or (old is None) == (name is None):
        raise typer.BadParameter("give the NAME of a service, or both --from and --to")
    if old is not None and new is not None:
        _print_steps(old, new, operator_options(worker_image, gateway_image), output=output)
        return
    assert name is not None
    async with open_cluster(kubeconfig, namespace, context) as access:
        service = await find_service(access, name)
        labels = {names.LABEL_SERVICE: name}
        listed = await access.cluster.list(DEPLOYMENT, access.namespace, labels)
    uid = service["metadata"]["uid"]
    states = (DeploymentState.of(item) for item in listed if owned_by(item, uid))
    deployments = [item for item in states if item is not None]
    deployments.sort(key=lambda item: (_ORDER.index(item.role), item.created, item.name))
    progress = condition(service, "RolloutProgressing") or {}
    stalled = condition(service, "Stalled") or {}
    if output is not Format.TABLE:
        emit(_rollout_view(deployments, service, progress, stalled), output)
        return
    table = plain_table(
        "ROLE", "VARIANT", "REVISION", "COMPAT", "READY", "NOTE", numbers=("READY",)
    )
    for item in deployments:
        table.add_row(
            item.role.value,
            item.variant or "-",
            item.revision,
            item.compat,
            f"{item.available}/{item.desired}",
            _note(item),
        )
    out = console()
    out.print(table)
    out.print(f"{progress.get('reason', 'Unknown')}: {progress.get('message', 'no status yet')}")
    if stalled.get("status") == "True":
        out.print(f"Stalled: {stalled['message']}")


def _note(item: DeploymentState) -> str:
    if item.failed:
        return "failed, not tried again until spec changes"
    return "" if item.initial is None else f"going: had {item.initial}"


def _rollout_view(
    deployments: list[DeploymentState], service: Manifest, progress: Manifest, stalled: Manifest
) -> dict[str, Any]:
    status = service.get("status", {})
    return {
        "currentRevision": status.get("currentRevision"),
        "updateRevision": status.get("updateRevision"),
        "progressing": progress.get("status") == "True",
        "reason": progress.get("reason"),
        "message": progress.get("message"),
        "stalled": stalled.get("status") == "True",
        "deployments": [
            {
                "name": item.name,
                "role": item.role.value,
                "variant": item.variant,
                "revision": item.revision,
                "compat": item.compat,
                "desired": item.desired,
                "available": item.available,
                "initial": item.initial,
                "failed": item.failed or None,
            }
            for item in deployments
        ],
    }


def _print_steps(old: Path, new: Path, options: Options, *, output: Format) -> None:
    before, after = read_documents(old), read_documents(new)
    first, second = before.service, after.service
    classes = {**before.node_classes, **after.node_classes}
    try:
        rows = preview(first, second, classes, options)
    except SpecError as error:
        raise CliError(str(error), f"correct {new}") from error
    if output is not Format.TABLE:
        emit([_step_view(row) for row in rows], output)
        return
    roles = [role for role in Role if any(role in row.counts for row in rows)]
    changing = {role for role in roles if any(row.counts.get(role, (0, 0))[0] for row in rows)}
    table = plain_table("#", *(role.value.upper() for role in roles), "WAITS FOR")
    for number, row in enumerate(rows, start=1):
        cells = (_cell(row.counts.get(role, (0, 0)), changes=role in changing) for role in roles)
        table.add_row(str(number), *cells, row.awaits or "nothing: done")
    console().print(table)
    automatic = [
        role.value
        for role, pool in second.spec.pools.present.items()
        if pool.scaling.mode != "Manual"
    ]
    if automatic:
        listed = ", ".join(automatic)
        console().print(f"Sizes of {listed} are counted as minReplicas: live ones may be larger.")


def _cell(counts: tuple[int, int], *, changes: bool) -> str:
    """Format a role's old and new pods; if its revision does not change, only their number."""
    was, now = counts
    if not changes:
        return str(now)
    parts = (f"{was} old" if was else "", f"{now} new" if now else "")
    return ", ".join(filter(None, parts)) or "0"


def _step_view(row: Row) -> dict[str, Any]:
    pools: Sequence[tuple[Role, tuple[int, int]]] = sorted(row.counts.items())
    return {
        "roles": {role.value: {"old": was, "new": now} for role, (was, now) in pools},
        "waitsFor": row.awaits,
    }
