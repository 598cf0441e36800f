"""Leader election with one Lease, and a fence for writes. kopf's peering allows two leaders.

acquire() ─▶ leading, renewed every 2 s ─┬─▶ 10 s without a renewal: writes stop until one
                                         │   succeeds; no other process led meanwhile
                                         └─▶ another process leads, or did: renew_loop() raises

A process may start a write only if its lease has more time left than a request may take. It counts
that time on its monotonic clock, from the moment *before* it sent the last renewal. Other processes
take over 15 s after they last saw the Lease change, on their own clocks. So no two clocks are
compared.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import logging
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, Self, TypeVar

from vlm_operator.cluster import LEASE, Cluster, Kind, Manifest
from vlm_operator.errors import ClusterError, ConflictError, LeaseLostError, UnavailableError

logger = logging.getLogger(__name__)

WRITE_SECONDS = 5.0  # longest duration of one write: the request timeout of `kube`
AT_ONCE = 16  # concurrent requests; more do not raise an API server's throughput
Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class Timing:
    """Times of the lease, in seconds.

    Attributes:
        duration: time without a renewal after which another process takes over.
        renew_deadline: time without a renewal after which the leader reports that it stops writing.
        retry: time between two renewals, or between two tries to acquire.
    """

    duration: float = 15.0
    renew_deadline: float = 10.0
    retry: float = 2.0


class Lease:
    """One Lease object and this process's view of it.

    `cluster` is not fenced; `clock` counts monotonic seconds.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        namespace: str,
        name: str,
        identity: str,
        clock: Callable[[], float],
        timing: Timing | None = None,
    ) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._clock = clock
        self._timing = timing or Timing()
        self._renewed_at: float | None = None
        # resourceVersion of the Lease of another holder, and when we first saw it
        self._seen: tuple[str, float] | None = None
        self.epoch = 0

    @property
    def time_left(self) -> float:
        """Seconds during which no other process can hold the lease; 0 if it is not ours."""
        renewed_at = self._renewed_at  # read once: another thread may release the lease
        if renewed_at is None:
            return 0.0
        return max(0.0, renewed_at + self._timing.duration - self._clock())

    def check(self) -> None:
        """Check that a write that starts now ends while this process leads.

        Raises:
            LeaseLostError: the remaining time is not more than `WRITE_SECONDS`.
        """
        remaining = self.time_left
        if remaining <= WRITE_SECONDS:
            raise LeaseLostError(f"{remaining:.1f} s of the lease are left, a write may take 5")

    async def acquire(self) -> None:
        announced = ""
        while True:
            holder = await self._try()
            if holder is None:
                logger.info("leading", extra={"epoch": self.epoch, "identity": self._identity})
                return
            if holder != announced:
                logger.info("waiting for the lease", extra={"holder": holder})
                announced = holder
            await asyncio.sleep(self._timing.retry)

    async def renew_loop(self, notify: Callable[[bool], None] = lambda _: None) -> None:
        """Renew until cancelled.

        If the API server is unavailable for longer than the deadline, writes stop and the loop
        goes on: while the Lease is unchanged, no other process leads. Then `notify` gets False,
        and True once the Lease is renewed.

        Raises:
            LeaseLostError: another process leads, or did meanwhile.
        """
        held = True
        while True:
            await asyncio.sleep(self._timing.retry)
            await self._renew()
            assert self._renewed_at is not None
            late = self._clock() - self._renewed_at
            if held != (late <= self._timing.renew_deadline):
                held = not held
                text = "leading again" if held else "not renewed: nothing is written until it is"
                logger.warning(text, extra={"epoch": self.epoch, "late_seconds": round(late, 1)})
                notify(held)

    async def release(self) -> None:
        """Release the lease, so that the next process need not wait; failures are only logged."""
        self._renewed_at = None
        try:
            lease = await self._cluster.get(LEASE, self._namespace, self._name)
            if lease is None or lease["spec"].get("holderIdentity") != self._identity:
                return
            spec = {**lease["spec"], "holderIdentity": "", "leaseDurationSeconds": 1}
            await self._cluster.replace({**lease, "spec": spec})
        except ClusterError as error:
            logger.info("lease not released", extra={"error": str(error)})

    async def _try(self) -> str | None:
        """Try to take the lease; returns None if it is ours, else its holder ("" if unknown)."""
        before = self._clock()
        try:
            lease = await self._cluster.get(LEASE, self._namespace, self._name)
            if lease is None:
                taken = await self._cluster.create(self._manifest({}))
            else:
                holder = str(lease["spec"].get("holderIdentity") or "")
                if holder not in ("", self._identity) and not self._expired(lease):
                    return holder
                taken = await self._cluster.replace({**lease, **self._manifest(lease)})
        except ConflictError:
            return ""  # another process wrote first, or our view is stale: the next try reads again
        except UnavailableError as error:
            logger.warning("lease not reached", extra={"error": str(error)})
            return ""
        self._renewed_at = before
        self.epoch = int(taken["spec"]["leaseTransitions"])
        return None

    async def _renew(self) -> None:
        """Renew our lease; if the API server cannot be reached, the next call tries again.

        Raises:
            LeaseLostError: another process holds the Lease, or held it meanwhile.
        """
        before = self._clock()
        try:
            lease = await self._cluster.get(LEASE, self._namespace, self._name)
            spec = {} if lease is None else lease["spec"]
            ours = (self._identity, self.epoch)
            if lease is None or (spec.get("holderIdentity"), spec.get("leaseTransitions")) != ours:
                self._renewed_at = None
                holder = spec.get("holderIdentity") or "no process"
                raise LeaseLostError(f"{holder} holds the lease")
            await self._cluster.replace({**lease, **self._manifest(lease)})
        except ConflictError:
            return  # our view is stale: the next try reads the present holder
        except ClusterError as error:
            logger.warning("lease not renewed", extra={"error": str(error)})
            return
        self._renewed_at = before

    def _expired(self, lease: Manifest) -> bool:
        """Whether another holder's Lease was unchanged for its duration, by our own clock."""
        version = lease["metadata"]["resourceVersion"]
        if self._seen is None or self._seen[0] != version:
            self._seen = (version, self._clock())
            return False
        duration = float(lease["spec"].get("leaseDurationSeconds") or self._timing.duration)
        return self._clock() - self._seen[1] > duration

    def _manifest(self, live: Mapping[str, Any]) -> Manifest:
        spec = dict(live.get("spec", {}))
        moment = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        if spec.get("holderIdentity") != self._identity:
            transitions = spec.get("leaseTransitions")
            spec["leaseTransitions"] = 0 if transitions is None else int(transitions) + 1
            spec["acquireTime"] = moment
        spec |= {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": max(1, round(self._timing.duration)),
            "renewTime": moment,
        }
        meta = live.get("metadata") or {"name": self._name, "namespace": self._namespace}
        return {
            "apiVersion": LEASE.api_version,
            "kind": LEASE.kind,
            "metadata": dict(meta),
            "spec": spec,
        }


