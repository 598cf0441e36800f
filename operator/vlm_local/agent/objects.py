"""Paths of Pod objects, and their deletion by the node."""

import asyncio
import logging

from vlm_local.client import ApiError, Client, Object

logger = logging.getLogger(__name__)
RETRY_SECONDS = 0.2


def path_of(pod: Object) -> str:
    """Return the path of a pod."""
    metadata = pod["metadata"]
    return f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"


async def delete_ended(client: Client, pod: Object) -> None:
    """Delete the object of a pod that has ended, but not a newer one of the same name."""
    body = {"gracePeriodSeconds": 0, "preconditions": {"uid": pod["metadata"]["uid"]}}
    while True:
        try:
            await client.delete(path_of(pod), body)
        except ApiError as error:
            if error.status in (404, 409):
                return
            logger.info("pod not deleted", extra={"pod": path_of(pod), "error": str(error)})
            await asyncio.sleep(RETRY_SECONDS)
        else:
            return
