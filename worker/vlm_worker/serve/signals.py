"""SIGTERM and SIGINT: the first asks to stop, the second does not ask."""

from __future__ import annotations

import asyncio
import logging
import os
import signal

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """Listens while inside. `stop` is set by the first signal; the second ends the process."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()

    def __enter__(self) -> StopSignals:
        """Listen on the running loop."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._received, number)
        return self

    def __exit__(self, *exc: object) -> None:
        """Listen no more."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.remove_signal_handler(number)

    def _received(self, number: int) -> None:
        if self.stop.is_set():
            leave(128 + number)
        self.stop.set()


def leave(code: int) -> None:
    """End the process now: threads that load or compute are not waited for."""
    logging.shutdown()
    os._exit(code)
