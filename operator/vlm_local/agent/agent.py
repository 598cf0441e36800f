"""The agent: all simulated nodes of one cluster, in one process."""

import asyncio
import dataclasses
import errno
import itertools
import json
import logging
import random
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp

from vlm_local.client import Access, Client, Object
from vlm_local.errors import StartError
from vlm_local.pki import Authority

from .cgroups import Cgroups
from .command import Facts, Images
from .container import Backoff
from .kubelet_api import KubeletApi, server_context
from .node import Node, Runner
from .nodes import NodeType
from .pod import Pod
from .process import no_identities
from .runs import Machine
from .script import ScriptedPod
from .storage import Storage

logger = logging.getLogger(__name__)
KUBELET_PORT = 10250
_NETWORKS = range(16, 256)

SHARED_NETWORK = (
    "pods share this machine's network namespace, as on no real cluster: "
    "--bind=:: becomes --bind=<address of the pod>"
)


@dataclasses.dataclass(frozen=True)
class AgentConfig:
    """The configuration of an agent, passed to its process as JSON.

    Attributes:
        server: URL of the API server.
        version: version of Kubernetes, which the nodes report as their own.
        pki: folder of the cluster's CA.
        folder: folder for the files of pods. The caller removes it.
        volumes: folder for the volumes of claims. They outlive the agent.
        images: command of each image name.
        environment: environment of every container.
    """

    server: str
    version: str
    pki: Path
    folder: Path
    volumes: Path
    node_types: Sequence[NodeType]
    images: Images
    environment: Mapping[str, str]
    backoff: Backoff

    def write(self, path: Path) -> Path:
        path.write_text(json.dumps(dataclasses.asdict(self), default=str))
        return path

    @classmethod
    def read(cls, path: Path) -> "AgentConfig":
        fields = json.loads(path.read_text())
        types = [
            NodeType(**{**one, "taints": tuple(one["taints"])}) for one in fields["node_types"]
        ]
        places = {name: Path(fields[name]) for name in ("pki", "folder", "volumes")}
        backoff = Backoff(**fields["backoff"])
        return cls(**{**fields, **places, "node_types": types, "backoff": backoff})


class Agent:
    """Runs the nodes of a config until cancelled."""

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self._addresses = Addresses()
        self._cgroups = Cgroups()
        self._no_identities = no_identities()
        self._nodes: list[Node] = []
        self._machine: Machine | None = None
        self._storage: Storage | None = None

    async def run(self) -> None:
        """Register the nodes and run the pods that are bound to them, until cancelled."""
        if self._cgroups.problem:
            logger.warning(self._cgroups.problem)
        logger.info(SHARED_NETWORK)
        if self._no_identities:
            logger.warning("containers run as root: %s", self._no_identities)
        try:
            async with AsyncExitStack() as stack:
                self._machine = Machine(
                    images=self._config.images,
                    environment=self._config.environment,
                    backoff=self._config.backoff,
                    folder=self._config.folder,
                    cgroups=self._cgroups,
                    identities=not self._no_identities,
                    http=await stack.enter_async_context(aiohttp.ClientSession()),
                )
                await self._serve(stack)
                async with asyncio.TaskGroup() as group:
                    for node in self._nodes:
                        group.create_task(node.run())
                    if self._storage is not None:
                        group.create_task(self._storage.run())
        finally:
            self._cgroups.close()

    async def _serve(self, stack: AsyncExitStack) -> None:
        """Create the nodes and open their kubelet endpoints."""
        authority = Authority(self._config.pki, self._config.environment)
        wanted = [(kind, name) for kind in self._config.node_types for name in kind.nodes]
        real = [index for index, (kind, _) in enumerate(wanted) if not kind.status_only]
        pair = authority.issue(
            "triptych-nodes", addresses=[self._addresses.node(index) for index in real or [0]]
        )
        sockets = [self._addresses.node_socket(index) for index in real]
        api = KubeletApi(self._find_pod)
        await stack.enter_async_context(api.serve(sockets, server_context(authority, pair)))
        if real:  # nodes without processes mount nothing
            client = self._client(authority, "triptych-storage", group="system:masters")
            volumes = await stack.enter_async_context(client)
            self._storage = Storage(volumes, self._config.volumes)
        for index, (node_type, name) in enumerate(wanted):
            user = f"system:node:{name}"
            client = await stack.enter_async_context(
                self._client(authority, user, group="system:nodes")
            )
            node = Node(
                name,
                node_type,
                client=client,
                address=self._addresses.node(index),
                port=KUBELET_PORT,
                version=self._config.version,
                make_runner=self._make_runner,
            )
            self._nodes.append(node)

    def _client(self, authority: Authority, user: str, *, group: str) -> Client:
        """Return a client with an own identity; a node's may read only what its pods need."""
        pair = authority.issue(user, groups=[group])
        return Client(
            Access(
                self._config.server,
                authority.certificate,
                pair.certificate.read_text(),
                pair.key.read_text(),
            )
        )

    def _make_runner(self, node: Node, pod: Object) -> Runner:
        facts = Facts(self._addresses.pod(), node.address, node.name)
        if node.node_type.status_only:
            return ScriptedPod(pod, client=node.client, pod_ip=facts.pod_ip, host_ip=facts.host_ip)
        assert self._machine is not None
        return Pod(pod, facts, self._machine, client=node.client, recorder=node.recorder)

    def _find_pod(self, namespace: str, name: str) -> Pod | None:
        for runner in (one for node in self._nodes for one in node.runners.values()):
            if isinstance(runner, Pod):
                metadata = runner.pod["metadata"]
                if (metadata["namespace"], metadata["name"]) == (namespace, name):
                    return runner
        return None


class Addresses:
    """Loopback addresses of one agent: a 127.x.0.0/16 in which no other agent listens.

    127.x.0.n    node n, its kubelet API on port 10250          127.x.y.z    pods, y ≥ 1
    """

    def __init__(self) -> None:
        networks = random.sample(_NETWORKS, len(_NETWORKS))
        for network in networks:
            try:
                self._first_socket = socket.create_server((f"127.{network}.0.1", KUBELET_PORT))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                break
        else:
            raise StartError("All 127.x.0.0/16 networks are in use.", "Stop other local clusters.")
        self._network = network
        self._pods = _cycle(network)

    def node_socket(self, index: int) -> socket.socket:
        """Return the listening socket of node `index`, counted from 0."""
        if index == 0:
            return self._first_socket
        return socket.create_server((self.node(index), KUBELET_PORT))

    def node(self, index: int) -> str:
        """Return the address of node `index`. Nodes from 254 on have no server, and share one."""
        return f"127.{self._network}.0.{min(index + 1, 254)}"

    def pod(self) -> str:
        """Return the address of the next pod. An address is reused after 64,000 others."""
        return next(self._pods)


def _cycle(network: int) -> Iterator[str]:
    pairs = itertools.product(range(1, 255), range(1, 255))
    return itertools.cycle(f"127.{network}.{high}.{low}" for high, low in pairs)
