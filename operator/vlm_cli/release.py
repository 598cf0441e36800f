"""`vlm release-finalizers`: removes our finalizer from deleted services if no operator runs."""

from __future__ import annotations

from vlm_cli.access import find_service, open_cluster
from vlm_cli.output import CliError, console
from vlm_operator import names
from vlm_operator.apply.pod_and_status_writes import write_finalizers
from vlm_operator.cluster import VLM_SERVICE, Cluster, Manifest

_MANAGER = "vlm"


async def release(
    name: str | None,
    *,
    namespace: str | None,
    everywhere: bool,
    kubeconfig: str | None,
    context: str | None,
) -> None:
    """Remove our finalizer from services that are being deleted; others are not changed.

    Raises:
        CliError: no service with our finalizer is being deleted, or the API server refuses.
    """
    async with open_cluster(kubeconfig, namespace, context) as access:
        if name is not None:
            found = [await find_service(access, name)]
        else:
            where = None if everywhere else access.namespace
            found = await access.cluster.list(VLM_SERVICE, where)
        waiting = [service for service in found if _waits(service["metadata"])]
        if not waiting:
            what = f"VLMService {name!r} is not" if name else "no VLMService is"
            raise CliError(f"{what} being deleted with our finalizer on it", "kubectl get vlm -A")
        for service in waiting:
            await _let_go(access.cluster, service)


def _waits(meta: Manifest) -> bool:
    return "deletionTimestamp" in meta and names.FINALIZER in meta.get("finalizers", [])


async def _let_go(cluster: Cluster, service: Manifest) -> None:
    kept = (item for item in service["metadata"]["finalizers"] if item != names.FINALIZER)
    await write_finalizers(cluster, service, kept, manager=_MANAGER)
    meta = service["metadata"]
    console().print(f"released {meta['namespace']}/{meta['name']}", markup=False)
