"""Writes a condition on each VLMPool that a user created: no controller reads it.

The watch cache has all VLMPools regardless of labels, so a turn sends no read request. It writes
once per such pool and generation of its spec.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from vlm_operator.apply import apply_pool_status
from vlm_operator.cluster import VLM_POOL, Cluster
from vlm_operator.errors import ClusterError, UnavailableError
from vlm_operator.status.refused import unowned_status

logger = logging.getLogger(__name__)


class PoolLoop:
    """Writes the condition of every VLMPool that no VLMService controls.

    Args:
        cluster: cluster of the pools; the lease fences its writes.
        namespaces: watched namespaces; empty for all.
        clock: seconds since the epoch.
    """

    def __init__(
        self, cluster: Cluster, *, namespaces: Sequence[str], clock: Callable[[], float]
    ) -> None:
        self._cluster = cluster
        self._namespaces: Sequence[str | None] = tuple(namespaces) or (None,)
        self._clock = clock

    async def turn(self) -> None:
        """Write each status that differs; if one is refused, the others are still written.

        Raises:
            UnavailableError: the API server is unreachable.
            LeaseLostError: this process no longer leads.
        """
        for namespace in self._namespaces:
            for item in await self._cluster.list(VLM_POOL, namespace):
                wanted = unowned_status(item, now=self._clock())
                if wanted is None or wanted["conditions"] == item.get("status", {}).get(
                    "conditions"
                ):
                    continue
                try:
                    await apply_pool_status(self._cluster, item, status=wanted)
                except UnavailableError:
                    raise
                except ClusterError as error:
                    meta = item["metadata"]
                    pool = f"{meta['namespace']}/{meta['name']}"
                    logger.warning(
                        "status of VLMPool not written", extra={"pool": pool, "error": str(error)}
                    )
