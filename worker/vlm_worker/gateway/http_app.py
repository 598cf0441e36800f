"""Routes HTTP paths. Middlewares answer preflights, assign request ids and check keys.

CorsApp
   ▼
AuthMiddleware ─▶ Router ─▶ /v1/chat/completions  /v1/completions  /v1/responses   Endpoint
                       /tokenize  /detokenize                                    without workers
                       /v1/models  /v1/models/{id}
                       /healthz  /readyz  /health     /stats and /metrics on the admin port only
"""

from __future__ import annotations

import re
import secrets
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response as HttpResponse
from starlette.routing import Route

from vlm_worker.gateway.access_log import Access
from vlm_worker.gateway.api import errors
from vlm_worker.gateway.api.errors import ApiError
from vlm_worker.gateway.body import Receive
from vlm_worker.gateway.context import GatewayContext
from vlm_worker.gateway.cors import CorsApp
from vlm_worker.gateway.endpoint import Endpoint
from vlm_worker.gateway.http_response import Response, Send, encode
from vlm_worker.gateway.responses_api.dialect import ResponsesDialect
from vlm_worker.gateway.tokenization import DetokenizeEndpoint, TokenizeEndpoint

OPEN_PATHS = frozenset({"/healthz", "/readyz", "/health"})
_SAFE_ID = re.compile(r"[A-Za-z0-9._:/=+-]{1,64}")


def public_app(context: GatewayContext) -> CorsApp:
    pages = Pages(context)
    router = Starlette(
        routes=[
            Route("/v1/chat/completions", Endpoint(context, "chat"), methods=["POST"]),
            Route("/v1/responses", Endpoint(context, "chat", ResponsesDialect), methods=["POST"]),
            Route("/v1/completions", Endpoint(context, "completion"), methods=["POST"]),
            Route("/tokenize", TokenizeEndpoint(context), methods=["POST"]),
            Route("/detokenize", DetokenizeEndpoint(context), methods=["POST"]),
            Route("/v1/models", pages.models, methods=["GET"]),
            Route("/v1/models/{model_id:path}", pages.model, methods=["GET"]),
            Route("/health", pages.readyz, methods=["GET"]),  # vLLM's name, which its clients ask
            *pages.common,
        ],
        exception_handlers={ApiError: _refused, HTTPException: _not_found},
    )
    router.router.redirect_slashes = False
    watcher = context.config_watcher
    return CorsApp(AuthMiddleware(router, context), lambda: watcher.now.config.cors)


def admin_app(context: GatewayContext) -> Starlette:
    """Return the application for the operator and Prometheus, inside the cluster."""
    pages = Pages(context)
    return Starlette(
        routes=[
            Route("/stats", pages.stats, methods=["GET"]),
            Route("/metrics", pages.metrics, methods=["GET"]),
            *pages.common,
        ],
        exception_handlers={HTTPException: _not_found},
    )


