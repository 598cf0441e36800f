"""Implements `Cluster` and `Source` with `kubernetes.aio`; only this package imports that client.

access.py   credentials for this client and for others
answers.py  parses answers: objects, events of a watch, refusals as typed errors
client.py   every call                                                             KubeCluster

Objects are dicts. Typed models drop fields newer than the client, and parsing a list of pods into
them blocks the event loop for a second. Kinds come from `cluster.KINDS`, without API discovery: so
start-up sends no request for it, and no discovery cache can be stale.
"""

from vlm_operator.kube.access import Connection, chosen_context, configuration, connection
from vlm_operator.kube.client import REQUEST_TIMEOUT_SECONDS, KubeCluster

__all__ = [
    "REQUEST_TIMEOUT_SECONDS",
    "Connection",
    "KubeCluster",
    "chosen_context",
    "configuration",
    "connection",
]
