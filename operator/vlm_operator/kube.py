"""The `Cluster` protocol over the dict-level client of `kubernetes.aio`, known here alone.

Typed models are not used: they drop fields newer than the client, and a list of pods costs the
event loop a second. Kinds come from `cluster.KINDS`, so nothing is discovered: start-up asks
nothing, and no cache file can be stale.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any, cast

import aiohttp
from kubernetes.aio import client as kube_client
from kubernetes.aio import config as kube_config
from kubernetes.aio.client.rest import ApiException
from kubernetes.aio.dynamic import DynamicClient
from kubernetes.aio.dynamic.resource import Resource

from vlm_operator.cluster import Happening, Kind, Manifest, Page, WatchEvent, kind_of
from vlm_operator.errors import ClusterError, ConflictError, UnavailableError

REQUEST_TIMEOUT_SECONDS = 5.0
_PAGE = 250  # objects; more would hold the event loop up while they are parsed


@dataclasses.dataclass(frozen=True)
class Connection:
    """Where the API server is and who we are, for clients other than this one, as kopf's."""

    server: str
    ca_path: str | None
    insecure: bool
    token: str | None
    certificate_path: str | None
    private_key_path: str | None


async def configuration(kubeconfig: str | None, context: str | None = None) -> Any:
    """Load credentials: a kubeconfig where named, else the pod's ServiceAccount.

    `context` names one of the kubeconfig's; without it, the current one is taken.

    Raises:
        ClusterError: neither can be read; the message says which was tried.
    """
    loaded = kube_client.Configuration()
    try:
        if kubeconfig is not None:
            await kube_config.load_kube_config(
                kubeconfig, context=context, client_configuration=loaded
            )
        else:
            kube_config.load_incluster_config(client_configuration=loaded)
    except (kube_config.ConfigException, OSError) as error:
        tried = f"--kubeconfig={kubeconfig}" if kubeconfig else "the pod's ServiceAccount"
        raise ClusterError(401, "NoCredentials", f"{tried}: {error}") from error
    return loaded


async def connection(loaded: Any) -> Connection:
    """Tell another client how this one connects, with the token as it is now."""
    token = await loaded.get_api_key_with_prefix("BearerToken")
    return Connection(
        server=loaded.host,
        ca_path=loaded.ssl_ca_cert,
        insecure=not loaded.verify_ssl,
        token=token.removeprefix("Bearer ").removeprefix("bearer ") if token else None,
        certificate_path=loaded.cert_file,
        private_key_path=loaded.key_file,
    )


