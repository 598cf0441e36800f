"""Connects to a cluster with a kubeconfig, and finds a service's objects by its name."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from vlm_cli.output import CliError
from vlm_operator import kube, names
from vlm_operator.cluster import POD, VLM_SERVICE, Manifest
from vlm_operator.errors import ClusterError, UnavailableError

_COMPLETION_SECONDS = 2.0  # a shell waits for its completion
DEFAULT_KUBECONFIG = "~/.kube/config"


@dataclasses.dataclass(frozen=True)
class Access:
    """A client of a cluster, the command's namespace, and data for other connections."""

    cluster: kube.KubeCluster
    namespace: str
    connection: kube.Connection

    def ssl_context(self) -> ssl.SSLContext:
        """Return a TLS context with the cluster's CA and the user's client certificate."""
        context = ssl.create_default_context(cafile=self.connection.ca_path)
        if self.connection.insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if self.connection.certificate_path is not None:
            context.load_cert_chain(
                self.connection.certificate_path, self.connection.private_key_path
            )
        return context


@contextlib.asynccontextmanager
async def open_cluster(
    kubeconfig: str | None, namespace: str | None, context: str | None = None
) -> AsyncIterator[Access]:
    """Connect with the kubeconfig that kubectl would use.

    None means ~/.kube/config, the context's namespace, and the current context.

    Raises:
        CliError: there is no usable kubeconfig, or the API server does not answer or refuses.
    """
    path = _find(kubeconfig)
    try:
        _, default = kube.chosen_context(path, context)
        loaded = await kube.configuration(path, context)
        connection = await kube.connection(loaded)
    except ClusterError as error:
        raise CliError(
            f"the kubeconfig {path} cannot be used: {error.message}", "check: kubectl cluster-info"
        ) from error
    cluster = kube.KubeCluster(loaded)
    try:
        yield Access(cluster, namespace or default, connection)
    except UnavailableError as error:
        raise CliError(
            f"the cluster at {connection.server} does not answer: {error.message}",
            "start one with `vlm demo`, or name another with --kubeconfig",
        ) from error
    except ClusterError as error:
        raise CliError(f"the cluster refused: {error.message}", _remedy(error)) from error
    finally:
        await cluster.close()


async def find_service(access: Access, name: str) -> Manifest:
    """Return the VLMService `name`.

    Raises:
        CliError: there is none; the message names those that exist.
    """
    service = await access.cluster.get(VLM_SERVICE, access.namespace, name)
    if service is not None:
        return service
    others = [item["metadata"] for item in await access.cluster.list(VLM_SERVICE)]
    here = [meta["name"] for meta in others if meta["namespace"] == access.namespace]
    elsewhere = [meta["namespace"] for meta in others if meta["name"] == name]
    problem = f"there is no VLMService {name!r} in namespace {access.namespace!r}"
    if elsewhere:
        raise CliError(problem, f"there is one in another: -n {elsewhere[0]}")
    if here:
        raise CliError(problem, f"there is: {', '.join(sorted(here))}")
    raise CliError(problem, "there is none at all; begin with examples/quickstart, or -n NAMESPACE")


async def service_names(
    kubeconfig: str | None, namespace: str | None, context: str | None
) -> list[str]:
    """Return the names of a namespace's services; none if the cluster does not answer in time."""
    try:
        async with (
            asyncio.timeout(_COMPLETION_SECONDS),
            open_cluster(kubeconfig, namespace, context) as access,
        ):
            services = await access.cluster.list(VLM_SERVICE, access.namespace)
    except (CliError, TimeoutError):
        return []
    return sorted(str(item["metadata"]["name"]) for item in services)


async def gateway_pods(access: Access, name: str) -> list[Manifest]:
    """Return the gateway pods of a service that are ready and not being deleted."""
    labels = {names.LABEL_SERVICE: name, names.LABEL_ROLE: names.Role.GATEWAY.value}
    pods = await access.cluster.list(POD, access.namespace, labels)
    return [pod for pod in pods if is_ready(pod) and "deletionTimestamp" not in pod["metadata"]]


def condition(manifest: Manifest, kind: str) -> dict[str, Any] | None:
    """Return the condition of type `kind` in an object's status; None if there is none."""
    for found in manifest.get("status", {}).get("conditions") or []:
        if found["type"] == kind:
            return dict(found)
    return None


def is_ready(manifest: Manifest) -> bool:
    found = condition(manifest, "Ready")
    return found is not None and found["status"] == "True"


def _find(kubeconfig: str | None) -> str:
    path = kubeconfig or DEFAULT_KUBECONFIG
    files = [Path(part).expanduser() for part in path.split(":") if part]
    existing = [str(file) for file in files if file.is_file()]
    if not existing:
        raise CliError(
            f"there is no kubeconfig at {path}, so no cluster is known",
            "name one with --kubeconfig or KUBECONFIG, or start a cluster with `vlm demo`",
        )
    return ":".join(existing)


def _remedy(error: ClusterError) -> str:
    if error.status == 404:
        return "the CRDs are not installed: kubectl apply -f crds/"
    if error.status in (401, 403):
        return "your user lacks this right: kubectl auth whoami; kubectl auth can-i --list"
    return ""
