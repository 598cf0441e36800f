"""Looks up hosts of images on threads of its own, within limits of time and number.

    resolve(host) ─▶ the tenant's turn ─▶ a thread: getaddrinfo ─▶ addresses
         └──── RESOLVE_SECONDS in all ────────┘    └─▶ its slot is free when the thread has ended

libc cannot be interrupted: a look-up that hangs has its thread until libc gives up. On the loop's
default executor, some such look-ups would stop tokenization and all else that uses it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import errno
import socket
from collections.abc import Callable
from typing import Any, Final

from aiohttp.abc import AbstractResolver, ResolveResult

from vlm_worker.gateway.fair_slots import FairSlots
from vlm_worker.gateway.memory import Bound

RESOLVE_SECONDS: Final = 5.0
LOOKUPS: Final = 32
"""Look-ups of a gateway at once, those included that hang and whose fetch has ended."""
MAX_WAITING: Final = 64

TENANT: Final = contextvars.ContextVar("TENANT", default="")
"""The tenant of the fetch that runs: aiohttp passes nothing of ours to a resolver."""

_NUMERIC: Final = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
_NAME_NUMERIC: Final = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV


class ThreadResolver(AbstractResolver):
    """aiohttp's resolver of a gateway. `look_up` has the signature of `socket.getaddrinfo`."""

    def __init__(
        self, is_shared: Callable[[], bool], *, look_up: Callable[..., Any] | None = None
    ) -> None:
        self._look_up = look_up
        self._threads = concurrent.futures.ThreadPoolExecutor(LOOKUPS, thread_name_prefix="dns")
        self._slots = FairSlots(
            LOOKUPS,
            max_waiting=MAX_WAITING,
            bound=Bound.TENANT_FETCHES,
            what="look-ups of hosts",
            is_shared=is_shared,
        )

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Return the addresses of a host.

        Raises:
            OSError: it has none; TimeoutError, with an errno, if they are not known in time.
            FullError: too many look-ups of the tenant wait.
        """
        tenant, loop = TENANT.get(), asyncio.get_running_loop()
        try:
            async with asyncio.timeout(RESOLVE_SECONDS):
                await self._slots.take(tenant)
                try:
                    running = loop.run_in_executor(
                        self._threads, self._addresses, host, port, family
                    )
                except BaseException:
                    self._slots.give(tenant)
                    raise
                running.add_done_callback(lambda _: self._slots.give(tenant))
                return await asyncio.shield(running)
        except TimeoutError as error:
            raise TimeoutError(errno.ETIMEDOUT, "the host is not resolved in time") from error

    async def close(self) -> None:
        """Take no more look-ups. Those that hang end when libc gives up."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _addresses(self, host: str, port: int, family: int) -> list[ResolveResult]:
        """Blocks."""
        look_up = self._look_up or socket.getaddrinfo
        flags = socket.AI_ADDRCONFIG
        infos = look_up(host, port, type=socket.SOCK_STREAM, family=family, flags=flags)
        return [
            ResolveResult(
                hostname=host,
                host=_numeric(found, address),
                port=port,
                family=found,
                proto=protocol,
                flags=_NUMERIC,
            )
            for found, _, protocol, _, address in infos
        ]


def _numeric(family: int, address: Any) -> str:
    """The text of an address, with the zone of a link-local one."""
    if family == socket.AF_INET6 and address[3]:
        return socket.getnameinfo(address, _NAME_NUMERIC)[0]
    return str(address[0])
