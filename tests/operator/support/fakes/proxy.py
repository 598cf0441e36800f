"""A reverse proxy in front of an API server that does what networks and API servers do at times.

operator ─ HTTP ─▶ FaultProxy ─ HTTPS ─▶ API server
                      └ rules of faults.py

A rule about a watch meets its events one by one, so that it also reaches watches that are open.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import ssl
from collections.abc import AsyncIterator

import aiohttp
from aiohttp import web

from support.fakes import faults
from support.fakes.faults import Call, Fault, Rule

_HOP = {"host", "connection", "transfer-encoding", "content-length", "accept-encoding"}
_CHANGES = ("ADDED", "MODIFIED", "DELETED")
_CLOSE_SECONDS = 0.1  # for handlers to notice that their connections are gone


class FaultProxy:
    """Forwards all calls except those of its rules; an async context manager of one event loop.

    Args:
        server: the API server's URL.
        trust: how to trust it; clients' tokens are passed on.
    """

    def __init__(self, server: str, trust: ssl.SSLContext | bool) -> None:
        self._server = server
        self._trust = trust
        self._http: aiohttp.ClientSession | None = None
        self._runner: web.AppRunner | None = None
        self._open: dict[asyncio.Transport, Call] = {}
        self._port = 0
        self.rules: list[Rule] = []
        self.calls: list[Call] = []
        self.watches: dict[str, int] = {}  # opened so far, by resource

    @property
    def url(self) -> str:
        """Where clients reach it; the same again after `start`."""
        return f"http://127.0.0.1:{self._port}"

    async def __aenter__(self) -> FaultProxy:
        """Listen on a free port."""
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=self._trust, limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
        )
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Close every connection."""
        await self.stop()
        assert self._http is not None
        await self._http.close()

    async def start(self) -> None:
        """Listen, after `stop` on the same port."""
        application = web.Application(client_max_size=1 << 24)
        application.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=_CLOSE_SECONDS)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True)
        await site.start()
        self._port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Break every connection and refuse new ones, as a server that is down."""
        for transport in list(self._open):
            transport.abort()
        assert self._runner is not None
        await self._runner.cleanup()

    def add(self, rule: Rule) -> Rule:
        """Obey a rule from now on; returns it, for its count."""
        self.rules.append(rule)
        return rule

    def clear(self) -> None:
        """Forward everything again; a silent watch stays silent until its client gives up."""
        self.rules.clear()

    def break_watches(self, plural: str) -> None:
        """Break the open watches of a resource, so that their clients come again."""
        for transport, call in list(self._open.items()):
            if (call.verb, call.plural) == ("watch", plural):
                transport.abort()

    def _fault(self, call: Call, *, of_call: bool) -> Fault | None:
        for rule in self.rules:
            if isinstance(rule.fault, faults.OF_CALLS) is of_call and rule.meets(call):
                return rule.fault
        return None

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        call = Call.of(request)
        self.calls.append(call)
        transport = request.transport
        assert isinstance(transport, asyncio.Transport)
        self._open[transport] = call
        try:
            fault = self._fault(call, of_call=True)
            if isinstance(fault, faults.Refused):
                return web.json_response(_status(fault.status, fault.reason), status=fault.status)
            return await self._forward(request, call, lost=fault is not None)
        except aiohttp.ClientError:
            transport.abort()
            return web.Response(status=502)
        finally:
            self._open.pop(transport, None)

    async def _forward(self, request: web.Request, call: Call, *, lost: bool) -> web.StreamResponse:
        assert self._http is not None
        headers = {key: value for key, value in request.headers.items() if key.lower() not in _HOP}
        headers["Accept-Encoding"] = "identity"
        async with self._http.request(
            request.method, self._server + request.raw_path, headers=headers,
            data=await request.read() or None, allow_redirects=False,
        ) as answer:  # fmt: skip
            kind = {"Content-Type": answer.headers.get("Content-Type", "application/json")}
            if call.verb == "watch" and answer.status == 200:
                return await self._stream(request, call, answer, kind)
            body = await answer.read()
            if lost:
                assert request.transport is not None
                request.transport.close()
            return web.Response(status=answer.status, body=body, headers=kind)

    async def _stream(
        self,
        request: web.Request,
        call: Call,
        answer: aiohttp.ClientResponse,
        headers: dict[str, str],
    ) -> web.StreamResponse:
        """Pass a watch on, event by event."""
        self.watches[call.plural] = self.watches.get(call.plural, 0) + 1
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        draws: dict[int, random.Random] = {}
        with contextlib.suppress(ConnectionError):
            async for line in _lines(answer.content):
                change = json.loads(line)["type"] in _CHANGES
                fault = self._fault(call, of_call=False) if change else None
                match fault:
                    case None:
                        await response.write(line)
                    case faults.Chaos():
                        draw = draws.setdefault(fault.seed, random.Random(fault.seed))
                        await _muddle(response, line, fault, draw)
                    case faults.InStream():
                        error = {"type": "ERROR", "object": _status(fault.code, fault.reason)}
                        await response.write(json.dumps(error).encode() + b"\n")
                        break
                    case faults.HalfLine():
                        await response.write(line[: len(line) // 2])
                        break
                    case faults.Silence():
                        async for _ in _lines(answer.content):
                            if request.transport is None:
                                break
                        break
        return response


async def _muddle(
    response: web.StreamResponse, line: bytes, fault: faults.Chaos, draw: random.Random
) -> None:
    luck = draw.random()
    await asyncio.sleep(draw.random() * fault.late_seconds)
    if luck < fault.dropped:
        return
    await response.write(line * (2 if luck < fault.dropped + fault.doubled else 1))


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield whole lines; an object may be longer than a reader's own limit."""
    rest = b""
    async for piece in content.iter_any():
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            yield line + b"\n"


def _status(code: int, reason: str) -> dict[str, object]:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "reason": reason,
        "message": f"{reason}, says the fault proxy",
        "code": code,
    }
