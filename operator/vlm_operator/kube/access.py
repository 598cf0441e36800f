"""Where the API server is, and who we are."""

from __future__ import annotations

import dataclasses
from typing import Any

from kubernetes.aio import client as kube_client
from kubernetes.aio import config as kube_config

from vlm_operator.errors import ClusterError


@dataclasses.dataclass(frozen=True)
class Connection:
    """Where the API server is and who we are, for clients other than this one, as kopf's."""

    server: str
    ca_path: str | None
    insecure: bool
    token: str | None
    certificate_path: str | None
    private_key_path: str | None


async def configuration(kubeconfig: str | None, context: str | None = None) -> Any:
    """Load credentials: a kubeconfig where named, else the pod's ServiceAccount.

    `context` names one of the kubeconfig's; without it, the current one is taken.

    Raises:
        ClusterError: neither can be read; the message says which was tried.
    """
    loaded = kube_client.Configuration()
    try:
        if kubeconfig is not None:
            await kube_config.load_kube_config(
                kubeconfig, context=context, client_configuration=loaded
            )
        else:
            kube_config.load_incluster_config(client_configuration=loaded)
    except (kube_config.ConfigException, OSError) as error:
        tried = f"--kubeconfig={kubeconfig}" if kubeconfig else "the pod's ServiceAccount"
        raise ClusterError(401, "NoCredentials", f"{tried}: {error}") from error
    return loaded


async def connection(loaded: Any) -> Connection:
    """Tell another client how this one connects, with the token as it is now."""
    token = await loaded.get_api_key_with_prefix("BearerToken")
    return Connection(
        server=loaded.host,
        ca_path=loaded.ssl_ca_cert,
        insecure=not loaded.verify_ssl,
        token=token.removeprefix("Bearer ").removeprefix("bearer ") if token else None,
        certificate_path=loaded.cert_file,
        private_key_path=loaded.key_file,
    )