class AuthMiddleware:
    """Assigns a request id. If keys are configured, requires one except for the open paths.

    The checked path is the routed one, never one rebuilt from headers.
    """

    def __init__(self, app: Any, context: GatewayContext) -> None:
        self._app = app
        self._context = context

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise ValueError(f"a scope of type {scope['type']!r} is not served")
        headers = dict(scope["headers"])
        arrived, clock = self._context.clock(), self._context.clock
        request_id = secrets.token_hex(16)
        access = Access(request_id, method=_method(scope["method"]))
        client_id = headers.get(b"x-request-id", b"").decode("latin-1")

        async def send_with_id(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                access.status = message["status"]
                named = (b"x-request-id", request_id.encode())
                message = {**message, "headers": [*message.get("headers", ()), named]}
            await send(message)

        tenant = self._tenant(scope["path"], headers.get(b"authorization"))
        access.tenant = tenant or ""
        try:
            if tenant is None:
                self._context.meters.request("invalid")
                refusal = errors.unauthorized()
                access.outcome, access.code = refusal.outcome, refusal.code or ""
                await Response(send_with_id).fail(refusal)
                return
            scope.setdefault("state", {}).update(
                access=access,
                request_id=request_id,
                tenant=tenant,
                client_request_id=client_id if _SAFE_ID.fullmatch(client_id) else "",
                traceparent=headers.get(b"traceparent", b"").decode("latin-1"),
            )
            await self._app(scope, receive, send_with_id)
        finally:
            config = self._context.config_watcher.now.config
            if config.access_log and scope["path"] not in OPEN_PATHS:
                route = scope.get("route")
                access.endpoint = "" if route is None else route.path_format
                access.log(arrived=arrived, clock=clock)

    def _tenant(self, path: str, authorization: bytes | None) -> str | None:
        keys = self._context.config_watcher.now.keys
        if keys is None or path in OPEN_PATHS:
            return ""
        return keys.tenant_of(None if authorization is None else authorization.decode("latin-1"))


class Pages:
    """Handlers of all paths except the generation endpoints."""

    def __init__(self, context: GatewayContext) -> None:
        self._context = context
        self.common = [
            Route("/healthz", self.healthz, methods=["GET"]),
            Route("/readyz", self.readyz, methods=["GET"]),
        ]

    async def models(self, _: Request) -> HttpResponse:
        return _json({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> HttpResponse:
        self._context.preparer.check_model(request.path_params["model_id"])
        return _json(self._model())

    async def healthz(self, _: Request) -> HttpResponse:
        return _page(self._context.unhealthy_reason, otherwise="ok")

    async def readyz(self, _: Request) -> HttpResponse:
        """Answer whether the gateway is ready; ok names the stages without a ready pod."""
        missing = self._context.missing_stages()
        degraded = f"ok, but no ready pod for: {', '.join(missing)}"
        return _page(self._context.not_ready_because(), otherwise=degraded if missing else "ok")

    async def metrics(self, _: Request) -> HttpResponse:
        context = self._context
        text = context.meters.exposition(
            num_inflight=context.num_inflight,
            accepting=not context.draining,
            num_lent=context.registry.num_lent_total,
            has_valid_settings=not context.config_watcher.problem,
        )
        return HttpResponse(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def stats(self, _: Request) -> HttpResponse:
        """Return the document of `docs/stats.schema.json`, version 1."""
        return _json(self._context.stats())

    def _model(self) -> dict[str, Any]:
        context = self._context
        name = context.settings.served_name
        return {
            "id": name,
            "object": "model",
            "created": context.created,
            "owned_by": "triptych",
            "root": name,
            "parent": None,
            "max_model_len": context.preparer.context(context.config_watcher.now.config),
        }


def _page(unhealthy_reason: str | None, *, otherwise: str) -> HttpResponse:
    status = 200 if unhealthy_reason is None else 503
    return HttpResponse(
        f"{unhealthy_reason or otherwise}\n", status_code=status, media_type="text/plain"
    )


def _method(method: str) -> str:
    """Return a method that this server knows; any other is a client's text."""
    return method if method in ("GET", "HEAD", "POST", "OPTIONS") else ""


async def _refused(request: Request, error: Exception) -> HttpResponse:
    assert isinstance(error, ApiError)
    return _refusal(request, error, error.headers)


async def _not_found(request: Request, error: Exception) -> HttpResponse:
    """Convert Starlette's errors, such as 404 and 405, to OpenAI's format."""
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    code, message = "invalid_request", "The request is not understood."
    if error.status_code == 404:
        paths = ", ".join(route.path_format for route in request.app.routes)
        code, message = "unknown_path", f"There is nothing at this path; there are {paths}."
    elif error.status_code == 405:
        code, message = "method_not_allowed", f"This path takes {headers['Allow']}."
    return _refusal(request, ApiError(error.status_code, message, code=code), headers)


def _refusal(request: Request, error: ApiError, headers: dict[str, str]) -> HttpResponse:
    """Return the response of a page to an error; its code goes to the access log."""
    if "access" in request.scope.get("state", {}):  # the admin application has no access log
        access: Access = request.state.access
        access.code = error.code or ""
    return _json(error.body, status=error.status, headers=headers)


def _json(
    body: dict[str, Any], *, status: int = 200, headers: dict[str, str] | None = None
) -> HttpResponse:
    return HttpResponse(
        encode(body), status_code=status, headers=headers, media_type="application/json"
    )
