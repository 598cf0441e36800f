"""As much of an API server as a pod watch sees, with the faults that real ones have."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from aiohttp import web

PATH = "/api/v1/namespaces/{namespace}/pods"


COMPAT = "ours"
REPLICA_SET: dict[str, Any] = {
    "apiVersion": "apps/v1",
    "kind": "ReplicaSet",
    "name": "demo-decode-1",
    "uid": "00000000-0000-0000-0000-000000000001",
    "controller": True,
}


def pod(
    name: str,
    *,
    role: str = "decode",
    ip: str | None = "127.0.0.5",
    ready: str = "True",
    accepting: str | None = None,
    deleted: bool = False,
    owner: dict[str, Any] | None = REPLICA_SET,
    compat: str | None = COMPAT,
    **labels: str,
) -> dict[str, Any]:
    conditions = [{"type": "ContainersReady", "status": ready}]
    if accepting is not None:
        conditions.append({"type": "triptych.dev/accepting", "status": accepting})
    own = {"triptych.dev/service": "demo", "triptych.dev/role": role, **labels}
    if compat is not None:
        own["triptych.dev/compat"] = compat
    metadata: dict[str, Any] = {"name": name, "labels": own}
    if owner is not None:
        metadata["ownerReferences"] = [owner]
    if deleted:
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    status = {"conditions": conditions} | ({"podIP": ip} if ip else {})
    return {"metadata": metadata, "status": status}


class ApiServer:
    """Lists and watches pods. Versions grow by one with every change.

    Attributes:
        refuse: statuses of the next requests, oldest first.
        requests: their paths with query, in order.
        tokens: the bearer tokens that came.
    """

    def __init__(self) -> None:
        self.refuse: list[int] = []
        self.requests: list[dict[str, str]] = []
        self.tokens: list[str | None] = []
        self._pods: dict[str, dict[str, Any]] = {}
        self._events: list[dict[str, Any]] = []
        self._version = 100
        self._oldest = 100
        self._changed = asyncio.Condition()
        self._watching: set[asyncio.Event] = set()
        self._raw: list[bytes] = []
        self.url = ""

    async def __aenter__(self) -> ApiServer:
        app = web.Application()
        app.router.add_get(PATH, self._pods_of)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._runner.cleanup()

    async def put(self, value: dict[str, Any]) -> None:
        name = value["metadata"]["name"]
        await self._change("MODIFIED" if name in self._pods else "ADDED", value)
        self._pods[name] = value

    async def delete(self, name: str) -> None:
        await self._change("DELETED", self._pods.pop(name))

    async def compact(self) -> None:
        """Forget old versions: who watches from one gets 410."""
        async with self._changed:
            self._version += 10
            self._oldest = self._version
            self._events.clear()

    async def cut(self, *last: bytes) -> None:
        """End the watch that there is, with these bytes as its last."""
        await self.until(lambda: bool(self._watching))
        async with self._changed:
            ending = self._watching
            self._watching = set()
            self._raw = list(last)
            self._changed.notify_all()
        await asyncio.gather(*(end.wait() for end in ending))

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def _change(self, kind: str, value: dict[str, Any]) -> None:
        async with self._changed:
            self._version += 1
            value["metadata"]["resourceVersion"] = str(self._version)
            self._events.append({"type": kind, "object": json.loads(json.dumps(value))})
            self._changed.notify_all()

    async def _pods_of(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(dict(request.query))
        self.tokens.append(request.headers.get("authorization"))
        if self.refuse:
            return web.Response(status=self.refuse.pop(0))
        if "watch" in request.query:
            return await self._watch(request)
        body = {
            "metadata": {"resourceVersion": str(self._version)},
            "items": list(self._pods.values()),
        }
        return web.json_response(body)

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        since, ended = int(request.query["resourceVersion"]), asyncio.Event()
        if since < self._oldest:
            gone = {"type": "ERROR", "object": {"kind": "Status", "code": 410}}
            await response.write(json.dumps(gone).encode() + b"\n")
            return response
        self._watching.add(ended)
        try:
            while True:
                since = await self._send_events(response, since, ended)
                if ended not in self._watching:
                    for raw in self._raw:
                        await response.write(raw)
                    return response
        finally:
            self._watching.discard(ended)
            ended.set()

    async def _send_events(
        self, response: web.StreamResponse, since: int, ended: asyncio.Event
    ) -> int:
        """Wait for something new; the version up to which all is sent."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: ended not in self._watching or self._version > since
            )
            if ended not in self._watching:
                return since
            version = self._version
            events = [(int(e["object"]["metadata"]["resourceVersion"]), e) for e in self._events]
        for of, event in events:
            if of > since:
                line = json.dumps(event).encode() + b"\n"
                await response.write(line[:10])  # an event may come in pieces
                await response.write(line[10:])
        return version
