"""One Lease object, and this process's view of it.

acquire() ─▶ leading, renewed every 2 s ─┬─▶ 10 s without a renewal: nothing is written until one
                                         │   succeeds; nobody else led meanwhile
                                         └─▶ somebody else leads, or did: keep() raises

A process may start a write only while its lease, counted on its own monotonic clock from the moment
*before* the last renewal was sent, has more time left than a request may take. Others take over 15
s after they last saw the Lease change, again on their own clock: no two clocks are ever compared.
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import logging
from collections.abc import Callable, Mapping
from typing import Any

from vlm_operator.cluster import LEASE, Cluster, Manifest
from vlm_operator.errors import ClusterError, ConflictError, LeaseLostError, UnavailableError

logger = logging.getLogger(__name__)

WRITE_SECONDS = 5.0  # the longest that one write may take: the request timeout of `kube`


@dataclasses.dataclass(frozen=True)
class Timing:
    """The lease's three numbers, in seconds: others wait, we give up, we renew."""

    duration: float = 15.0
    renew_deadline: float = 10.0
    retry: float = 2.0


class Lease:
    """One Lease object and this process's view of it.

    Args:
        cluster: where it lives; not fenced.
        namespace: of the Lease.
        name: of the Lease.
        identity: the pod's name; whoever holds it is `spec.holderIdentity`.
        clock: monotonic seconds.
        timing: how long things take.
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
        self._seen: tuple[str, float] | None = (
            None  # resourceVersion of another's Lease, and since when
        )
        self.epoch = 0

    @property
    def time_left(self) -> float:
        """Seconds for which nobody else can hold the lease; 0 when it is not ours."""
        renewed_at = self._renewed_at  # once: another thread may be giving it up
        if renewed_at is None:
            return 0.0
        return max(0.0, renewed_at + self._timing.duration - self._clock())

    def check(self) -> None:
        """Raise `LeaseLostError` unless a write that starts now ends while we lead."""
        left = self.time_left
        if left <= WRITE_SECONDS:
            raise LeaseLostError(f"{left:.1f} s of the lease are left, a write may take 5")

    async def acquire(self) -> None:
        """Wait until the lease is ours."""
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

    async def keep(self, told: Callable[[bool], None] = lambda _: None) -> None:
        """Renew for ever.

        An API server that is away for longer than the deadline ends the writing, and nothing else:
        while the Lease still says what it said, nobody else led. `told` hears False then, and True
        once it is renewed.

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
                told(held)

    async def release(self) -> None:
        """Give the lease up, so that the next process need not wait; failing costs that wait."""
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
        """Take the lease: None when it is ours, else its holder ("" for unknown)."""
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
            return ""  # another process was faster, or our view is old: the next try sees it
        except UnavailableError as error:
            logger.warning("lease not reached", extra={"error": str(error)})
            return ""
        self._renewed_at = before
        self.epoch = int(taken["spec"]["leaseTransitions"])
        return None

    async def _renew(self) -> None:
        """Renew the lease that is ours; what cannot be done now is left to the next time."""
        before = self._clock()
        try:
            lease = await self._cluster.get(LEASE, self._namespace, self._name)
            spec = {} if lease is None else lease["spec"]
            ours = (self._identity, self.epoch)
            if lease is None or (spec.get("holderIdentity"), spec.get("leaseTransitions")) != ours:
                self._renewed_at = None
                holder = spec.get("holderIdentity") or "nobody"
                raise LeaseLostError(f"{holder} holds the lease")
            await self._cluster.replace({**lease, **self._manifest(lease)})
        except ConflictError:
            return  # our view is old: the next try sees who wrote
        except ClusterError as error:
            logger.warning("lease not renewed", extra={"error": str(error)})
            return
        self._renewed_at = before

    def _expired(self, lease: Manifest) -> bool:
        """Tell whether another's Lease stood still for its whole duration, by our own clock."""
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
