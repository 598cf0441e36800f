"""Answers cross-origin requests of browsers, before keys are checked: a preflight has no key.

OPTIONS with Access-Control-Request-Method ─▶ the answer to a preflight
any other request of a browser ─▶ app ─▶ its answer with Access-Control-Allow-Origin

No cookie authenticates a client, so credentials are never allowed.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, Final

import msgspec
from starlette.middleware.cors import CORSMiddleware

from vlm_worker.gateway.body import Receive
from vlm_worker.gateway.http_response import Send
from vlm_worker.gateway.rate_limits import HEADERS

METHODS: Final = ("GET", "POST")
"""The methods that the gateway serves."""
PREFLIGHT_SECONDS: Final = 600
"""How long a browser may keep the answer to a preflight."""
EXPOSED: Final = ("x-request-id", "retry-after", *HEADERS)
"""The headers of a response that a page may read besides those that it always may."""
_ORIGIN: Final = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/?#\s]+")


class Cors(msgspec.Struct, frozen=True):
    """`cors` in gateway.json.

    Attributes:
        allowed_origins: origins as browsers send them, or `*`; without any, there is no CORS.
        allowed_headers: headers of requests; without any, all.
    """

    allowed_origins: tuple[str, ...] = ()
    allowed_headers: tuple[str, ...] = ()


def problem_of(cors: Cors) -> str | None:
    """Return what no browser sends as its origin; None if all are possible."""
    for origin in cors.allowed_origins:
        if not _ORIGIN.fullmatch(origin):
            return f"cors.allowed_origins: '{origin}' is neither * nor SCHEME://HOST[:PORT]"
    return None


class CorsApp:
    """Wraps an ASGI application; `current` returns the settings that apply to the next request."""

    def __init__(self, app: Any, current: Callable[[], Cors]) -> None:
        self._app = app
        self._current = current
        self._with = functools.lru_cache(maxsize=1)(self._middleware)

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        cors = self._current()
        app = self._with(cors) if cors.allowed_origins else self._app
        await app(scope, receive, send)

    def _middleware(self, cors: Cors) -> Any:
        return CORSMiddleware(
            self._app,
            allow_origins=cors.allowed_origins,
            allow_methods=METHODS,
            allow_headers=cors.allowed_headers or ("*",),
            expose_headers=EXPOSED,
            max_age=PREFLIGHT_SECONDS,
        )
