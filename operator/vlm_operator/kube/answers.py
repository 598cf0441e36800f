"""Parses answers of the API server: objects, events of a watch, refusals as typed errors."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from kubernetes.aio.client.rest import ApiException

from vlm_operator.cluster import Kind, Manifest, WatchEvent, WatchEventType
from vlm_operator.errors import ClusterError, ConflictError, NamespaceEndsError, UnavailableError


def items(kind: Kind, answer: Manifest) -> list[Manifest]:
    """Return the items of a list with `apiVersion` and `kind`, which the API server omits."""
    return [{"apiVersion": kind.api_version, "kind": kind.kind, **item} for item in answer["items"]]


async def lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield complete lines of any length.

    Raises:
        json.JSONDecodeError: the last line has no newline.
    """
    rest = b""
    async for piece in content.iter_any():
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            yield line
    if rest:
        raise json.JSONDecodeError("a line without its end", rest.decode(errors="replace"), 0)


def event(said: Manifest) -> WatchEvent:
    """Parse one line of a watch.

    Raises:
        ClusterError: the line is an ERROR event.
        UnavailableError: the line is not an event of a watch.
    """
    try:
        item = said["object"]
        if said["type"] != "ERROR":
            return WatchEvent(WatchEventType(said["type"]), item)
        code = int(item["code"])
    except (KeyError, TypeError, ValueError) as error:
        raise UnavailableError(0, "Garbled", f"no event of a watch: {error}") from error
    raise _typed(code, str(item.get("reason")), str(item.get("message")))


@contextlib.asynccontextmanager
async def typed_errors() -> AsyncIterator[None]:
    """Convert the client's exceptions to `ClusterError` and its subclasses."""
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
    """Convert the Status object of a refusal to a typed error."""
    reason, message = str(error.reason), str(error.body or error.reason)
    with contextlib.suppress(json.JSONDecodeError, TypeError, AttributeError):
        status = json.loads(error.body)
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
