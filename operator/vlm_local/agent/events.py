"""Events of pods as a kubelet writes them. Equal events are counted in one object."""

import hashlib
import logging
import time
from collections.abc import Mapping
from typing import Any

from vlm_local.client import ApiError, Client, Object
from vlm_operator.cluster import timestamp

logger = logging.getLogger(__name__)


class Recorder:
    """Writes events of one node; an event that cannot be written is logged and dropped."""

    def __init__(self, client: Client, node: str) -> None:
        self._client = client
        self._node = node
        self._counts: dict[str, int] = {}

    async def record(
        self, pod: Mapping[str, Any], reason: str, message: str, *, warning: bool = False
    ) -> None:
        """Write an event about `pod`, or increment the count of an equal one."""
        metadata = pod["metadata"]
        seed = "\n".join([metadata["uid"], reason, message])
        name = f"{metadata['name']}.{hashlib.sha256(seed.encode()).hexdigest()[:16]}"
        count = self._counts[name] = self._counts.get(name, 0) + 1
        now = timestamp(time.time())
        path = f"/api/v1/namespaces/{metadata['namespace']}/events"
        try:
            if count == 1:
                await self._client.create(
                    path, self._event(pod, name, reason, message, now, warning)
                )
            else:
                await self._client.patch(f"{path}/{name}", {"count": count, "lastTimestamp": now})
        except ApiError as error:
            logger.info("event not written", extra={"reason": reason, "error": str(error)})

    def _event(
        self, pod: Mapping[str, Any], name: str, reason: str, message: str, now: str, warning: bool
    ) -> Object:
        metadata = pod["metadata"]
        return {
            "metadata": {"name": name, "namespace": metadata["namespace"]},
            "involvedObject": {
                "apiVersion": "v1",
                "kind": "Pod",
                "name": metadata["name"],
                "namespace": metadata["namespace"],
                "uid": metadata["uid"],
            },
            "type": "Warning" if warning else "Normal",
            "reason": reason,
            "message": message[:1024],
            "source": {"component": "kubelet", "host": self._node},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
