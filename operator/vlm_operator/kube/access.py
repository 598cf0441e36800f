"""Loads the address of the API server and the credentials for it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import yaml
from kubernetes.aio import client as kube_client
from kubernetes.aio import config as kube_config

from vlm_operator.errors import ClusterError


@dataclasses.dataclass(frozen=True)
class Connection:
    """Address and credentials of the API server, for other clients such as kopf's.

    Attributes:
        token: bearer token without the prefix "Bearer ".
    """

    server: str
    ca_path: str | None
    insecure: bool
    token: str | None
    certificate_path: str | None
    private_key_path: str | None


async def configuration(kubeconfig: str | None, context: str | None = None) -> Any:
    """Load credentials from `kubeconfig`, or from the pod's ServiceAccount if it is None.

    `context` names a context of the kubeconfig; None means the current one.

    Raises:
        ClusterError: the credentials cannot be read; the message names their source.
    """
    loaded = kube_client.Configuration()
    try:
        if kubeconfig is not None:
            name, _ = chosen_context(kubeconfig, context)
            await kube_config.load_kube_config(
                kubeconfig, context=name, client_configuration=loaded
            )
        else:
            kube_config.load_incluster_config(client_configuration=loaded)
    except (kube_config.ConfigException, OSError) as error:
        tried = f"--kubeconfig={kubeconfig}" if kubeconfig else "the pod's ServiceAccount"
        raise ClusterError(401, "NoCredentials", f"{tried}: {error}") from error
    return loaded


def chosen_context(kubeconfig: str, context: str | None = None) -> tuple[str | None, str]:
    """Return the name and the namespace of the context that kubectl would use.

    Args:
        kubeconfig: paths of one or more files, separated by colons. The first file with a current
            context decides.
        context: name of the context; None means the current one.

    Raises:
        ClusterError: a file cannot be read, or is not a kubeconfig.
    """
    configs = [_read(path) for path in kubeconfig.split(":")]
    current = (config["current-context"] for config in configs if config.get("current-context"))
    name = context or next(current, None)
    for config in configs:
        for entry in config.get("contexts") or []:
            if entry.get("name") == name:
                return name, str(entry.get("context", {}).get("namespace") or "default")
    return name, "default"


def _read(path: str) -> dict[str, Any]:
    try:
        config = yaml.safe_load(Path(path).expanduser().read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ClusterError(401, "NoCredentials", f"--kubeconfig={path}: {error}") from error
    if not isinstance(config, dict):
        raise ClusterError(401, "NoCredentials", f"--kubeconfig={path}: not a kubeconfig")
    return config


async def connection(loaded: Any) -> Connection:
    """Return the connection data of this client, with its present token."""
    token = await loaded.get_api_key_with_prefix("BearerToken")
    return Connection(
        server=loaded.host,
        ca_path=loaded.ssl_ca_cert,
        insecure=not loaded.verify_ssl,
        token=token.removeprefix("Bearer ").removeprefix("bearer ") if token else None,
        certificate_path=loaded.cert_file,
        private_key_path=loaded.key_file,
    )