class Fenced:
    """A `Cluster` that limits concurrent requests, and writes only if the lease leaves time.

    A request's timeout and its check of the lease start after it passes the limit. So if hundreds
    of loops wake together, their requests wait here without timing out. If the lease leaves too
    little time, a write raises LeaseLostError and writes nothing.

    Args:
        cluster: client for the requests. Renewals of the lease use another one and do not wait.
        lease: this process's lease.
        at_once: limit of concurrent requests.
    """

    def __init__(self, cluster: Cluster, lease: Lease, *, at_once: int = AT_ONCE) -> None:
        self._cluster = cluster
        self._lease = lease
        self._gate = asyncio.Semaphore(at_once)

    async def get(self, kind: Kind, namespace: str, name: str) -> Manifest | None:
        async with self._gate:
            return await self._cluster.get(kind, namespace, name)

    async def list(
        self, kind: Kind, namespace: str | None = None, labels: Mapping[str, str] | None = None
    ) -> list[Manifest]:
        async with self._gate:
            return await self._cluster.list(kind, namespace, labels)

    async def apply(
        self, manifest: Manifest, *, manager: str, subresource: str = "", dry_run: bool = False
    ) -> Manifest:
        async with self._write():
            return await self._cluster.apply(
                manifest, manager=manager, subresource=subresource, dry_run=dry_run
            )

    async def merge(self, manifest: Manifest, *, manager: str) -> Manifest:
        async with self._write():
            return await self._cluster.merge(manifest, manager=manager)

    async def metadata_if(
        self, kind: Kind, namespace: str, name: str, expected: Mapping[str, str]
    ) -> Manifest | None:
        async with self._gate:
            return await self._cluster.metadata_if(kind, namespace, name, expected)

    async def create(self, manifest: Manifest) -> Manifest:
        async with self._write():
            return await self._cluster.create(manifest)

    async def replace(self, manifest: Manifest) -> Manifest:
        async with self._write():
            return await self._cluster.replace(manifest)

    async def delete(self, kind: Kind, namespace: str, name: str, *, uid: str | None) -> None:
        async with self._write():
            await self._cluster.delete(kind, namespace, name, uid=uid)

    @contextlib.asynccontextmanager
    async def _write(self) -> AsyncIterator[None]:
        async with self._gate:
            self._lease.check()
            yield


class BackgroundLoop:
    """Runs coroutines on an event loop in a thread, so that no turn delays a renewal."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        """Stop the loop, and cancel coroutines that still run on it."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                self._loop.run_until_complete(task)
        self._loop.close()

    async def do(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine on the thread's loop; cancelling this call cancels it."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))
