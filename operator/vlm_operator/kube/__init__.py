"""The `Cluster` and `Source` protocols over the dict-level client of `kubernetes.aio`, known here.

access.py   credentials, ours and those that other clients ask for
answers.py  what the API server says: objects, events of a watch, refusals as typed errors
client.py   every call                                                             KubeCluster

Typed models are not used: they drop fields newer than the client, and a list of pods costs the
event loop a second. Kinds come from `cluster.KINDS`, so nothing is discovered: start-up asks
nothing, and no cache file can be stale.
"""

from vlm_operator.kube.access import Connection, configuration, connection
from vlm_operator.kube.client import REQUEST_TIMEOUT_SECONDS, KubeCluster

__all__ = [
    "REQUEST_TIMEOUT_SECONDS",
    "Connection",
    "KubeCluster",
    "configuration",
    "connection",
]
