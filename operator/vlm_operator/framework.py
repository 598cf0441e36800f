"""Configures kopf: its settings, its credentials, and the fencing of its writes."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
import kopf

from vlm_operator import names
from vlm_operator.backoff import Backoff
from vlm_operator.errors import LeaseLostError
from vlm_operator.kube import REQUEST_TIMEOUT_SECONDS, Connection


@dataclasses.dataclass(frozen=True)
class Watching:
    """Limits of kopf's watches, in whole seconds.

    Attributes:
        whole: after this time kopf lists and watches again, so that it finds missed changes.
        silence: maximum time without an event or a bookmark. The API server sends a bookmark every
            minute.
    """

    whole: int = 300
    silence: int = 70


async def configure(settings: kopf.OperatorSettings, memo: Any, **_: Any) -> None:
    """Set kopf's settings that differ from its defaults."""
    watching: Watching = memo.app.watching
    settings.persistence.finalizer = names.FINALIZER
    prefix = names.GROUP
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=prefix)
    settings.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=prefix)
    settings.persistence.consistency_timeout = 15
    settings.posting.enabled = False  # we write Events ourselves, with counts
    settings.peering.standalone = True  # the Lease elects the leader
    settings.scanning.disabled = True  # no rights on namespaces and CRDs are needed
    settings.networking.error_backoffs = Backoffs()
    settings.networking.connect_timeout = 5
    settings.networking.request_timeout = 30
    settings.watching.server_timeout = max(1, round(watching.whole))  # API servers take integers
    settings.watching.client_timeout = watching.whole + 30
    settings.watching.inactivity_timeout = watching.silence
    settings.background.cancellation_polling = 1


class Backoffs:
    """Endless exponential backoff with jitter: an API server may be unavailable for long."""

    def __iter__(self) -> Iterator[float]:
        """Yield seconds: about 1, 2, 4, 8, then about 15."""
        for failures in itertools.count(1):
            yield Backoff(longest=15.0).seconds(failures)


async def login(memo: Any, **_: Any) -> kopf.AiohttpSession:
    """Give kopf a connection; kopf calls it again if the API server refuses the token."""
    found: Connection = await memo.app.connect()
    info = kopf.ConnectionInfo(
        server=found.server,
        ca_path=found.ca_path,
        insecure=found.insecure,
        token=found.token,
        certificate_path=found.certificate_path,
        private_key_path=found.private_key_path,
    )
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=info.as_ssl_context()),
        headers=info.as_http_headers(),
        middlewares=(fence(memo.app.check),),
    )
    return kopf.AiohttpSession(server=found.server, aiohttp_session=session)


def fence(check: Callable[[], None]) -> aiohttp.ClientMiddlewareType:
    """Refuse kopf's writes (its finalizer) without the lease, as `leader.Fenced` does for ours.

    A refused write raises `aiohttp.ClientConnectionError`, which kopf retries. A write has a
    timeout, because `check` assumes that it ends within that time.

    Args:
        check: raises `LeaseLostError` if a write must not start.
    """

    async def pass_on(
        request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        if request.method == "GET":
            return await handler(request)
        try:
            check()
        except LeaseLostError as error:
            raise aiohttp.ClientConnectionError(str(error)) from error
        async with asyncio.timeout(REQUEST_TIMEOUT_SECONDS):
            return await handler(request)

    return pass_on
