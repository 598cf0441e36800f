"""Loopback addresses for nodes and pods: one 127.x.0.0/16 per agent, claimed by listening in it.

127.x.0.n    node n, its kubelet API on port 10250          127.x.y.z    pods, y ≥ 1
"""

import errno
import itertools
import random
import socket
from collections.abc import Iterator

from vlm_local.errors import StartError

KUBELET_PORT = 10250
_NETWORKS = range(16, 256)


class Addresses:
    """The addresses of one agent. Two agents on a machine never share a network."""

    def __init__(self) -> None:
        networks = random.sample(_NETWORKS, len(_NETWORKS))
        for network in networks:
            try:
                self._claim = socket.create_server((f"127.{network}.0.1", KUBELET_PORT))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                break
        else:
            raise StartError("All 127.x.0.0/16 networks are in use.", "Stop other local clusters.")
        self._network = network
        self._pods = _cycle(network)

    def take_node_socket(self, index: int) -> socket.socket:
        """Return the listening socket of node `index`, counted from 0."""
        if index == 0:
            return self._claim
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
