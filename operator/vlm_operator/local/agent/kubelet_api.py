"""A node's HTTPS endpoint, for the API server alone: `kubectl logs`.

kubectl ─▶ API server ─▶ https://<node address>:10250/containerLogs/<namespace>/<pod>/<container>
"""

import ssl
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

from aiohttp import web

from vlm_operator.local.pki import Authority, Pair

from .container import Container
from .logs import LogOptions
from .pod import Pod
from .status import Waiting

API_SERVER = "kube-apiserver-kubelet-client"
FindPod = Callable[[str, str], Pod | None]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class KubeletApi:
    """What the API server may ask a node for. `find_pod` looks a pod up by namespace and name."""

    def __init__(self, find_pod: FindPod) -> None:
        self._find_pod = find_pod

    def application(self) -> web.Application:
        """Return the handlers."""
        app = web.Application(middlewares=[_api_server_only])
        app.router.add_get("/containerLogs/{namespace}/{pod}/{container}", self._logs)
        app.router.add_get("/healthz", _healthy)
        return app

    async def _logs(self, request: web.Request) -> web.StreamResponse:
        container = self._container(request)
        options = LogOptions.parse(request.query, now=datetime.now(UTC))
        index = -2 if request.query.get("previous") == "true" else -1
        if len(container.logs) < -index:
            raise web.HTTPBadRequest(text=_no_log(container, previous=index == -2))
        response = web.StreamResponse(headers={"Content-Type": "text/plain"})
        await response.prepare(request)
        async for piece in container.logs[index].read(options):
            await response.write(piece)
        await response.write_eof()
        return response

    def _container(self, request: web.Request) -> Container:
        where = request.match_info
        pod = self._find_pod(where["namespace"], where["pod"])
        container = pod.container(where["container"]) if pod else None
        if container is None:
            raise web.HTTPNotFound(text=f"no container {where['container']} of pod {where['pod']}")
        return container


def server_context(authority: Authority, pair: Pair) -> ssl.SSLContext:
    """Return TLS that shows `pair` and asks the client for a certificate of the same CA."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cadata=authority.certificate)
    context.load_cert_chain(pair.certificate, pair.key)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


@web.middleware
async def _api_server_only(request: web.Request, handler: Handler) -> web.StreamResponse:
    certificate = request.transport.get_extra_info("peercert") if request.transport else None
    names = [value for part in (certificate or {}).get("subject", ()) for _, value in part]
    if API_SERVER not in names:
        raise web.HTTPForbidden(text="only the API server may ask")
    return await handler(request)


async def _healthy(_: web.Request) -> web.Response:
    return web.Response(text="ok")


def _no_log(container: Container, *, previous: bool) -> str:
    name, state = container.view.name, container.view.state
    if previous:
        return f'previous terminated container "{name}" not found'
    reason = state.reason if isinstance(state, Waiting) else "ContainerCreating"
    return f'container "{name}" is waiting to start: {reason}'
