"""Client for a gateway in the worker's process: Decode replies bypass gRPC.

    role ─▶ Service.decode, a task ─▶ EventStream ─▶ gateway       per token, on one loop
    role ◀══ gRPC ◀══ gateway                                      calls once per request

Over gRPC each token is serialized and parsed and passes two sockets. It also wakes threads on the
cores that run the kernels.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from vlm_worker.client import WorkerClient
from vlm_worker.engine.events import EventStream
from vlm_worker.errors import PeerLostError
from vlm_worker.server.service import Service
from vlm_worker.settings.timers import Timers
from vlm_worker.wire import messages as calls
from vlm_worker.wire.status import error_of, status_of


class LocalClient(WorkerClient):
    """Client of the worker in this process, with its `service` and its `address`."""

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
        """Decode with the same replies, errors and deadline as gRPC; closing cancels the call."""
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
            answering.exception()  # marks the error as retrieved if the caller has left
