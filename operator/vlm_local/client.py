"""A client of the Kubernetes API for the agent and the control plane: paths and dicts.

It has what a kubelet needs and `vlm_operator.kube` does not: subresources, field selectors,
strategic merge, and watches without an end.
"""

import asyncio
import base64
import contextlib
import dataclasses
import json
import ssl
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import yaml

Object = dict[str, Any]
MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"


class ApiError(Exception):
    """The API server's answer was not a success.

    Attributes:
        status: the HTTP status; 0 if the server is unreachable.
        reason: `reason` of the Status object, such as `NotFound`.
    """

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message or f"{status} {reason}")
        self.status = status
        self.reason = reason


@dataclasses.dataclass(frozen=True)
class Access:
    """Address of a cluster, and credentials; certificates and keys are PEM texts."""

    server: str
    ca: str | None
    certificate: str | None = None
    key: str | None = None
    token: str | None = None
    namespace: str = "default"

    def write(self, kubeconfig: Path) -> Path:
        """Write a kubeconfig of mode 0600 that refers to no other file."""
        user = {"token": self.token} if self.token else {}
        user |= _encoded({"client-certificate": self.certificate, "client-key": self.key})
        cluster = {"server": self.server} | _encoded({"certificate-authority": self.ca})
        context = {"cluster": "triptych", "user": "triptych", "namespace": self.namespace}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "triptych",
            "contexts": [{"name": "triptych", "context": context}],
            "clusters": [{"name": "triptych", "cluster": cluster}],
            "users": [{"name": "triptych", "user": user}],
        }
        kubeconfig.touch(mode=0o600)
        kubeconfig.write_text(yaml.safe_dump(config, sort_keys=False))
        return kubeconfig

    def ssl_context(self) -> ssl.SSLContext | bool:
        """Return a TLS context with the CA and the client certificate; True for plain HTTP."""
        if not self.server.startswith("https"):
            return True
        context = ssl.create_default_context(cadata=self.ca)
        if self.certificate and self.key:
            # the ssl module reads key pairs only from files
            with tempfile.NamedTemporaryFile("w", suffix=".pem") as pem:
                pem.write(self.key + "\n" + self.certificate)
                pem.flush()
                context.load_cert_chain(pem.name)
        return context


class Client:
    """A session with one API server; an async context manager."""

    def __init__(self, access: Access) -> None:
        self.access = access
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "Client":
        token = self.access.token
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=self.access.ssl_context(), limit=64),
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=30),
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._http is not None
        await self._http.close()

    async def get(self, path: str, **params: str) -> Object:
        return await self.request("GET", path, params=params)

    async def create(self, path: str, body: Object) -> Object:
        return await self.request("POST", path, body=body)

    async def patch(self, path: str, body: Object, *, kind: str = MERGE, **params: str) -> Object:
        """Patch an object; `kind` is `MERGE` or `STRATEGIC`."""
        return await self.request("PATCH", path, body=body, kind=kind, params=params)

    async def delete(self, path: str, body: Object | None = None) -> Object:
        """Delete the object at `path`, with `body` as DeleteOptions."""
        return await self.request("DELETE", path, body=body)

    async def request(
        self,
        method: str,
        path: str,
        *,
        body: Object | None = None,
        params: Mapping[str, str] | None = None,
        kind: str = "application/json",
    ) -> Object:
        """Send one request and return the JSON of the answer.

        Raises:
            ApiError: the status is 400 or above, or there is no answer.
        """
        assert self._http is not None
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": kind} if data else {}
        with _as_api_error(f"{method} {path}"):
            async with self._http.request(
                method, self.access.server + path, data=data, params=params, headers=headers
            ) as answer:
                return _parse(answer.status, await answer.read())

    async def text(self, path: str, **params: str) -> str:
        """Read a text that is not JSON, such as `/readyz` or a pod's log."""
        assert self._http is not None
        async with self._http.get(self.access.server + path, params=params) as answer:
            body = await answer.text()
            if answer.status >= 400:
                raise ApiError(answer.status, answer.reason or "", body)
            return body

    async def watch(self, path: str, **params: str) -> AsyncIterator[tuple[str, Object]]:
        """List a collection and yield its changes, without an end.

        Yields `("SYNC", list)` at the start and after 410 Gone, then
        `("ADDED" | "MODIFIED" | "DELETED", object)`. A lost connection is opened again.

        Raises:
            ApiError: the API server answers 401, 403 or 404.
        """
        version: str | None = None
        while True:
            try:
                if version is None:
                    listed = await self.get(path, **params)
                    version = listed["metadata"]["resourceVersion"]
                    yield "SYNC", listed
                async for event, item in self._changes(path, params, version):
                    version = item["metadata"]["resourceVersion"]
                    if event != "BOOKMARK":
                        yield event, item
            except ApiError as error:
                if error.status in (401, 403, 404):
                    raise
                version = None if error.status == 410 else version
                await asyncio.sleep(0.2)

    async def _changes(
        self, path: str, params: Mapping[str, str], version: str
    ) -> AsyncIterator[tuple[str, Object]]:
        assert self._http is not None
        query = {**params, "watch": "1", "allowWatchBookmarks": "true", "resourceVersion": version}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=600)
        with _as_api_error(f"watch {path}"):
            async with self._http.get(
                self.access.server + path, params=query, timeout=timeout
            ) as answer:
                if answer.status >= 400:
                    _parse(answer.status, await answer.read())
                buffer = b""
                async for chunk in answer.content.iter_any():
                    *lines, buffer = (buffer + chunk).split(b"\n")
                    for line in lines:
                        change = json.loads(line)
                        if change["type"] == "ERROR":
                            status = change["object"]
                            raise ApiError(status["code"], status["reason"], status["message"])
                        yield change["type"], change["object"]


def _encoded(texts: Mapping[str, str | None]) -> dict[str, str]:
    """Return the texts that exist, in base64, by the names of a kubeconfig."""
    return {
        f"{name}-data": base64.b64encode(text.encode()).decode()
        for name, text in texts.items()
        if text
    }


@contextlib.contextmanager
def _as_api_error(call: str) -> Any:
    try:
        yield
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise ApiError(0, "Unreachable", f"{call}: {error}") from error


def _parse(status: int, body: bytes) -> Object:
    try:
        answer: Object = json.loads(body)
    except ValueError:
        answer = {"message": body.decode(errors="replace")}
    if status >= 400:
        raise ApiError(status, answer.get("reason", ""), answer.get("message", ""))
    return answer
