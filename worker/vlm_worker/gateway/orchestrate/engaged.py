"""The pods of one attempt: counted as in use, blamed when they fail, told when it is over."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Self

from vlm_worker.client import WorkerClient
from vlm_worker.errors import DrainingError, WorkerError
from vlm_worker.gateway.orchestrate.background import Background
from vlm_worker.gateway.registry import Registry
from vlm_worker.route import Candidate
from vlm_worker.types import RequestKey


class Engaged:
    """Those that the attempt `key` has called; with its end as a context they are let go.

    Attributes:
        blamed: boot ids of the pods that failed it.
        decoding: tokens come from decode, which needs nothing of its producer any more.
    """

    def __init__(self, key: RequestKey, *, registry: Registry, background: Background) -> None:
        self.blamed: set[bytes] = set()
        self.decoding = False
        self._key = key
        self._registry = registry
        self._background = background
        self._used = contextlib.ExitStack()
        self._clients: dict[str, WorkerClient] = {}

    def __enter__(self) -> Self:
        """Nobody is engaged yet."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Count them as in use no more."""
        self._used.close()

    def client(self, pod: Candidate) -> WorkerClient:
        """A pod's client, counted as used by this attempt until it ends."""
        client = self._clients.get(pod.name)
        if client is None:
            client = self._used.enter_context(self._registry.use(pod.name))
            self._clients[pod.name] = client
        return client

    @contextlib.contextmanager
    def blame(self, pod: Candidate, *producers: Candidate) -> Iterator[None]:
        """Note who failed: the pod that was called, and those that it had to pull from."""
        try:
            yield
        except DrainingError:
            self._registry.refused(pod.boot_id)
            self.blamed.add(pod.boot_id)
            raise
        except WorkerError:
            self.blamed.add(pod.boot_id)
            if not self.decoding:
                self.blamed.update(producer.boot_id for producer in producers)
            raise

    def cancel_everywhere(self) -> None:
        """Have what the attempt holds freed, in the background."""
        for name in self._clients:
            self._background.start(self._cancel(name), name=f"cancel {self._key.request_id}")

    async def _cancel(self, name: str) -> None:
        """Free it on one pod; a pod that is gone holds nothing."""
        with contextlib.suppress(WorkerError), self._registry.use(name) as client:
            await client.cancel(self._key, timeout=self._registry.timers.cancel)
