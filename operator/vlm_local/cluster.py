"""Runs the node agent beside a control plane: its nodes run pods as processes."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import build
from .agent.agent import AgentConfig
from .agent.container import Backoff
from .agent.nodes import DEMO_NODE_TYPES, NodeType, is_ready
from .controlplane import ControlPlane
from .errors import StartError
from .settings import LocalSettings
from .subprocesses import Child, spawn
from .waiting import until

NODES_READY_SECONDS = 30
STOP_SECONDS = 10
INTERPRETER = sys.executable
IMAGES: Mapping[str, Sequence[str]] = {
    "triptych/worker": (INTERPRETER, "-P", "-m", "vlm_worker"),
    "triptych/gateway": (INTERPRETER, "-P", "-m", "vlm_worker"),
    "triptych/operator": (INTERPRETER, "-P", "-m", "vlm_operator"),
    "python": (INTERPRETER,),
}


class NodeAgent:
    """The agent as a process beside a started control plane; an async context manager.

    Args:
        images: command of each image name.
        settings: None means those of the environment.
        name: identifies the agent among those of the same control plane.
    """

    def __init__(
        self,
        control_plane: ControlPlane,
        *,
        node_types: Sequence[NodeType] = DEMO_NODE_TYPES,
        images: Mapping[str, Sequence[str]] = IMAGES,
        backoff: Backoff | None = None,
        settings: LocalSettings | None = None,
        name: str = "agent",
    ) -> None:
        self._control_plane = control_plane
        self._name = name
        self._node_types = node_types
        self._images = images
        self._backoff = backoff or Backoff()
        self._settings = settings or LocalSettings.read()
        self._child: Child | None = None

    async def __aenter__(self) -> "NodeAgent":
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.stop()

    @property
    def nodes(self) -> list[str]:
        return [name for node_type in self._node_types for name in node_type.nodes]

    @property
    def log(self) -> Path:
        """File with the agent's output."""
        return self._control_plane.folder / f"{self._name}.log"

    @property
    def limits_missing(self) -> bool:
        """Whether the agent cannot enforce CPU and memory limits."""
        return "limits are not enforced" in self.log.read_text()

    async def start(self) -> None:
        """Start the agent and wait until all its nodes are Ready.

        Raises:
            StartError: the agent ended, or a node is not Ready in time.
        """
        folder = self._control_plane.folder
        config = AgentConfig(
            server=self._control_plane.server,
            version=build.KUBERNETES_VERSION,
            pki=folder / "pki",
            folder=folder / "pods" / self._name,
            volumes=folder / "volumes",
            node_types=self._node_types,
            images=self._images,
            environment=container_environment(
                self._settings.environment, self._control_plane.server
            ),
            backoff=self._backoff,
        )
        command = [INTERPRETER, "-P", "-m", "vlm_local.agent"]
        self._child = spawn(
            "node agent",
            [*command, config.write(folder / f"{self._name}.json")],
            log=self.log,
            environment=self._settings.environment,
        )
        try:
            await self._wait_until_ready()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop the agent, which ends the processes of all its pods."""
        if self._child is not None:
            self._child.stop(grace_seconds=STOP_SECONDS)
            self._child = None

    async def _wait_until_ready(self) -> None:
        child = self._child
        assert child is not None

        async def all_ready() -> bool:
            child.require_running()
            nodes = (await api.get("/api/v1/nodes"))["items"]
            ready = {node["metadata"]["name"] for node in nodes if _accepts_pods(node)}
            return ready.issuperset(self.nodes)

        async with self._control_plane.client() as api:
            awaited = f"nodes {', '.join(sorted(self.nodes))} to be Ready"
            try:
                await until(all_ready, seconds=NODES_READY_SECONDS, awaited=awaited)
            except TimeoutError as error:
                raise StartError(str(error), f"The agent's log is {self.log}.") from error


def container_environment(inherited: Mapping[str, str], server: str) -> dict[str, str]:
    """Return the environment of every container: PATH, locale, and the API server's address."""
    host, _, port = server.removeprefix("https://").rpartition(":")
    passed = {name: inherited[name] for name in ("HOME", "LANG", "TZ") if name in inherited}
    path = f"{Path(INTERPRETER).parent}:{inherited.get('PATH', '/usr/local/bin:/usr/bin:/bin')}"
    return {
        "LANG": "C.UTF-8",
        **passed,
        "PATH": path,
        "KUBERNETES_SERVICE_HOST": host,
        "KUBERNETES_SERVICE_PORT": port,
        "KUBERNETES_SERVICE_PORT_HTTPS": port,
        "KUBERNETES_PORT": f"tcp://{host}:{port}",
    }


def _accepts_pods(node: Mapping[str, Any]) -> bool:
    """Whether pods can be bound to a node: it is Ready, without the taint `not-ready`."""
    taints = {taint["key"] for taint in node["spec"].get("taints") or []}
    return is_ready(node) and "node.kubernetes.io/not-ready" not in taints
