"""Sends requests to one API server, each with a timeout."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any, cast

import aiohttp
from kubernetes.aio import client as kube_client
from kubernetes.aio.dynamic import DynamicClient
from kubernetes.aio.dynamic.resource import Resource

from vlm_operator.cluster import Kind, Manifest, Page, WatchEvent, kind_of
from vlm_operator.errors import ClusterError
from vlm_operator.kube import answers

REQUEST_TIMEOUT_SECONDS = 5.0
_PAGE = 250  # objects; parsing more at once would block the event loop


class KubeCluster:
    """Client of one API server; every call has the timeout `REQUEST_TIMEOUT_SECONDS`."""

    def __init__(self, loaded: Any) -> None:
        # no limit: each open watch holds a connection, and `Fenced` limits concurrent requests
        loaded.connection_pool_maxsize = 0
        self._api = kube_client.ApiClient(configuration=loaded)
        self._client = DynamicClient(self._api)

    async def close(self) -> None:
        """Close the connections; the client cannot be used afterwards."""
        await self._api.close()

    async def version(self) -> str:
        """Return the release of the API server, such as `v1.34.2`."""
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
        return answers.items(kind, answer)

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
            yield Page(answers.items(kind, answer), int(answer["metadata"]["resourceVersion"]))
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
        whole = max(1, round(seconds))  # API servers accept only integers
        async with answers.typed_errors():
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
                async for line in answers.lines(answer.content):
                    yield answers.event(json.loads(line))
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
        async with answers.typed_errors(), asyncio.timeout(REQUEST_TIMEOUT_SECONDS):
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
