"""Which pods there are, from the API server: list once, then watch, for ever.

    list ─▶ watch ─▶ events ─▶ all pods known now ─▶ on_pods
      ▲       │ 410, or it ends oddly
      └───────┘ with a back-off; meanwhile the last good pods stay, for 60 s

The only place in the worker that talks to Kubernetes; two requests, so no client library.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import random
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from vlm_worker.gateway.pods import SERVICE_LABEL, KnownPod, known_pod

logger = logging.getLogger(__name__)

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
WATCH_SECONDS = 300
LIST_TIMEOUT_SECONDS = 10.0
# A watch that says nothing for longer than the server may keep it open is dead.
SILENCE_SECONDS = WATCH_SECONDS + 15.0
KEEP_SECONDS = 60.0
FIRST_DELAY_SECONDS = 0.2
MAX_DELAY_SECONDS = 5.0
MAX_LINE_BYTES = 4 * 2**20


class DiscoveryError(Exception):
    """The API server did not give what was asked; `fresh_list` where only a new list helps."""

    def __init__(self, message: str, *, fresh_list: bool = True) -> None:
        super().__init__(message)
        self.fresh_list = fresh_list


@dataclasses.dataclass(frozen=True, slots=True)
class ApiServer:
    """Where it is and who we are; the token is read for every request, because it is rotated."""

    url: str
    token_file: Path | None = None
    ca_file: Path | None = None

    @classmethod
    def in_cluster(cls, url: str, account: Path = SERVICE_ACCOUNT) -> ApiServer:
        """As every pod finds it.

        Raises:
            DiscoveryError: this is no pod.
        """
        if not url:
            raise DiscoveryError(
                "KUBERNETES_SERVICE_HOST and _PORT are not set: outside a cluster use --worker"
            )
        return cls(url, account / "token", account / "ca.crt")

    @property
    def headers(self) -> dict[str, str]:
        """With the bearer token."""
        if self.token_file is None:
            return {}
        return {"authorization": f"Bearer {self.token_file.read_text().strip()}"}


class _Trust:
    """Trust in the cluster's own authority, made once for each content of its file."""

    def __init__(self) -> None:
        self._made_of: bytes | None = None
        self._context: ssl.SSLContext | None = None

    def of(self, ca_file: Path | None) -> ssl.SSLContext | bool:
        """For one request; True is the system's own trust."""
        if ca_file is None:
            return True
        content = ca_file.read_bytes()
        if self._context is None or content != self._made_of:
            self._context = ssl.create_default_context(cadata=content.decode())
            self._made_of = content
        return self._context


