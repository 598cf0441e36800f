"""Fetches the images of a request by URL, within limits of time and bytes.

    check_url ─▶ DNS ─▶ check_address ─▶ dial ─▶ 200? ─▶ bytes, counted while they arrive
        ▲                                          │
        └──────────────── redirect, if allowed ────┘

`socket_factory` sees each address that is dialled: that of a literal, too, for which aiohttp asks
no resolver. So it is the one place that decides. Nothing is cached between its decision and the
dial, so a name whose answers change gains nothing.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import aiohttp
import certifi
import yarl

from vlm_worker.gateway.api.errors import ApiError, invalid
from vlm_worker.gateway.api.parts import ImagePart
from vlm_worker.gateway.fair_slots import FairSlots
from vlm_worker.gateway.fetching.resolver import RESOLVE_SECONDS, TENANT, ThreadResolver
from vlm_worker.gateway.fetching.urls import (
    Media,
    Network,
    NotAllowedError,
    check_address,
    check_url,
    is_url,
)
from vlm_worker.gateway.memory import Bound

CONNECT_SECONDS: Final = 2.0
READ_SECONDS: Final = 5.0
TOTAL_SECONDS: Final = 10.0
PER_REQUEST: Final = 8
"""Images of one request that are fetched at once."""
PER_GATEWAY: Final = 64
"""Images that are fetched at once; one tenant has half of them, if several have keys."""
MAX_WAITING: Final = 256
"""Images of one tenant that wait to be fetched."""
_PIECE: Final = 64 * 1024
_HEADERS: Final = {
    "Accept": "image/png, image/jpeg, image/webp, image/gif",
    "Accept-Encoding": "identity",
    "User-Agent": "triptych",
}
OUTCOMES: Final = ("ok", "not_allowed", "too_large", "timeout", "failed", "cancelled")
_REDIRECTS: Final = frozenset((301, 302, 303, 307, 308))


class _NotPublicError(OSError):
    """An address must not be dialled; for aiohttp it is one that cannot be."""


class _FetchError(Exception):
    """The image could not be fetched. The message is fit for a client."""


class _TooLargeError(Exception):
    """The image has more bytes than allowed."""


class ImageFetcher:
    """The connections of a gateway to image servers. Opened at the first fetch.

    `on_end` is called with the outcome and the seconds of each fetch. `is_shared` says whether
    several tenants have keys. `resolver` and `context` are those of aiohttp; `context` decides
    which certificates are trusted.
    """

    def __init__(
        self,
        on_end: Callable[[str, float], None] = lambda *_: None,
        *,
        is_shared: Callable[[], bool] = lambda: False,
        resolver: aiohttp.abc.AbstractResolver | None = None,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self._on_end = on_end
        self._resolver = resolver or ThreadResolver(is_shared)
        self._context = context
        self._sessions: dict[tuple[Network, ...], aiohttp.ClientSession] = {}
        self._slots = FairSlots(
            PER_GATEWAY,
            max_waiting=MAX_WAITING,
            bound=Bound.TENANT_FETCHES,
            what="fetches of images",
            is_shared=is_shared,
        )

    async def close(self) -> None:
        """Close all connections."""
        for session in self._sessions.values():
            await session.close()
        self._sessions.clear()
        await self._resolver.close()

    async def fetch(
        self,
        parts: Sequence[ImagePart],
        media: Media,
        *,
        tenant: str,
        max_bytes: int,
        hold: Callable[[int], None],
    ) -> Mapping[int, bytearray]:
        """Fetch the parts with an http or https URL; return their bytes by position in `parts`.

        Tenants take turns. `hold` is called with a number of bytes before they are kept.

        Raises:
            ApiError: 400 with the path of the part. Nothing is fetched if one URL is not allowed.
            FullError: from `hold`, or too many fetches of the tenant wait.
        """
        TENANT.set(tenant)
        urls = {i: _allowed(part, media) for i, part in enumerate(parts) if is_url(part.url)}
        slots = asyncio.Semaphore(PER_REQUEST)
        found: dict[int, bytearray] = {}

        async def one(index: int, url: yarl.URL) -> None:
            async with slots, self._slots.slot(tenant):
                found[index] = await self._one(
                    parts[index], url, media, max_bytes=max_bytes, hold=hold
                )

        try:
            async with asyncio.TaskGroup() as group:
                for index, url in urls.items():
                    group.create_task(one(index, url))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return found

    async def _one(
        self,
        part: ImagePart,
        url: yarl.URL,
        media: Media,
        *,
        max_bytes: int,
        hold: Callable[[int], None],
    ) -> bytearray:
        started, outcome, param = time.monotonic(), "cancelled", f"{part.path}.url"
        try:
            async with asyncio.timeout(TOTAL_SECONDS):
                data = await self._get(url, media, max_bytes, hold)
            outcome = "ok"
            return data
        except NotAllowedError as error:
            outcome = "not_allowed"
            raise _not_allowed(str(error), param) from error
        except aiohttp.InvalidURL as error:  # a host that libc would take for an address, as 0x7f.1
            outcome = "not_allowed"
            raise _not_allowed("The URL has no valid host", param) from error
        except aiohttp.ClientConnectorError as error:
            outcome = "timeout" if isinstance(error.os_error, TimeoutError) else "failed"
            if isinstance(error.os_error, _NotPublicError):
                outcome = "not_allowed"
                raise _not_allowed(str(error.os_error.strerror), param) from error
            raise _failed(_reason(error), param) from error
        except _TooLargeError as error:
            outcome = "too_large"
            raise invalid(
                f"The image has more than {max_bytes} bytes: use a smaller one.",
                param=part.path,
                code="image_too_large",
            ) from error
        except (_FetchError, aiohttp.ClientError, OSError, ValueError) as error:
            outcome = "timeout" if isinstance(error, TimeoutError) else "failed"
            raise _failed(_reason(error), param) from error
        finally:
            self._on_end(outcome, time.monotonic() - started)

    async def _get(
        self, url: yarl.URL, media: Media, max_bytes: int, hold: Callable[[int], None]
    ) -> bytearray:
        session = self._session(media.networks)
        for _ in range(media.max_redirects + 1):
            async with session.get(url, allow_redirects=False) as reply:
                if reply.status in _REDIRECTS:
                    url = _target(url, reply.headers.get("Location", ""), media)
                    continue
                return await _body(reply, max_bytes, hold)
        if media.max_redirects:
            raise _FetchError(f"it is behind more than {media.max_redirects} redirects")
        raise _FetchError("its server redirects, and this service follows no redirect")

    def _session(self, networks: tuple[Network, ...]) -> aiohttp.ClientSession:
        """Return the session for `networks`; those of earlier settings stay until `close`."""
        session = self._sessions.get(networks)
        if session is None:
            connector = aiohttp.TCPConnector(
                limit=PER_GATEWAY,
                use_dns_cache=False,
                resolver=self._resolver,
                ssl=self._context or ssl_context(),
                socket_factory=lambda info: dial_only_allowed(info, networks),
            )
            session = self._sessions[networks] = aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
                auto_decompress=False,
                headers=_HEADERS,
                timeout=aiohttp.ClientTimeout(sock_connect=CONNECT_SECONDS, sock_read=READ_SECONDS),
            )
        return session


def dial_only_allowed(info: Any, networks: Sequence[Network]) -> socket.socket:
    """Return a socket for an address of `getaddrinfo`.

    Raises:
        OSError: the address is not allowed; no packet is sent.
    """
    family, kind, protocol, _, address = info
    try:
        check_address(address[0], networks)
    except NotAllowedError as error:
        raise _NotPublicError(errno.EPERM, str(error)) from error
    made = socket.socket(family, kind, protocol)
    made.setblocking(False)
    return made


def ssl_context() -> ssl.SSLContext:
    """Return a context that trusts the file of SSL_CERT_FILE, else certifi's authorities."""
    return ssl.create_default_context(
        cafile=ssl.get_default_verify_paths().cafile or certifi.where()
    )


