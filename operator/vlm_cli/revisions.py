"""Shows a service's rollout: its Deployments by revision, and what the rollout waits for."""

from __future__ import annotations

from typing import Any

from vlm_cli.access import condition, find_service, open_cluster
from vlm_cli.output import Format, console, emit, plain_table
from vlm_operator import names
from vlm_operator.cluster import DEPLOYMENT, Manifest
from vlm_operator.names import Role
from vlm_operator.state import DeploymentState, owned_by

_ORDER = [*names.POOL_ROLES, Role.GATEWAY]


async def show_rollout(
    name: str,
    *,
    namespace: str | None,
    kubeconfig: str | None,
    context: str | None,
    form: Format,
) -> None:
    """Print the pods of each revision, and the condition RolloutProgressing.

    Raises:
        CliError: the service does not exist, or the cluster does not answer.
    """
    async with open_cluster(kubeconfig, namespace, context) as access:
        service = await find_service(access, name)
        labels = {names.LABEL_SERVICE: name}
        listed = await access.cluster.list(DEPLOYMENT, access.namespace, labels)
    uid = service["metadata"]["uid"]
    read = (DeploymentState.of(item) for item in listed if owned_by(item, uid))
    found = [item for item in read if item is not None]
    found.sort(key=lambda item: (_ORDER.index(item.role), item.created, item.name))
    said = condition(service, "RolloutProgressing") or {}
    stalled = condition(service, "Stalled") or {}
    if form is not Format.TABLE:
        emit(_plain(found, service, said, stalled), form)
        return
    table = plain_table(
        "ROLE", "VARIANT", "REVISION", "COMPAT", "READY", "NOTE", numbers=("READY",)
    )
    for item in found:
        table.add_row(
            item.role.value,
            item.variant or "-",
            item.revision,
            item.compat,
            f"{item.available}/{item.desired}",
            _note(item),
        )
    console().print(table)
    console().print(f"{said.get('reason', 'Unknown')}: {said.get('message', 'no status yet')}")
    if stalled.get("status") == "True":
        console().print(f"Stalled: {stalled['message']}")


def _note(item: DeploymentState) -> str:
    if item.failed:
        return "failed, not tried again until spec changes"
    return "" if item.initial is None else f"going: had {item.initial}"


def _plain(
    found: list[DeploymentState], service: Manifest, said: Manifest, stalled: Manifest
) -> dict[str, Any]:
    status = service.get("status", {})
    return {
        "currentRevision": status.get("currentRevision"),
        "updateRevision": status.get("updateRevision"),
        "progressing": said.get("status") == "True",
        "reason": said.get("reason"),
        "message": said.get("message"),
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
            for item in found
        ],
    }
