"""Writes one log line per request, without content: who, what, how much and how long.

Probes have none, and neither do preflights of browsers, which are answered before keys are checked.

No field holds text of a client: neither prompts, answers and headers, nor paths and error messages,
which may quote them. A tenant is the name of a key. `endpoint` is a route of this server.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class Access:
    """The content of one line. The middleware and then the endpoint of the request write it.

    Attributes:
        endpoint: the route that served the request; "" if none did.
        model: the served name, if the request named it.
        status: status of the response; 0 if the client left before it began.
        code: code of the error; "" without an error.
        ttft_seconds: time to the first token; None without one.
    """

    request_id: str
    tenant: str = ""
    method: str = ""
    endpoint: str = ""
    model: str = ""
    status: int = 0
    outcome: str = ""
    code: str = ""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    ttft_seconds: float | None = None

    def log(self, *, arrived: float, clock: Callable[[], float]) -> None:
        """Write the line of a request that arrived at `arrived` and ends now."""
        if not self.outcome:  # a page without an endpoint of its own
            self.outcome = _outcome(self.status)
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        logger.info("access", extra={**fields, "seconds": clock() - arrived})


def _outcome(status: int) -> str:
    if status < 400:
        return "ok" if status else "cancelled"
    return "invalid" if status < 500 else "error"