async def _body(
    reply: aiohttp.ClientResponse, max_bytes: int, hold: Callable[[int], None]
) -> bytearray:
    """Read an image.

    Raises:
        _FetchError: the answer is not an image as it is.
        _TooLargeError: more than `max_bytes`; what follows is not read.
    """
    if reply.status != 200:
        raise _FetchError(f"its server answers {reply.status}")
    if reply.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise _FetchError("its server compresses it, although the request refuses that")
    announced = reply.content_length or 0
    if announced > max_bytes:
        raise _TooLargeError
    hold(announced)
    data = bytearray()
    async for piece in reply.content.iter_chunked(_PIECE):
        if len(data) + len(piece) > max_bytes:
            raise _TooLargeError
        hold(max(0, len(data) + len(piece) - max(announced, len(data))))
        data += piece
    return data


def _target(url: yarl.URL, location: str, media: Media) -> yarl.URL:
    """Return where a redirect leads, checked like the first URL."""
    try:
        target = url.join(yarl.URL(location))
    except ValueError as error:
        raise _FetchError("its server redirects to a malformed URL") from error
    return check_url(str(target), media)


def _allowed(part: ImagePart, media: Media) -> yarl.URL:
    try:
        return check_url(part.url, media)
    except NotAllowedError as error:
        raise _not_allowed(str(error), f"{part.path}.url") from error


def _not_allowed(sentence: str, param: str) -> ApiError:
    return invalid(f"{sentence}.", param=param, code="image_url_not_allowed")


def _reason(error: Exception) -> str:
    """Describe a failure without what only the gateway's network knows."""
    if isinstance(error, _FetchError):
        return str(error)
    if isinstance(error, TimeoutError):
        return (
            f"its server takes more than {CONNECT_SECONDS:g} s to connect, {READ_SECONDS:g} s "
            f"between bytes, or {TOTAL_SECONDS:g} s in all"
        )
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        if isinstance(error.os_error, TimeoutError):
            return f"its host takes more than {RESOLVE_SECONDS:g} s to resolve"
        return "its host has no address"
    if isinstance(error, aiohttp.ClientConnectorCertificateError | aiohttp.ClientConnectorSSLError):
        return "the TLS certificate of its server is not valid"
    if isinstance(error, aiohttp.ClientConnectorError):
        return "its server does not accept connections"
    return "its server broke off the answer"


def _failed(reason: str, param: str) -> ApiError:
    return invalid(
        f"The image could not be fetched: {reason}. Send a data: URL, or try again.",
        param=param,
        code="image_fetch_failed",
    )
