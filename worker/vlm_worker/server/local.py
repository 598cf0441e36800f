"""The client of a gateway that runs in its worker's process: tokens of answers go past gRPC.

    role ─▶ Service.decode, a task ─▶ EventStream ─▶ gateway       a token, on one loop
    role ◀══ gRPC ◀══ gateway                                      all that is asked once a request

A token over gRPC is a message made and read, two ways through sockets, and threads that wake for
them on the cores that the kernels compute on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from vlm_worker.client import WorkerClient
from vlm_worker.engine.events import EventStream
from vlm_worker.errors import PeerLostError
from vlm_worker.server.service import Service
from vlm_worker.settings.timers import Timers
from vlm_worker.wire import calls
from vlm_worker.wire.errors import error_of, status_of


class LocalClient(WorkerClient):
    """Of the worker whose `service` this process has, at its own `address`."""

    def __init__(self, address: str, *, timers: Timers, service: Service) -> None:
        super().__init__(address, timers=timers)
        self._service = service
        self._answering: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """End the connection and every call on it."""
        for answering in self._answering:
            answering.cancel()
        await super().close()

    async def decode(
        self, call: calls.DecodeCall, *, timeout: float
    ) -> AsyncGenerator[calls.Reply[calls.DecodeEvent]]:
        """As over gRPC: the same replies, errors and deadline; giving up cancels the call."""
        replies: EventStream[calls.Reply[calls.DecodeEvent]] = EventStream(call.request.key)
        answering = asyncio.create_task(self._service.decode(call, replies.push))
        self._answering.add(answering)
        answering.add_done_callback(self._ended)
        answering.add_done_callback(lambda _: replies.close_with())
        deadline = asyncio.get_running_loop().call_later(timeout, answering.cancel)
        try:
            async for reply in replies:
                yield reply
            if answering.cancelled():
                raise PeerLostError(f"{self.address}: the call ended before its answer")
            if error := answering.exception():
                assert isinstance(error, Exception)
                raise error_of(*status_of(error), peer=self.address)
        finally:
            deadline.cancel()
            answering.cancel()

    def _ended(self, answering: asyncio.Task[None]) -> None:
        self._answering.discard(answering)
        if not answering.cancelled():
            answering.exception()  # whoever gave up does not ask for it