class PodWatch:
    """The pods of one service. `on_pods` gets all of them whenever something changed.

    `on_problem` gets why they cannot be read, and "" once they can.
    """

    def __init__(
        self,
        server: ApiServer,
        *,
        namespace: str,
        service: str,
        compat: str,
        on_pods: Callable[[Sequence[KnownPod]], None],
        on_problem: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._server = server
        self._path = f"{server.url}/api/v1/namespaces/{namespace}/pods"
        self._selector = f"{SERVICE_LABEL}={service}"
        self._compat = compat
        self._on_pods = on_pods
        self._on_problem = on_problem
        self._clock = clock
        self._sleep = sleep
        self._trust = _Trust()
        self._pods: dict[str, KnownPod] = {}
        self._last_good: float | None = None

    async def run(self) -> None:
        """Follow the pods, for ever."""
        delay = FIRST_DELAY_SECONDS
        version: str | None = None
        async with aiohttp.ClientSession() as session:
            while True:
                opened, reason = self._clock(), ""
                try:
                    if version is None:
                        version = await self._list(session)
                    async for seen in self._watch(session, version):
                        version, delay = seen, FIRST_DELAY_SECONDS
                except DiscoveryError as error:
                    version = None if error.fresh_list else version
                    reason = str(error)
                except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
                    reason = f"{type(error).__name__}: {error}"
                if reason:
                    logger.warning("pods cannot be watched", extra={"reason": reason})
                    self._on_problem(reason)
                    self._forget_if_stale()
                elif self._clock() - opened > MAX_DELAY_SECONDS:
                    delay = FIRST_DELAY_SECONDS  # it ended as the server ends every watch
                await self._sleep(delay * random.uniform(0.5, 1.0))  # noqa: S311 - only jitter
                delay = min(delay * 2, MAX_DELAY_SECONDS)

    async def _list(self, session: aiohttp.ClientSession) -> str:
        """All pods there are; the version to watch from."""
        timeout = aiohttp.ClientTimeout(total=LIST_TIMEOUT_SECONDS)
        async with self._get(session, {}, timeout) as response:
            body = _object(await response.read())
        version = body.get("metadata", {}).get("resourceVersion")
        items = body.get("items")
        if not isinstance(version, str) or not isinstance(items, list):
            raise DiscoveryError("the list of pods has no resourceVersion or no items")
        self._pods = {}
        for pod in items:
            self._put(pod)
        self._publish()
        return version

    async def _watch(self, session: aiohttp.ClientSession, version: str) -> AsyncIterator[str]:
        """Apply events as they come; yields the version that each brings."""
        query = {
            "watch": "true",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_SECONDS),
        }
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=LIST_TIMEOUT_SECONDS, sock_read=SILENCE_SECONDS
        )
        async with self._get(session, query, timeout) as response:
            self._last_good = self._clock()
            self._on_problem("")
            async for line in _lines(response):
                event = _object(line)
                yield self._apply(event)

    def _apply(self, event: dict[str, Any]) -> str:
        kind, pod = event.get("type"), event.get("object")
        if kind == "ERROR" or not isinstance(pod, dict):
            code = pod.get("code") if isinstance(pod, dict) else None
            raise DiscoveryError(f"the watch ended with an error, code {code}")
        self._last_good = self._clock()
        if kind == "DELETED":
            self._pods.pop(_name(pod), None)
            self._publish()
        elif kind in ("ADDED", "MODIFIED"):
            self._put(pod)
            self._publish()
        version = pod.get("metadata", {}).get("resourceVersion")
        if not isinstance(version, str):
            raise DiscoveryError("an event has no resourceVersion")
        return version

    def _get(
        self, session: aiohttp.ClientSession, query: dict[str, str], timeout: aiohttp.ClientTimeout
    ) -> _Checked:
        return _Checked(
            session.get(
                self._path,
                params={"labelSelector": self._selector, **query},
                headers=self._server.headers,
                ssl=self._trust.of(self._server.ca_file),
                timeout=timeout,
            )
        )

    def _put(self, pod: Any) -> None:
        if not isinstance(pod, dict):
            raise DiscoveryError("a pod is no object")
        known = known_pod(pod, compat=self._compat)
        if known is None:
            self._pods.pop(_name(pod), None)
        else:
            self._pods[known.name] = known

    def _publish(self) -> None:
        self._last_good = self._clock()
        self._on_problem("")
        self._on_pods(tuple(self._pods.values()))

    def _forget_if_stale(self) -> None:
        """After a minute without news, better nobody than somebody who may be somebody else."""
        if self._last_good is not None and self._clock() - self._last_good > KEEP_SECONDS:
            logger.error("no news of the pods for too long: none is used any more")
            self._pods, self._last_good = {}, None
            self._on_pods(())


class _Checked:
    """A response whose status is 200, or DiscoveryError."""

    def __init__(self, request: Any) -> None:
        self._request = request

    async def __aenter__(self) -> aiohttp.ClientResponse:
        response: aiohttp.ClientResponse = await self._request.__aenter__()
        if response.status == 200:
            return response
        await self._request.__aexit__(None, None, None)
        if response.status in (401, 403):
            # the operator reads these words: `ACCESS_DENIED` in its status/causes.py
            raise DiscoveryError(
                f"the API server denies the list of pods: {response.status} {response.reason}"
            )
        raise DiscoveryError(f"the API server answers {response.status} {response.reason}")

    async def __aexit__(self, *exc: object) -> None:
        await self._request.__aexit__(*exc)


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Lines of any length; aiohttp's own reader gives up on long ones."""
    rest = b""
    async for chunk in response.content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            raise DiscoveryError("an event is too long")
        for line in lines:
            if line.strip():
                yield line
    if rest.strip():
        raise DiscoveryError("the watch was cut inside an event", fresh_list=False)


def _object(raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except ValueError as error:
        raise DiscoveryError("the API server sent no JSON") from error
    if not isinstance(value, dict):
        raise DiscoveryError("the API server sent no JSON object")
    return value


def _name(pod: dict[str, Any]) -> str:
    return str(pod.get("metadata", {}).get("name", ""))
