"""The pods of one attempt: counted while in use, recorded if they fail, cancelled at its end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator
from typing import Self

from vlm_worker.client import WorkerClient
from vlm_worker.errors import DrainingError, WorkerError
from vlm_worker.gateway.pod_registry import Registry
from vlm_worker.route import Candidate
from vlm_worker.types import RequestKey


class PodsInUse:
    """The pods that the attempt `key` has called. The end of the context releases them.

    Attributes:
        failed_boot_ids: boot ids of the pods that failed.
        decoding: the decode pod sends tokens, so a later failure is not its producer's.
    """

    def __init__(self, key: RequestKey, *, registry: Registry, background: BackgroundTasks) -> None:
        self.failed_boot_ids: set[bytes] = set()
        self.decoding = False
        self._key = key
        self._registry = registry
        self._background = background
        self._used = contextlib.ExitStack()
        self._clients: dict[str, WorkerClient] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._used.close()

    def client(self, pod: Candidate) -> WorkerClient:
        """Return the client of a pod, which counts as in use until the attempt ends."""
        client = self._clients.get(pod.name)
        if client is None:
            client = self._used.enter_context(self._registry.use(pod.name))
            self._clients[pod.name] = client
        return client

    @contextlib.contextmanager
    def record_failure(self, pod: Candidate, *producers: Candidate) -> Iterator[None]:
        """Record failures: of the called pod, and of the producers that it fetches from."""
        try:
            yield
        except DrainingError:
            self._registry.refused(pod.boot_id)
            self.failed_boot_ids.add(pod.boot_id)
            raise
        except WorkerError:
            self.failed_boot_ids.add(pod.boot_id)
            if not self.decoding:
                self.failed_boot_ids.update(producer.boot_id for producer in producers)
            raise

    def cancel_everywhere(self) -> None:
        """Cancel the attempt on all its pods, in the background."""
        for name in self._clients:
            self._background.start(self._cancel(name), name=f"cancel {self._key.request_id}")

    async def _cancel(self, name: str) -> None:
        """Cancel the attempt on one pod. A lost pod needs no cancellation."""
        with contextlib.suppress(WorkerError), self._registry.use(name) as client:
            await client.cancel(self._key, timeout=self._registry.timers.cancel)


class BackgroundTasks:
    """Tasks that outlive their request; keeps references until they end."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[None, None, None], *, name: str) -> None:
        """Run `work` as a task. `work` must handle its errors."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def finish(self) -> None:
        """Wait for all tasks."""
        while self._tasks:
            await asyncio.gather(*self._tasks)
