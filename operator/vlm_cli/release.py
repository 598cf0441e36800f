"""`vlm release-finalizers`: removes our finalizer from deleted services if no operator runs."""

from __future__ import annotations

from vlm_cli import flags
from vlm_cli.access import find_service, open_cluster
from vlm_cli.output import CliError, console
from vlm_operator import names
from vlm_operator.apply.pod_and_status_writes import write_finalizers
from vlm_operator.cluster import VLM_SERVICE, Manifest

_MANAGER = "vlm"


async def release(
    name: flags.ServiceName = None,
    namespace: flags.Namespace = None,
    everywhere: flags.AllNamespaces = False,
    kubeconfig: flags.Kubeconfig = None,
    context: flags.Context = None,
) -> None:
    """Remove the finalizers of deleted services if the operator is gone: nothing else does.

    Services that are not being deleted are not changed.

    Raises:
        CliError: no service with our finalizer is being deleted, or the API server refuses.
    """
    async with open_cluster(kubeconfig, namespace, context) as access:
        if name is not None:
            services = [await find_service(access, name)]
        else:
            where = None if everywhere else access.namespace
            services = await access.cluster.list(VLM_SERVICE, where)
        blocked = [service for service in services if _is_blocked(service["metadata"])]
        if not blocked:
            what = f"VLMService {name!r} is not" if name else "no VLMService is"
            raise CliError(f"{what} being deleted with our finalizer on it", "kubectl get vlm -A")
        for service in blocked:
            meta = service["metadata"]
            others = (item for item in meta["finalizers"] if item != names.FINALIZER)
            await write_finalizers(access.cluster, service, others, manager=_MANAGER)
            console().print(f"released {meta['namespace']}/{meta['name']}", markup=False)


def _is_blocked(meta: Manifest) -> bool:
    return "deletionTimestamp" in meta and names.FINALIZER in meta.get("finalizers", [])
