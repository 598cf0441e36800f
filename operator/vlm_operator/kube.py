"""Implements `Cluster` and `Source` with `kubernetes.aio`; only this module imports that client.

kubeconfig or ServiceAccount ─ configuration ─▶ KubeCluster: each call has a timeout, typed errors

Objects are dicts. Typed models drop fields newer than the client, and parsing a list of pods into
them blocks the event loop for a second. Kinds come from `cluster.KINDS`, without API discovery: so
start-up sends no request for it, and no discovery cache can be stale.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sys
import urllib.parse
import urllib.request
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import aiohttp
import msgspec
import yaml
from kubernetes.aio import client as kube_client
from kubernetes.aio import config as kube_config
from kubernetes.aio.client.rest import ApiException
from kubernetes.aio.dynamic import DynamicClient
from kubernetes.aio.dynamic.resource import Resource

from vlm_operator.cluster import POD, Kind, Manifest, Page, WatchEvent, WatchEventType, kind_of
from vlm_operator.errors import (
    ClusterError,
    ConflictError,
    DiffersError,
    NamespaceEndsError,
    UnavailableError,
)

REQUEST_TIMEOUT_SECONDS = 5.0
_LOG_SECONDS = 60.0  # one whole log
_METADATA_ONLY = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
_PAGE = 250  # objects; parsing more at once would block the event loop


@dataclasses.dataclass(frozen=True)
class Connection:
    """Address and credentials of the API server, for other clients such as kopf's.

    Attributes:
        token: bearer token without the prefix "Bearer ".
    """

    server: str
    ca_path: str | None
    insecure: bool
    token: str | None
    certificate_path: str | None
    private_key_path: str | None


_DECODER = msgspec.json.Decoder()  # it already shares short keys


def parsed(text: str | bytes) -> Any:
    """Parse an answer of the API server, with one copy of each string in all answers.

    Thousands of objects have the same labels, arguments and images.

    Raises:
        msgspec.DecodeError: the text is no JSON.
    """
    value = _DECODER.decode(text)
    _share(value)
    return value


def _share(value: Any) -> None:
    """Replace the strings below a dict or list by their interned copies."""
    if type(value) is dict:
        places: Iterable[tuple[Any, Any]] = value.items()
    elif type(value) is list:
        places = enumerate(value)
    else:
        return
    for place, item in places:
        if type(item) is str:
            value[place] = sys.intern(item)
        else:
            _share(item)


class KubeCluster:
    """Client of one API server; every call has the timeout `REQUEST_TIMEOUT_SECONDS`."""

    def __init__(self, loaded: Any) -> None:
        # no limit: each open watch holds a connection, and `Fenced` limits concurrent requests
        loaded.connection_pool_maxsize = 0
        # with `trust_env`, aiohttp reads .netrc and the proxies in threads, for each request
        loaded.client_session_kwargs = {"trust_env": False}
        loaded.proxy = loaded.proxy or proxy_of(loaded.host)
        self._api = kube_client.ApiClient(configuration=loaded)
        self._client = DynamicClient(self._api)

    async def close(self) -> None:
        await self._api.close()

    async def version(self) -> str:
        """Return the release of the API server, such as `v1.34.2`."""
        return str((await self._request("get", "/version"))["gitVersion"])

    async def get(self, kind: Kind, namespace: str, name: str) -> Manifest | None:
        try:
            return await self._request("get", self._path(kind, namespace, name))
        except ClusterError as error:
            if error.status == 404:
                return None
            raise

    async def list(
        self, kind: Kind, namespace: str | None = None, labels: Mapping[str, str] | None = None
    ) -> list[Manifest]:
        selector = ",".join(f"{key}={value}" for key, value in (labels or {}).items())
        answer = await self._request(
            "get", self._path(kind, namespace), label_selector=selector or None
        )
        return _items(kind, answer)

    async def pages(
        self, kind: Kind, namespace: str | None, *, labelled: str
    ) -> AsyncGenerator[Page, None]:
        token = None
        while True:
            answer = await self._request(
                "get",
                self._path(kind, namespace),
                label_selector=labelled or None,
                limit=_PAGE,
                _continue=token,
            )
            yield Page(_items(kind, answer), int(answer["metadata"]["resourceVersion"]))
            token = answer["metadata"].get("continue")
            if not token:
                return

    async def watch(
        self,
        kind: Kind,
        namespace: str | None,
        *,
        labelled: str,
        since: int,
        seconds: float,
        silence: float,
    ) -> AsyncGenerator[WatchEvent, None]:
        whole = max(1, round(seconds))  # API servers accept only integers
        async with _typed_errors():
            answer = await self._client.request(
                "get",
                self._path(kind, namespace),
                serialize=False,
                watch="true",
                query_params=[("allowWatchBookmarks", "true")],
                label_selector=labelled or None,
                resource_version=str(since),
                timeout_seconds=whole,
                _request_timeout=aiohttp.ClientTimeout(
                    total=whole + REQUEST_TIMEOUT_SECONDS,
                    sock_connect=REQUEST_TIMEOUT_SECONDS,
                    sock_read=silence,
                ),
            )
            try:
                async for line in _lines(answer.content):
                    yield watch_event(parsed(line))
            finally:
                answer.close()

    async def log(
        self,
        namespace: str,
        pod: str,
        container: str,
        *,
        previous: bool = False,
        follow: bool = False,
        since: str | None = None,
        tail_lines: int | None = None,
    ) -> AsyncGenerator[bytes, None]:
        """Yield the lines of a container's log; each starts with its time and a space.

        `previous` is the log of the last terminated process. `follow` waits for new lines until the
        container ends. `since` is the Kubernetes timestamp of the oldest line.

        Raises:
            ClusterError: there is no such log, or the read was refused or broke off.
        """
        query = {
            "container": container,
            "timestamps": "true",
            "previous": "true" if previous else None,
            "follow": "true" if follow else None,
            "sinceTime": since,
            "tailLines": tail_lines,
        }
        async with _typed_errors():
            answer = await self._client.request(
                "get",
                self._path(POD, namespace, pod, "log"),
                serialize=False,
                query_params=[(key, value) for key, value in query.items() if value is not None],
                header_params={"Accept": "application/json, */*"},
                _request_timeout=aiohttp.ClientTimeout(
                    total=None if follow else _LOG_SECONDS, sock_connect=REQUEST_TIMEOUT_SECONDS
                ),
            )
            try:
                rest = b""
                async for piece in answer.content.iter_any():
                    *whole, rest = (rest + piece).split(b"\n")
                    for line in whole:
                        yield line
                if rest:
                    yield rest
            finally:
                answer.close()

    async def apply(
        self, manifest: Manifest, *, manager: str, subresource: str = "", dry_run: bool = False
    ) -> Manifest:
        return await self._request(
            "patch",
            self._path_of(manifest, subresource),
            body=manifest,
            content_type="application/apply-patch+yaml",
            field_manager=manager,
            force_conflicts="true",
            dry_run="All" if dry_run else None,
        )

    async def merge(self, manifest: Manifest, *, manager: str) -> Manifest:
        return await self._request(
            "patch",
            self._path_of(manifest),
            body=manifest,
            content_type="application/merge-patch+json",
            field_manager=manager,
        )

    async def metadata_if(
        self, kind: Kind, namespace: str, name: str, expected: Mapping[str, str]
    ) -> Manifest | None:
        tests = [{"op": "test", "path": path, "value": value} for path, value in expected.items()]
        try:
            answer = await self._request(
                "patch",
                self._path(kind, namespace, name),
                body=tests,
                content_type="application/json-patch+json",
                header_params={"Accept": _METADATA_ONLY},
            )
        except ClusterError as error:
            if error.status == 404:
                return None
            if error.status == 422:
                raise DiffersError(422, error.reason, error.message) from None
            raise
        return cast("Manifest", answer["metadata"])

    async def create(self, manifest: Manifest) -> Manifest:
        path = self._path(kind_of(manifest), manifest["metadata"].get("namespace"))
        return await self._request("post", path, body=manifest)

    async def replace(self, manifest: Manifest) -> Manifest:
        return await self._request("put", self._path_of(manifest), body=manifest)

    async def delete(self, kind: Kind, namespace: str, name: str, *, uid: str | None) -> None:
        options: Manifest = {"propagationPolicy": "Background"}
        if uid is not None:
            options["preconditions"] = {"uid": uid}
        try:
            await self._request("delete", self._path(kind, namespace, name), body=options)
        except ClusterError as error:
            if error.status != 404:
                raise

    def _path_of(self, manifest: Manifest, subresource: str = "") -> str:
        meta = manifest["metadata"]
        return self._path(kind_of(manifest), meta.get("namespace"), meta["name"], subresource)

    def _path(
        self, kind: Kind, namespace: str | None, name: str | None = None, subresource: str = ""
    ) -> str:
        resource = Resource(
            prefix="apis" if kind.group else "api",
            group=kind.group or None,
            api_version=kind.api_version.rpartition("/")[2],
            kind=kind.kind,
            namespaced=kind.namespaced,
            name=kind.plural,
        )
        path = resource.path(name=name, namespace=namespace if kind.namespaced else None)
        return f"{path}/{subresource}" if subresource else str(path)

    async def _request(self, method: str, path: str, **params: Any) -> Manifest:
        async with _typed_errors(), asyncio.timeout(REQUEST_TIMEOUT_SECONDS):
            # `_request_timeout` too: the client's own default of five minutes would outlive a
            # cancelled write
            response = await self._client.request(
                method, path, serialize=False, _request_timeout=REQUEST_TIMEOUT_SECONDS, **params
            )
            return cast("Manifest", parsed(await response.read()))


def proxy_of(server: str) -> str | None:
    """Return the proxy for `server` in HTTPS_PROXY or HTTP_PROXY; None if NO_PROXY names it."""
    url = urllib.parse.urlsplit(server)
    hosts = (url.netloc, url.hostname or "")  # NO_PROXY names IPv6 addresses without brackets
    if any(map(urllib.request.proxy_bypass_environment, hosts)):  # type: ignore[attr-defined]
        return None
    return urllib.request.getproxies_environment().get(url.scheme)


async def configuration(kubeconfig: str | None, context: str | None = None) -> Any:
    """Load credentials from `kubeconfig`, or from the pod's ServiceAccount if it is None.

    `context` names a context of the kubeconfig; None means the current one.

    Raises:
        ClusterError: the credentials cannot be read; the message names their source.
    """
    loaded = kube_client.Configuration()
    try:
        if kubeconfig is not None:
            name, _ = chosen_context(kubeconfig, context)
            await kube_config.load_kube_config(
                kubeconfig, context=name, client_configuration=loaded
            )
        else:
            kube_config.load_incluster_config(client_configuration=loaded)
    except (kube_config.ConfigException, OSError) as error:
        tried = f"--kubeconfig={kubeconfig}" if kubeconfig else "the pod's ServiceAccount"
        raise ClusterError(401, "NoCredentials", f"{tried}: {error}") from error
    return loaded


def chosen_context(kubeconfig: str, context: str | None = None) -> tuple[str | None, str]:
    """Return the name and the namespace of the context that kubectl would use.

    Args:
        kubeconfig: paths of one or more files, separated by colons. The first file with a current
            context decides.
        context: name of the context; None means the current one.

    Raises:
        ClusterError: a file cannot be read, or is not a kubeconfig.
    """
    configs = [_read(path) for path in kubeconfig.split(":")]
    current = (config["current-context"] for config in configs if config.get("current-context"))
    name = context or next(current, None)
    for config in configs:
        for entry in config.get("contexts") or []:
            if entry.get("name") == name:
                return name, str(entry.get("context", {}).get("namespace") or "default")
    return name, "default"


def _read(path: str) -> dict[str, Any]:
    try:
        config = yaml.safe_load(Path(path).expanduser().read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ClusterError(401, "NoCredentials", f"--kubeconfig={path}: {error}") from error
    if not isinstance(config, dict):
        raise ClusterError(401, "NoCredentials", f"--kubeconfig={path}: not a kubeconfig")
    return config


async def connection(loaded: Any) -> Connection:
    """Return the connection data of this client, with its present token."""
    token = await loaded.get_api_key_with_prefix("BearerToken")
    return Connection(
        server=loaded.host,
        ca_path=loaded.ssl_ca_cert,
        insecure=not loaded.verify_ssl,
        token=token.removeprefix("Bearer ").removeprefix("bearer ") if token else None,
        certificate_path=loaded.cert_file,
        private_key_path=loaded.key_file,
    )


def _items(kind: Kind, answer: Manifest) -> list[Manifest]:
    """Return the items of a list with `apiVersion` and `kind`, which the API server omits."""
    return [{"apiVersion": kind.api_version, "kind": kind.kind, **item} for item in answer["items"]]


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield complete lines of any length.

    Raises:
        UnavailableError: the last line has no newline.
    """
    rest = b""
    async for piece in content.iter_any():
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            yield line
    if rest:
        raise UnavailableError(0, "Garbled", "the answer is no JSON: a line without its end")


