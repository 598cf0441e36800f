"""How kopf itself behaves: its settings, its credentials, and when it may write."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
import kopf

from vlm_operator import names, pauses
from vlm_operator.errors import LeaseLostError
from vlm_operator.kube import REQUEST_TIMEOUT_SECONDS, Connection


@dataclasses.dataclass(frozen=True)
class Watching:
    """How long kopf believes in a watch, in whole seconds.

    Attributes:
        whole: then it lists and watches anew: what an event did not tell is seen by then.
        silence: without an event or a bookmark, of which there is one a minute.
    """

    whole: int = 300
    silence: int = 70


async def configure(settings: kopf.OperatorSettings, memo: Any, **_: Any) -> None:
    """Settle how kopf itself behaves; each line answers a known trap."""
    watching: Watching = memo.app.watching
    settings.persistence.finalizer = names.FINALIZER
    prefix = names.GROUP
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=prefix)
    settings.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=prefix)
    settings.persistence.consistency_timeout = 15
    settings.posting.enabled = False  # our own Events are counted, kopf's are not
    settings.peering.standalone = True  # the Lease elects
    settings.scanning.disabled = True  # no rights on namespaces and CRDs are needed
    settings.networking.error_backoffs = Backoffs()
    settings.networking.connect_timeout = 5
    settings.networking.request_timeout = 30
    settings.watching.server_timeout = max(1, round(watching.whole))  # API servers take integers
    settings.watching.client_timeout = watching.whole + 30
    settings.watching.inactivity_timeout = watching.silence
    settings.background.cancellation_polling = 1


class Backoffs:
    """Growing pauses without an end, jittered: an API server may be away for long."""

    def __iter__(self) -> Iterator[float]:
        """Yield seconds: 1, 2, 4, 8, then about 15 for ever."""
        for failures in itertools.count(1):
            yield pauses.growing(failures, longest=15.0)


async def login(memo: Any, **_: Any) -> kopf.AiohttpSession:
    """Tell kopf how to connect, anew whenever its token is refused."""
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
    """Hold kopf's own writes back, its finalizer's, as `leader.Fenced` does ours.

    Args:
        check: raises `LeaseLostError` where a write must not start. To kopf that is a connection
            that failed, which it tries again; a write ends within the time that `check` counts on.
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
