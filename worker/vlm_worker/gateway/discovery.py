"""Discovers the pods of a service: lists them once at the API server, then watches.

    list ─▶ watch ─▶ events ─▶ all known pods ─▶ on_pods
      ▲       │ 410, or another error
      └───────┘ with backoff; meanwhile the last known pods stay, for 60 s

Only this module calls Kubernetes. It needs two requests, so it uses no client library.

A pod may get requests if it is not being deleted, its containers are ready, and the readiness gate
`triptych.dev/accepting` is not False. The pod's Ready condition is not used, because it is False
until the gate is set.

A pod belongs to the service if a ReplicaSet controls it and it has the service's compat. The label
of the service alone does not suffice. A user who may create pods can forge all of it (SECURITY.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import logging
import random
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

logger = logging.getLogger(__name__)

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
WATCH_SECONDS = 300
LIST_TIMEOUT_SECONDS = 10.0
# The server closes a watch after WATCH_SECONDS; a longer silence means a broken connection.
SILENCE_SECONDS = WATCH_SECONDS + 15.0
KEEP_SECONDS = 60.0
FIRST_DELAY_SECONDS = 0.2
MAX_DELAY_SECONDS = 5.0
MAX_LINE_BYTES = 4 * 2**20


class DiscoveryError(Exception):
    """The API server failed or sent an unusable answer; if `fresh_list`, list pods again."""

    def __init__(self, message: str, *, fresh_list: bool = True) -> None:
        super().__init__(message)
        self.fresh_list = fresh_list


@dataclasses.dataclass(frozen=True, slots=True)
class ApiServer:
    """Address and credentials. The token is read for each request, because it rotates."""

    url: str
    token_file: Path | None = None
    ca_file: Path | None = None

    @classmethod
    def in_cluster(cls, url: str, account: Path = SERVICE_ACCOUNT) -> ApiServer:
        """Use the service account that Kubernetes mounts into each pod.

        Raises:
            DiscoveryError: `url` is empty, because the process does not run in a pod.
        """
        if not url:
            raise DiscoveryError(
                "KUBERNETES_SERVICE_HOST and _PORT are not set: outside a cluster use --worker"
            )
        return cls(url, account / "token", account / "ca.crt")

    @property
    def headers(self) -> dict[str, str]:
        """The authorization header; empty without a token file."""
        if self.token_file is None:
            return {}
        return {"authorization": f"Bearer {self.token_file.read_text().strip()}"}

    @property
    def tls(self) -> ssl.SSLContext | bool:
        """TLS context of the cluster's CA; True, without its file, selects the system's CAs."""
        return True if self.ca_file is None else _tls_context(self.ca_file.read_text())


@functools.lru_cache(maxsize=1)
def _tls_context(certificates: str) -> ssl.SSLContext:
    return ssl.create_default_context(cadata=certificates)


class PodWatch:
    """Watches the pods of one service. After each change it calls `on_pods` with all pods.

    It calls `on_problem` with the reason if pods cannot be read, and with "" once they can. It
    calls `on_gateways` with the number of the service's gateways that are ready.
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
        on_gateways: Callable[[int], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._server = server
        self._path = f"{server.url}/api/v1/namespaces/{namespace}/pods"
        self._selector = f"{SERVICE_LABEL}={service}"
        self._compat = compat
        self._on_pods = on_pods
        self._on_problem = on_problem
        self._on_gateways = on_gateways
        self._clock = clock
        self._sleep = sleep
        self._pods: dict[str, KnownPod] = {}
        self._gateways: set[str] = set()
        self._last_good: float | None = None

    async def run(self) -> None:
        """List and watch the pods. Never returns."""
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
                    delay = FIRST_DELAY_SECONDS  # a regular end: the server limits each watch
                await self._sleep(delay * random.uniform(0.5, 1.0))  # noqa: S311 - only jitter
                delay = min(delay * 2, MAX_DELAY_SECONDS)

    async def _list(self, session: aiohttp.ClientSession) -> str:
        """Read and publish all pods; return the resource version to watch from."""
        timeout = aiohttp.ClientTimeout(total=LIST_TIMEOUT_SECONDS)
        async with self._get(session, {}, timeout) as response:
            body = _object(await response.read())
        version = body.get("metadata", {}).get("resourceVersion")
        items = body.get("items")
        if not isinstance(version, str) or not isinstance(items, list):
            raise DiscoveryError("the list of pods has no resourceVersion or no items")
        self._pods, self._gateways = {}, set()
        for pod in items:
            self._put(pod)
        self._publish()
        return version

    async def _watch(self, session: aiohttp.ClientSession, version: str) -> AsyncIterator[str]:
        """Apply each event, then yield its resource version."""
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
            self._gateways.discard(_name(pod))
            self._publish()
        elif kind in ("ADDED", "MODIFIED"):
            self._put(pod)
            self._publish()
        version = pod.get("metadata", {}).get("resourceVersion")
        if not isinstance(version, str):
            raise DiscoveryError("an event has no resourceVersion")
        return version

    @contextlib.asynccontextmanager
    async def _get(
        self, session: aiohttp.ClientSession, query: dict[str, str], timeout: aiohttp.ClientTimeout
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Open a response. Raises DiscoveryError unless the status is 200."""
        async with session.get(
            self._path,
            params={"labelSelector": self._selector, **query},
            headers=self._server.headers,
            ssl=self._server.tls,
            timeout=timeout,
        ) as response:
            if response.status in (401, 403):
                # the operator matches this text: `ACCESS_DENIED` in its status/causes.py
                raise DiscoveryError(
                    f"the API server denies the list of pods: {response.status} {response.reason}"
                )
            if response.status != 200:
                raise DiscoveryError(f"the API server answers {response.status} {response.reason}")
            yield response

    def _put(self, pod: Any) -> None:
        if not isinstance(pod, dict):
            raise DiscoveryError("a pod is no object")
        if is_ready_gateway(pod):
            self._gateways.add(_name(pod))
        else:
            self._gateways.discard(_name(pod))
        known = known_pod(pod, compat=self._compat)
        if known is None:
            self._pods.pop(_name(pod), None)
        else:
            self._pods[known.name] = known

    def _publish(self) -> None:
        self._last_good = self._clock()
        self._on_problem("")
        self._on_gateways(len(self._gateways))
        self._on_pods(tuple(self._pods.values()))

    def _forget_if_stale(self) -> None:
        """Drop all pods after `KEEP_SECONDS` without an answer.

        Another pod may by then have the address of a pod that ended.
        """
        if self._last_good is not None and self._clock() - self._last_good > KEEP_SECONDS:
            logger.error("no news of the pods for too long: none is used any more")
            self._pods, self._last_good = {}, None
            self._on_pods(())


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield the lines of a response, up to `MAX_LINE_BYTES`; aiohttp's reader allows less.

    Raises:
        DiscoveryError: a line is too long, or the stream ended inside a line.
    """
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


GRPC_PORT = 9000
SERVICE_LABEL = "triptych.dev/service"
ROLE_LABEL = "triptych.dev/role"
COMPAT_LABEL = "triptych.dev/compat"
ACCEPTING_GATE = "triptych.dev/accepting"
WORKER_ROLES = frozenset({"encoder", "prefill", "decode"})
GATEWAY_ROLE = "gateway"


@dataclasses.dataclass(frozen=True, slots=True)
class KnownPod:
    """A worker pod: its address, and whether it may get requests."""

    name: str
    address: str
    ready: bool = True
    accepting: bool = True


def known_pod(pod: Mapping[str, Any], *, compat: str) -> KnownPod | None:
    """Return a worker pod; None if the pod is not a worker of this compatibility set.

    None, too, if it has no address yet, no compat label or no controlling ReplicaSet.
    """
    metadata, status = _part(pod, "metadata"), _part(pod, "status")
    labels = _part(metadata, "labels")
    ip = status.get("podIP")
    if labels.get(ROLE_LABEL) not in WORKER_ROLES or not isinstance(ip, str) or not ip:
        return None
    if labels.get(COMPAT_LABEL) != compat:
        return None
    if not any(_is_controller(owner) for owner in metadata.get("ownerReferences") or ()):
        return None
    conditions = _conditions(status)
    deleted = metadata.get("deletionTimestamp") is not None
    host = f"[{ip}]" if ":" in ip else ip
    return KnownPod(
        name=str(metadata.get("name", "")),
        address=f"{host}:{GRPC_PORT}",
        ready=conditions.get("ContainersReady") == "True",
        # A terminating pod stays known: it drains and may be the last that can serve.
        accepting=not deleted and conditions.get(ACCEPTING_GATE) != "False",
    )


def is_ready_gateway(pod: Mapping[str, Any]) -> bool:
    """Whether a pod is a gateway that gets requests, of any compatibility set."""
    metadata, status = _part(pod, "metadata"), _part(pod, "status")
    return (
        _part(metadata, "labels").get(ROLE_LABEL) == GATEWAY_ROLE
        and metadata.get("deletionTimestamp") is None
        and any(_is_controller(owner) for owner in metadata.get("ownerReferences") or ())
        and _conditions(status).get("Ready") == "True"
    )


def _conditions(status: Mapping[str, Any]) -> dict[Any, Any]:
    return {
        c.get("type"): c.get("status")
        for c in status.get("conditions") or ()
        if isinstance(c, Mapping)
    }


def _is_controller(owner: Any) -> bool:
    """Whether the owner is a controlling ReplicaSet; a manually created pod has none."""
    return (
        isinstance(owner, Mapping)
        and owner.get("controller") is True
        and owner.get("kind") == "ReplicaSet"
        and str(owner.get("apiVersion", "")).startswith("apps/")
    )


def _part(value: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = value.get(name)
    return part if isinstance(part, Mapping) else {}