class KubeCluster:
    """One API server, with `REQUEST_TIMEOUT_SECONDS` for every call."""

    def __init__(self, loaded: Any) -> None:
        self._api = kube_client.ApiClient(configuration=loaded)
        self._client = DynamicClient(self._api)

    async def close(self) -> None:
        """Close the connections; the object is of no use afterwards."""
        await self._api.close()

    async def version(self) -> str:
        """What the API server calls its release, `v1.34.2`."""
        return str((await self._request("get", "/version"))["gitVersion"])

    async def get(self, kind: Kind, namespace: str, name: str) -> Manifest | None:
        """See `Cluster.get`."""
        try:
            return await self._request("get", self._path(kind, namespace, name))
        except ClusterError as error:
            if error.status == 404:
                return None
            raise

    async def list(
        self, kind: Kind, namespace: str | None = None, labels: Mapping[str, str] | None = None
    ) -> list[Manifest]:
        """See `Cluster.list`."""
        selector = ",".join(f"{key}={value}" for key, value in (labels or {}).items())
        answer = await self._request(
            "get", self._path(kind, namespace), label_selector=selector or None
        )
        return _items(kind, answer)

    async def pages(
        self, kind: Kind, namespace: str | None, *, labelled: str
    ) -> AsyncGenerator[Page, None]:
        """See `Source.pages`."""
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
        """See `Source.watch`."""
        whole = max(1, round(seconds))  # API servers take integers
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
                    yield _event(json.loads(line))
            finally:
                answer.close()

    async def apply(
        self, manifest: Manifest, *, manager: str, subresource: str = "", dry_run: bool = False
    ) -> Manifest:
        """See `Cluster.apply`."""
        meta = manifest["metadata"]
        path = self._path(kind_of(manifest), meta.get("namespace"), meta["name"], subresource)
        return await self._request(
            "patch",
            path,
            body=manifest,
            content_type="application/apply-patch+yaml",
            field_manager=manager,
            force_conflicts="true",
            dry_run="All" if dry_run else None,
        )

    async def merge(self, manifest: Manifest, *, manager: str) -> Manifest:
        """See `Cluster.merge`."""
        meta = manifest["metadata"]
        path = self._path(kind_of(manifest), meta.get("namespace"), meta["name"])
        return await self._request(
            "patch",
            path,
            body=manifest,
            content_type="application/merge-patch+json",
            field_manager=manager,
        )

    async def create(self, manifest: Manifest) -> Manifest:
        """See `Cluster.create`."""
        path = self._path(kind_of(manifest), manifest["metadata"].get("namespace"))
        return await self._request("post", path, body=manifest)

    async def replace(self, manifest: Manifest) -> Manifest:
        """See `Cluster.replace`."""
        meta = manifest["metadata"]
        path = self._path(kind_of(manifest), meta.get("namespace"), meta["name"])
        return await self._request("put", path, body=manifest)

    async def delete(self, kind: Kind, namespace: str, name: str, *, uid: str | None) -> None:
        """See `Cluster.delete`."""
        options: Manifest = {"propagationPolicy": "Background"}
        if uid is not None:
            options["preconditions"] = {"uid": uid}
        try:
            await self._request("delete", self._path(kind, namespace, name), body=options)
        except ClusterError as error:
            if error.status != 404:
                raise

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
                method,
                path,
                serialize=False,
                _request_timeout=REQUEST_TIMEOUT_SECONDS,
                **params,
            )
            return cast("Manifest", json.loads(await response.read()))


def _items(kind: Kind, answer: Manifest) -> list[Manifest]:
    """Say of each item of a list what it is; it carries neither."""
    return [{"apiVersion": kind.api_version, "kind": kind.kind, **item} for item in answer["items"]]


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield whole lines, of any length.

    Raises:
        json.JSONDecodeError: the last one has no end.
    """
    rest = b""
    async for piece in content.iter_any():
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            yield line
    if rest:
        raise json.JSONDecodeError("a line without its end", rest.decode(errors="replace"), 0)


def _event(said: Manifest) -> WatchEvent:
    """Read one line of a watch; an ERROR is raised."""
    try:
        item = said["object"]
        if said["type"] != "ERROR":
            return WatchEvent(Happening(said["type"]), item)
        code = int(item["code"])
    except (KeyError, TypeError, ValueError) as error:
        raise UnavailableError(0, "Garbled", f"no event of a watch: {error}") from error
    raise _typed(code, str(item.get("reason")), str(item.get("message")))


@contextlib.asynccontextmanager
async def _typed_errors() -> AsyncIterator[None]:
    """Turn whatever the client raises into our tree."""
    try:
        yield
    except ApiException as error:
        raise _refusal(error) from None
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        text = str(error) or type(error).__name__
        raise UnavailableError(0, "Unreachable", text) from error
    except json.JSONDecodeError as error:
        raise UnavailableError(0, "Garbled", f"the answer is no JSON: {error}") from error


def _refusal(error: Any) -> ClusterError:
    """Read the Status object of a refusal."""
    reason, message = str(error.reason), str(error.body or error.reason)
    with contextlib.suppress(json.JSONDecodeError, TypeError, AttributeError):
        status = json.loads(error.body)
        reason = status.get("reason") or reason
        message = status.get("message") or message
    return _typed(int(error.status or 0), reason, message)


def _typed(code: int, reason: str, message: str) -> ClusterError:
    # a uid in an applied manifest is a precondition that this API server calls invalid
    if code == 409 or (code == 422 and "metadata.uid: Invalid value" in message):
        return ConflictError(409, reason, message)
    if code in (0, 429) or code >= 500:
        return UnavailableError(code, reason, message)
    return ClusterError(code, reason, message)
