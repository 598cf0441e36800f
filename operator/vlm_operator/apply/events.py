"""Posts one Event per transition; if it recurs, the count of that Event grows."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable
from typing import Any

from vlm_operator import names
from vlm_operator.cluster import EVENT, VLM_SERVICE, Cluster, Manifest, timestamp
from vlm_operator.errors import ClusterError, UnavailableError
from vlm_operator.metrics import WRITES
from vlm_operator.status.events import Event


async def post_events(
    cluster: Cluster,
    events: Iterable[Event],
    *,
    namespace: str,
    name: str,
    uid: str,
    now: float,
) -> None:
    """Write Events about one VLMService. Refused ones are dropped: the status has the state.

    `now` is in seconds since the epoch. If the API server is unavailable, the rest is dropped.
    """
    moment = timestamp(now)
    for event in events:
        text = f"{uid}/{event.reason}/{event.message}"
        title = f"{name}.{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        with contextlib.suppress(ClusterError):
            live = await cluster.get(EVENT, namespace, title)
            about = {"namespace": namespace, "name": name, "uid": uid}
            manifest = _manifest(event, title, about, moment, live)
            try:
                await cluster.apply(manifest, manager=names.MANAGER)
                WRITES.labels(kind=EVENT.kind, verb="apply").inc()
            except UnavailableError:
                return


def _manifest(
    event: Event, title: str, about: dict[str, str], moment: str, live: Manifest | None
) -> Manifest:
    first: Any = moment if live is None else live.get("firstTimestamp", moment)
    return {
        "apiVersion": EVENT.api_version,
        "kind": EVENT.kind,
        "metadata": {"name": title, "namespace": about["namespace"]},
        "involvedObject": {
            "apiVersion": VLM_SERVICE.api_version,
            "kind": VLM_SERVICE.kind,
            **about,
        },
        "type": "Warning" if event.warning else "Normal",
        "reason": event.reason,
        "message": event.message,
        "source": {"component": names.MANAGER},
        "firstTimestamp": first,
        "lastTimestamp": moment,
        "count": 1 if live is None else int(live.get("count", 0)) + 1,
    }
