"""Blocking work beside the loop, on threads that do not keep the process alive."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from vlm_worker.serve.signals import leave

logger = logging.getLogger(__name__)

T = TypeVar("T")


async def result_unless(stopping: asyncio.Future[Any], work: Callable[[], T]) -> T:
    """What the work returns; a signal meanwhile ends the process: it holds nothing yet."""
    loading = asyncio.wrap_future(_in_thread(work))
    await asyncio.wait([loading, stopping], return_when=asyncio.FIRST_COMPLETED)
    if stopping.done():
        logger.info("stopped while loading")
        leave(0)
    return loading.result()


def _in_thread(work: Callable[[], T]) -> concurrent.futures.Future[T]:
    future: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001  it is raised where the result is awaited
            future.set_exception(error)

    threading.Thread(target=run, name="loading", daemon=True).start()
    return future
