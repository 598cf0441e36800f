"""What one turn tells: the status, Events, pools' statuses, the memory, metrics, the log.

Each write happens only where its content changed, so that an idle service is not written at all.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping

from vlm_operator import names
from vlm_operator.apply import (
    MEMORY_KEY,
    apply_pool_status,
    apply_status,
    post_events,
    save_memory,
)
from vlm_operator.autoscale import History, dump_history, load_history, record
from vlm_operator.cluster import CONFIG_MAP, Cluster, Manifest
from vlm_operator.metrics import DESIRED_REPLICAS, READY_REPLICAS, SCALE_DECISIONS
from vlm_operator.names import Role
from vlm_operator.plan import owner_reference, pool_claim
from vlm_operator.pods import object_labels
from vlm_operator.reconcile.decisions import Intent
from vlm_operator.state import Observed
from vlm_operator.status import Event, View, pool_status_of_kind

logger = logging.getLogger(__name__)

MEMORY_SECONDS = 30.0  # between two writes of the autoscaler's memory
EVENT_SECONDS = 60.0  # in which the same Event is posted once


class Reporter:
    """Tells about one service. It remembers only what spares writes."""

    def __init__(self, cluster: Cluster, *, namespace: str, name: str) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self._name = name
        self._memory_at = float("-inf")
        self._posted: dict[Event, float] = {}

    async def status(
        self,
        body: Manifest,
        status: Manifest,
        news: tuple[Event, ...],
        *,
        now: float,
    ) -> None:
        """Write the status where it differs, then say what changed."""
        uid = body["metadata"]["uid"]
        if status != body.get("status", {}):
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
        """Write the autoscaler's memory, if it changed and not too often; tells whether it did."""
        data = {
            f"{role}.{MEMORY_KEY}": dump_history(intent.histories[role])
            for role in intent.service.spec.pools.present
            if intent.histories[role].decisions
        }
        late = observed.now - self._memory_at >= MEMORY_SECONDS
        if not data or data == _stored(observed, self._name) or not late:
            return False
        self._memory_at = observed.now
        await save_memory(
            self._cluster,
            namespace=self._namespace,
            service=self._name,
            owner=owner_reference(intent.service),
            labels=object_labels(self._name, "autoscaler"),
            data=data,
        )
        return True

    def count(self, view: View, intent: Intent, before: Mapping[Role, History]) -> None:
        """Set the metrics, and log a record of every decision that changed something."""
        for role in view.service.spec.pools.present:
            labels = {"namespace": self._namespace, "service": self._name, "role": role.value}
            DESIRED_REPLICAS.labels(**labels).set(view.desired[role])
            READY_REPLICAS.labels(**labels).set(len(view.serving(role)))
            decision = intent.decisions[role]
            if intent.histories[role].decisions == before[role].decisions:
                continue
            SCALE_DECISIONS.labels(**labels, reason=decision.reason).inc()
            samples = view.observed.samples
            inputs = {
                pod.name: dataclasses.asdict(samples[pod.uid])
                for pod in view.observed.of(role)
                if pod.uid in samples
            }
            fields = {**record(decision, epoch=view.epoch), "role": role.value, "inputs": inputs}
            logger.info("decision", extra={"service": self._name, "decision": fields})


def stored_histories(observed: Observed, name: str) -> dict[Role, History]:
    """Read the memory that an earlier process left."""
    data = _stored(observed, name)
    return {
        role: load_history(data.get(f"{role}.{MEMORY_KEY}"), now=observed.now)
        for role in names.POOL_ROLES
    }


def _stored(observed: Observed, name: str) -> dict[str, str]:
    found = observed.child(CONFIG_MAP.kind, names.child(name, "autoscaler"))
    data: dict[str, str] = {} if found is None else found.get("data", {})
    return data
