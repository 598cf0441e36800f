"""What one turn tells: the status, Events, pools' statuses, the memory, metrics, the log.

Each write happens only where its content changed, so that an idle service is not written at all.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from typing import Any

from vlm_operator import names
from vlm_operator.api import ScalingMode, VLMService
from vlm_operator.apply import (
    MEMORY_KEY,
    apply_pool_status,
    apply_status,
    post_events,
    save_memory,
)
from vlm_operator.autoscale.decide import Memory
from vlm_operator.autoscale.memory import dump, load, worth_writing
from vlm_operator.autoscale.record import Record
from vlm_operator.cluster import CONFIG_MAP, Cluster, Manifest
from vlm_operator.errors import ClusterError, ConflictError, UnavailableError
from vlm_operator.metrics import (
    BAD_SAMPLES,
    DESIRED_REPLICAS,
    READY_REPLICAS,
    RECOMMENDED_REPLICAS,
    SCALE_DECISIONS,
)
from vlm_operator.names import Role
from vlm_operator.plan import owner_reference, pool_claim
from vlm_operator.pods import object_labels
from vlm_operator.reconcile.accepted_spec import KEY as ACCEPTED_KEY
from vlm_operator.reconcile.accepted_spec import AcceptedSpec
from vlm_operator.reconcile.accepted_spec import object_name as state_name
from vlm_operator.reconcile.decisions import Intent
from vlm_operator.state import Observed
from vlm_operator.status import Event, Spaced, View, foreign_event, pool_status_of_kind

logger = logging.getLogger(__name__)

MEMORY_SECONDS = 30.0  # between two writes of what was merely measured
EVENT_SECONDS = 60.0  # in which the same Event is posted once
FOREIGN_SECONDS = 600.0  # between two Events about foreign objects


class Reporter:
    """Tells about one service. It remembers only what spares writes."""

    def __init__(self, cluster: Cluster, *, namespace: str, name: str) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self._name = name
        self._memory_at = float("-inf")
        self._spaced = Spaced()
        self._decided: Hashable = None
        self._measured: Hashable = None
        self._posted: dict[Event, float] = {}
        self._said: dict[Role, tuple[int, str, str | None]] = {}
        self._foreign: frozenset[tuple[str, str]] = frozenset()
        self._foreign_at = float("-inf")

    async def status(
        self,
        body: Manifest,
        status: Manifest,
        news: tuple[Event, ...],
        *,
        now: float,
    ) -> Manifest:
        """Write the status where it differs, then say what changed; returns what is there now.

        Measured figures that alone differ wait (`status.Spaced`).
        """
        uid, known = body["metadata"]["uid"], body.get("status", {})
        status = self._spaced.due(known, status, now=now)
        if status != known:
            await apply_status(
                self._cluster,
                namespace=self._namespace,
                name=self._name,
                uid=uid,
                status=status,
            )
        old = {item for item, at in self._posted.items() if now - at < EVENT_SECONDS}
        fresh = [item for item in news if item not in old]
        self._posted = {item: self._posted[item] for item in old} | dict.fromkeys(fresh, now)
        await post_events(
            self._cluster,
            fresh,
            namespace=self._namespace,
            name=self._name,
            uid=uid,
            now=now,
        )
        return status

    def foreign(self, observed: Observed) -> tuple[Event, ...]:
        """Name foreign objects that carry the service's labels, each once and not too often."""
        found = observed.impostors()
        due = observed.now - self._foreign_at >= FOREIGN_SECONDS
        if not due or not found - self._foreign:
            self._foreign &= found
            return ()
        self._foreign, self._foreign_at = found, observed.now
        return (foreign_event(self._name, found),)

    async def pools(self, view: View) -> dict[tuple[str, str], Manifest]:
        """Keep each VLMPool's status, which HPA reads; returns the pools as they are now."""
        found = {}
        for role in view.service.spec.pools.present:
            key = (names.KIND_POOL, names.child(self._name, role))
            pool = view.observed.child(*key)
            wanted = pool_status_of_kind(view, role)
            if pool is not None and pool.get("status") != wanted:
                claim = pool_claim(view.service, role, 0)
                await apply_pool_status(self._cluster, claim, status=wanted)
                found[key] = {**pool, "status": wanted}
        return found

    async def memory(self, intent: Intent, observed: Observed) -> bool:
        """Write the autoscaler's memory where it changed; tells whether it did.

        What was decided is written at once, what was measured not too often. While nothing happens
        nothing is learnt: what only ages is not written. Where the manifest says every number
        there is nothing to remember.
        """
        modes = {pool.mode for pool in intent.sizing.policy.pools.values()}
        if modes == {ScalingMode.MANUAL}:
            return False
        memory = intent.sizing.outcome.memory
        decided, measured = _decided(memory), _measured(observed)
        due = decided != self._decided or (
            measured != self._measured and observed.now - self._memory_at >= MEMORY_SECONDS
        )
        if not due or not worth_writing(memory):
            return False
        data = {MEMORY_KEY: dump(memory)}
        self._decided, self._measured = decided, measured
        if data == _stored(observed, self._name):
            return False
        self._memory_at = observed.now
        await save_memory(
            self._cluster,
            namespace=self._namespace,
            name=names.child(self._name, "autoscaler"),
            owner=owner_reference(intent.service),
            labels=object_labels(self._name, "autoscaler"),
            data=data,
        )
        return True

    async def accepted(
        self, written: VLMService, accepted: AcceptedSpec, observed: Observed
    ) -> bool:
        """Keep the manifest that was acted on, if it changed; tells whether it was written."""
        data = {ACCEPTED_KEY: accepted.dump()}
        name = state_name(self._name)
        if (observed.child(CONFIG_MAP.kind, name) or {}).get("data") == data:
            return False
        try:
            await save_memory(
                self._cluster,
                namespace=self._namespace,
                name=name,
                owner=owner_reference(written),
                labels=object_labels(self._name, "state"),
                data=data,
            )
        except (UnavailableError, ConflictError):
            raise
        except ClusterError as error:
            # a quota or a namespace that ends: the service itself goes on without it
            logger.warning("accepted manifest not kept", extra={"error": str(error)})
            return False
        return True

    def count(self, view: View, intent: Intent) -> None:
        """Set the metrics, and log the whole tick where it says something new."""
        absurd = intent.sizing.outcome.estimate.absurd
        if absurd:
            BAD_SAMPLES.labels(reason="absurd").inc(len(absurd))
        news = False
        for role in view.service.spec.pools.present:
            labels = {"namespace": self._namespace, "service": self._name, "role": role.value}
            decision = intent.decisions[role]
            DESIRED_REPLICAS.labels(**labels).set(view.desired[role])
            READY_REPLICAS.labels(**labels).set(len(view.serving(role)))
            if decision.recommendation is not None:
                RECOMMENDED_REPLICAS.labels(**labels).set(decision.recommendation)
            said = (decision.to, decision.reason, decision.limited_by)
            before, self._said[role] = self._said.get(role), said
            news = news or before != said
            if before is not None and before[0] != decision.to:
                SCALE_DECISIONS.labels(**labels, reason=decision.reason).inc()
        if news:
            self._log(view, intent)

    def _log(self, view: View, intent: Intent) -> None:
        """Log what was decided, in words; with a record to replay if anything was computed."""
        decided = {
            role.value: f"{item.before} → {item.to} {item.reason}: {item.message}"
            for role, item in intent.decisions.items()
        }
        service = f"{self._namespace}/{self._name}"
        sizing = intent.sizing
        modes = {pool.mode for pool in sizing.policy.pools.values()}
        parts: list[dict[str, Any]] = []
        if modes != {ScalingMode.MANUAL}:
            record = Record(
                service=service,
                policy=sizing.policy,
                view=sizing.view,
                memory=sizing.before,
                outcome=sizing.outcome,
                epoch=view.epoch,
            )
            parts = record.packed()
        logger.info("decision", extra={"service": service, "decided": decided})
        for part in parts:
            logger.info("decision record", extra={"service": service, "record": part})


def stored_memory(observed: Observed, name: str) -> Memory:
    """Read the memory that an earlier process left."""
    return load(_stored(observed, name).get(MEMORY_KEY), now=observed.now)


def _decided(memory: Memory) -> Hashable:
    """What differs when something was decided, and only then."""
    return tuple(
        (role, pace.changes, tuple(pace.exhausted), pace.foreign)
        for role, pace in memory.pace.pools.items()
    )


def _measured(observed: Observed) -> Hashable:
    """What differs when work was done, and only then."""
    samples = sorted(observed.samples.values(), key=lambda item: item.pod_uid)
    return tuple(
        (
            item.boot_id,
            item.admitted_work_seconds,
            tuple(sorted((kind, busy.calls) for kind, busy in item.busy.items())),
            tuple(sorted((name, ttft.count) for name, ttft in item.ttft.items())),
        )
        for item in samples
    )


def _stored(observed: Observed, name: str) -> dict[str, str]:
    found = observed.child(CONFIG_MAP.kind, names.child(name, "autoscaler"))
    data: dict[str, str] = {} if found is None else found.get("data", {})
    return data
