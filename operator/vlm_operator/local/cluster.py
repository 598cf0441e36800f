"""A whole local cluster: the control plane, and an agent with nodes that run pods as processes."""

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
from .spawn import Child, spawn
from .waiting import until

NODES_READY_SECONDS = 30
STOP_SECONDS = 10
INTERPRETER = sys.executable
IMAGES: Mapping[str, Sequence[str]] = {
    "triptych/worker": (INTERPRETER, "-P", "-m", "vlm_worker"),
    "triptych/operator": (INTERPRETER, "-P", "-m", "vlm_operator"),
    "python": (INTERPRETER,),
}


class NodeAgent:
    """The agent as a process beside a control plane; an async context manager.

    Args:
        control_plane: A started one.
        node_types: What nodes to register.
        images: What image names stand for.
        backoff: Between restarts of containers.
        settings: The environment's, if not given.
        name: Tells it from other agents of the same control plane.
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
        """Start it."""
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Stop it."""
        self.stop()

    @property
    def nodes(self) -> list[str]:
        """The names of its nodes."""
        return [name for node_type in self._node_types for name in node_type.nodes]

    @property
    def log(self) -> Path:
        """What the agent prints."""
        return self._control_plane.folder / f"{self._name}.log"

    @property
    def limits_missing(self) -> bool:
        """Whether the agent found no way to enforce CPU and memory limits."""
        return "limits are not enforced" in self.log.read_text()

    async def start(self) -> None:
        """Start it and return when all its nodes are Ready.

        Raises:
            StartError: It ended, or a node is not Ready in time.
        """
        folder = self._control_plane.folder
        config = AgentConfig(
            server=self._control_plane.server,
            version=build.KUBERNETES_VERSION,
            pki=folder / "pki",
            folder=folder / "pods" / self._name,
            node_types=self._node_types,
            images=self._images,
            environment=container_environment(
                self._settings.environment, self._control_plane.server
            ),
            backoff=self._backoff,
        )
        command = [INTERPRETER, "-P", "-m", "vlm_operator.local.agent"]
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
        """End it, and with it every pod's processes."""
        if self._child is not None:
            self._child.stop(grace_seconds=STOP_SECONDS)
            self._child = None

    async def _wait_until_ready(self) -> None:
        wanted = set(self.nodes)
        child = self._child
        assert child is not None

        async def all_ready() -> bool:
            child.require_running()
            nodes = (await api.get("/api/v1/nodes"))["items"]
            return wanted <= {node["metadata"]["name"] for node in nodes if _takes_pods(node)}

        async with self._control_plane.client() as api:
            awaited = f"nodes {', '.join(sorted(wanted))} to be Ready"
            try:
                await until(all_ready, seconds=NODES_READY_SECONDS, awaited=awaited)
            except TimeoutError as error:
                raise StartError(str(error), f"The agent's log is {self.log}.") from error


def container_environment(inherited: Mapping[str, str], server: str) -> dict[str, str]:
    """Return what every container finds: where programs and the API server are, and little else."""
    host, _, port = server.removeprefix("https://").rpartition(":")
    kept = {name: inherited[name] for name in ("HOME", "LANG", "TZ") if name in inherited}
    path = f"{Path(INTERPRETER).parent}:{inherited.get('PATH', '/usr/local/bin:/usr/bin:/bin')}"
    return {
        "LANG": "C.UTF-8",
        **kept,
        "PATH": path,
        "KUBERNETES_SERVICE_HOST": host,
        "KUBERNETES_SERVICE_PORT": port,
        "KUBERNETES_SERVICE_PORT_HTTPS": port,
        "KUBERNETES_PORT": f"tcp://{host}:{port}",
    }


def _takes_pods(node: Mapping[str, Any]) -> bool:
    """Whether pods can be bound to it: it says so, and the controllers have believed it."""
    taints = {taint["key"] for taint in node["spec"].get("taints") or []}
    return is_ready(node) and "node.kubernetes.io/not-ready" not in taints
