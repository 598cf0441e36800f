"""Checks what the demo needs on this machine, before anything starts."""

from __future__ import annotations

import importlib.util
import socket
import sys
from pathlib import Path

from vlm_local import build, pki
from vlm_local.agent.process import SANDBOX
from vlm_local.errors import LocalError, PortTakenError, ToolMissingError
from vlm_local.settings import LocalSettings
from vlm_local.subprocesses import output_of

CHECKOUT = Path(__file__).parents[3]
PREFERRED_PORT = 8000


def check_machine(settings: LocalSettings) -> None:
    """Check what a local cluster needs.

    Raises:
        LocalError: names the first missing requirement, and how to get it.
    """
    if not sys.platform.startswith("linux"):
        raise LocalError(
            f"A local cluster needs Linux (namespaces); this is {sys.platform}.",
            "Use a Linux machine, or a cluster that exists: --kubeconfig FILE.",
        )
    for module, extra in (("vlm_worker", "worker"), ("torch", "worker"), ("grpc", "worker")):
        if importlib.util.find_spec(module) is None:
            raise ToolMissingError(
                f"The worker's package {module} is not installed; pods run it as processes.",
                f"make env, or pip install -e '.[operator,cli,{extra}]'",
            )
    pki.find_openssl(settings.environment)
    if not build.is_built(settings):
        build.check_go(settings.environment)
    problem = output_of([sys.executable, "-I", "-S", SANDBOX, "--check"]).strip()
    if problem:
        raise LocalError(
            f"Containers cannot be made here: {problem}.",
            "Run as root, or allow user namespaces: sysctl -w user.max_user_namespaces=15000 "
            "kernel.apparmor_restrict_unprivileged_userns=0",
        )


def check_checkout() -> None:
    """Check that this package is in a checkout with the manifests and the model.

    Raises:
        LocalError: a file is missing.
    """
    for path in ("install.yaml", "examples/quickstart", "examples/shapes/model/config.json"):
        if not (CHECKOUT / path).exists():
            raise LocalError(
                f"{CHECKOUT / path} is missing.",
                "The demo runs from a checkout of the repository: pip install -e .",
            )


def choose_port(requested: int | None) -> int:
    """Return the requested local port of the API; else 8000 or, if that is in use, any free one.

    Raises:
        PortTakenError: the requested port is in use.
    """
    for port in (requested if requested is not None else PREFERRED_PORT, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                if requested is not None:
                    raise PortTakenError(
                        f"Port {port} on 127.0.0.1 is taken.",
                        f"Choose another with --port, or see its user: ss -ltnp 'sport = :{port}'",
                    ) from error
            else:
                return int(probe.getsockname()[1])
    raise PortTakenError("No port on 127.0.0.1 is free.", "Close programs that listen.")
