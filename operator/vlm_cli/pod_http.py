"""Reads HTTP pages of pods through port-forward. A pod keeps its forwarded port between reads."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType

import aiohttp

from vlm_cli.access import Access
from vlm_cli.forward import forward
from vlm_cli.output import CliError

TIMEOUT_SECONDS = 5.0
MAX_BYTES = 8 << 20
_MAX_CONCURRENT = 16


class PodReadError(Exception):
    """A pod has no answer, or an error status; the text is the reason."""


class PodReader:
    """GET requests to pods of one namespace, at most 16 at a time."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._session: aiohttp.ClientSession | None = None
        self._forwards: dict[tuple[str, int], tuple[str, contextlib.AsyncExitStack]] = {}
        self._slots = asyncio.Semaphore(_MAX_CONCURRENT)

    async def __aenter__(self) -> PodReader:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
        self._session = aiohttp.ClientSession(timeout=timeout)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._session is not None:
            await self._session.close()
        for key in list(self._forwards):
            await self._forget(key)

    async def get(self, pod: str, *, port: int, path: str) -> bytes:
        """Return the body of one page.

        Raises:
            PodReadError: port-forward is refused, the pod does not answer within
                `TIMEOUT_SECONDS`, or the answer has an error status or exceeds `MAX_BYTES`.
        """
        assert self._session is not None
        async with self._slots:
            try:
                async with asyncio.timeout(TIMEOUT_SECONDS):
                    url = await self._url(pod, port)
                    async with self._session.get(f"{url}{path}", allow_redirects=False) as answer:
                        if answer.status != 200:
                            raise PodReadError(f"{path} has status {answer.status}")
                        body = bytearray()
                        async for piece in answer.content.iter_any():
                            body += piece
                            if len(body) > MAX_BYTES:
                                raise PodReadError(f"{path} exceeds {MAX_BYTES >> 20} MiB")
                        return bytes(body)
            except CliError as error:
                raise PodReadError(error.problem) from error
            except TimeoutError as error:
                await self._forget((pod, port))
                text = f"{path} has no answer within {TIMEOUT_SECONDS:.0f} s"
                raise PodReadError(text) from error
            except (aiohttp.ClientError, OSError) as error:
                await self._forget((pod, port))
                raise PodReadError(f"{path} has no answer: {type(error).__name__}") from error

    async def _url(self, pod: str, port: int) -> str:
        key = pod, port
        if key not in self._forwards:
            stack = contextlib.AsyncExitStack()
            url = await stack.enter_async_context(forward(self._access, pod=pod, port=port))
            self._forwards[key] = url, stack
        return self._forwards[key][0]

    async def _forget(self, key: tuple[str, int]) -> None:
        """Close a pod's port; the next read opens another."""
        if found := self._forwards.pop(key, None):
            await found[1].aclose()