def watch_event(line: Manifest) -> WatchEvent:
    """Parse one line of a watch.

    Raises:
        ClusterError: the line is an ERROR event.
        UnavailableError: the line is not an event of a watch.
    """
    try:
        item = line["object"]
        if line["type"] != "ERROR":
            return WatchEvent(WatchEventType(line["type"]), item)
        code = int(item["code"])
    except (KeyError, TypeError, ValueError) as error:
        raise UnavailableError(0, "Garbled", f"no event of a watch: {error}") from error
    raise _typed(code, str(item.get("reason")), str(item.get("message")))


@contextlib.asynccontextmanager
async def _typed_errors() -> AsyncIterator[None]:
    try:
        yield
    except ApiException as error:
        raise _refusal(error) from None
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        text = str(error) or type(error).__name__
        raise UnavailableError(0, "Unreachable", text) from error
    except msgspec.DecodeError as error:
        raise UnavailableError(0, "Garbled", f"the answer is no JSON: {error}") from error


def _refusal(error: Any) -> ClusterError:
    """Convert the Status object of a refusal to a typed error."""
    reason, message = str(error.reason), str(error.body or error.reason)
    with contextlib.suppress(msgspec.DecodeError, TypeError, AttributeError):
        status = _DECODER.decode(error.body)
        reason = status.get("reason") or reason
        message = status.get("message") or message
    return _typed(int(error.status or 0), reason, message)


def _typed(code: int, reason: str, message: str) -> ClusterError:
    # an applied manifest's uid is a precondition; API servers answer 422 if it does not match
    if code == 409 or (code == 422 and "metadata.uid: Invalid value" in message):
        return ConflictError(409, reason, message)
    if code == 403 and "is being terminated" in message:
        return NamespaceEndsError(code, reason, message)
    if code in (0, 429) or code >= 500:
        return UnavailableError(code, reason, message)
    return ClusterError(code, reason, message)
