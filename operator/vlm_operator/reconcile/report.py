"""Reports one turn: status, Events, status of the pools, memory, metrics, log.

Each object is written only if its content changed. So an idle service causes no writes.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping
from typing import Any

from vlm_operator import names
from vlm_operator.api import ScalingMode, VLMService
from vlm_operator.apply.pod_and_status_writes import (
    MEMORY_KEY,
    post_events,
    save_memory,
    write_status,
)
from vlm_operator.apply.sync_state import SyncState, WriteConflicts, newly_contested
from vlm_operator.autoscale.decide import Memory
from vlm_operator.autoscale.memory import dump, load, worth_writing
from vlm_operator.autoscale.record import Record
from vlm_operator.cluster import CONFIG_MAP, Cluster, Manifest
from vlm_operator.errors import ClusterError, ConflictError, NameConflictError, UnavailableError
from vlm_operator.metrics import (
    ACCELERATORS,
    BAD_SAMPLES,
    COST_PER_HOUR,
    DESIRED_REPLICAS,
    IDENTITY_EXPIRY,
    ITL_TARGET,
    READY_REPLICAS,
    RECOMMENDED_REPLICAS,
    SCALE_DECISIONS,
    SCALE_LIMITED,
    STALLED,
    TTFT_TARGET,
    WAKING,
    forget,
    set_or_remove,
)
from vlm_operator.names import Role
from vlm_operator.reconcile.accepted_spec import KEY as ACCEPTED_KEY
from vlm_operator.reconcile.accepted_spec import AcceptedSpec
from vlm_operator.reconcile.accepted_spec import object_name as state_name
from vlm_operator.reconcile.decisions import TurnPlan
from vlm_operator.state import NodeClassState, Observed
from vlm_operator.status.build import (
    WritePacing,
    pool_accelerators,
    pool_cost_per_hour,
    pool_status_of_kind,
)
from vlm_operator.status.conditions import stalled
from vlm_operator.status.events import Event, foreign_event
from vlm_operator.status.inputs import ConditionReason, Failure, StatusInputs
from vlm_operator.status.readiness import examined

logger = logging.getLogger(__name__)

MEMORY_SECONDS = 30.0  # least time between two writes that change only measured values
EVENT_SECONDS = 60.0  # the same Event is posted at most once in this time
FOREIGN_SECONDS = 600.0  # least time between two Events about foreign objects


class Reporter:
    """Reports on one service. Its state only avoids repeated writes."""

    def __init__(self, cluster: Cluster, *, namespace: str, name: str) -> None:
        self._conflict: NameConflictError | None = None
        self._write_conflicts: WriteConflicts = {}
        self._cluster = cluster
        self._namespace = namespace
        self._name = name
        self._memory_at = float("-inf")
        self._pacing = WritePacing()
        self._decided: Hashable = None
        self._measured: Hashable = None
        self._kept: tuple[int, Mapping[str, NodeClassState], str | None] | None = None
        self._posted: dict[Event, float] = {}
        self._counted: dict[Role, tuple[int, str, str | None]] = {}
        self._foreign: frozenset[tuple[str, str]] = frozenset()
        self._foreign_at = float("-inf")

    async def status(
        self, body: Manifest, status: Manifest, new_events: tuple[Event, ...], *, now: float
    ) -> Manifest:
        """Write the status if it differs, then post Events; returns the status in the API server.

        If only measured values differ, the write may wait (`WritePacing`). Sets `triptych_stalled`.
        """
        is_stalled = any(
            item["type"] == "Stalled" and item["status"] == "True"
            for item in status.get("conditions", [])
        )
        STALLED.labels(self._namespace, self._name).set(is_stalled)
        present = body.get("status", {})
        status = self._pacing.due(present, status, now=now)
        if status != present:
            await write_status(self._cluster, body, status)
        old = {item for item, at in self._posted.items() if now - at < EVENT_SECONDS}
        fresh = [item for item in new_events if item not in old]
        self._posted = {item: self._posted[item] for item in old} | dict.fromkeys(fresh, now)
        await post_events(self._cluster, fresh, body, now=now)
        return status

    def name_conflict(self) -> Failure | None:
        """Return and clear the failure of a ConfigMap whose name another owner has."""
        conflict, self._conflict = self._conflict, None
        return None if conflict is None else Failure(ConditionReason.NAME_CONFLICT, str(conflict))

    def notices(self, sync_state: SyncState, observed: Observed) -> tuple[Event, ...]:
        """Return Events about changes that other writers made to objects since the last turn."""
        contested = newly_contested(self._write_conflicts, sync_state.write_conflicts)
        self._write_conflicts = sync_state.write_conflicts
        return (
            *(Event("ChildContested", message) for message in contested),
            *(Event("ChildRepaired", message) for message in sync_state.take_repairs()),
            *self._foreign_events(observed),
        )

    def _foreign_events(self, observed: Observed) -> tuple[Event, ...]:
        """Return an Event about new foreign objects with the service's labels.

        At least `FOREIGN_SECONDS` pass between two such Events.
        """
        foreign = observed.impostors()
        due = observed.now - self._foreign_at >= FOREIGN_SECONDS
        if not due or not foreign - self._foreign:
            self._foreign &= foreign
            return ()
        self._foreign, self._foreign_at = foreign, observed.now
        return (foreign_event(self._name, foreign),)

    async def pools(self, view: StatusInputs) -> dict[tuple[str, str], Manifest]:
        """Write each VLMPool's status, which HPA reads; returns the written pools."""
        written = {}
        front = [Role.GATEWAY] if view.service.spec.gateway.scaling else []
        for role in (*view.service.spec.pools.present, *front):
            key = (names.KIND_POOL, names.child(self._name, role))
            pool = view.observed.child(*key)
            wanted = pool_status_of_kind(view, role)
            if pool is not None and pool.get("status") != wanted:
                await write_status(self._cluster, pool, wanted)
                written[key] = {**pool, "status": wanted}
        return written

    async def memory(self, turn_plan: TurnPlan, observed: Observed) -> bool:
        """Write the autoscaler's memory if it changed; returns whether it was written.

        New decisions are written at once, new measurements at most every `MEMORY_SECONDS`. If no
        work was done, nothing is written. If all pools are Manual, there is no memory.
        """
        modes = {pool.mode for pool in turn_plan.sizing.policy.pools.values()}
        if modes == {ScalingMode.MANUAL}:
            return False
        memory = turn_plan.sizing.outcome.memory
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
        try:
            await save_memory(self._cluster, turn_plan.service, "autoscaler", data)
        except NameConflictError as error:
            self._conflict, self._decided = error, None  # so that the next turn retries
            return False
        return True

    async def accepted(
        self, written: VLMService, accepted: AcceptedSpec, observed: Observed
    ) -> bool:
        """Store the accepted manifest if it changed; returns whether it was written.

        Contents are compared only if the generation, the node classes or the ConfigMap changed,
        because every change of a spec has a new generation.
        """
        live = observed.child(CONFIG_MAP.kind, state_name(self._name)) or {}
        version = live.get("metadata", {}).get("resourceVersion")
        version_key = (written.generation, accepted.classes, version)
        if version is not None and version_key == self._kept:
            return False
        data = {ACCEPTED_KEY: accepted.dump()}
        if live.get("data", {}).get(ACCEPTED_KEY) == data[ACCEPTED_KEY]:
            self._kept = version_key
            return False
        try:
            await save_memory(self._cluster, written, "state", data)
        except NameConflictError as error:
            self._conflict = error
            return False
        except (UnavailableError, ConflictError):
            raise
        except ClusterError as error:
            # a quota refuses it, or the namespace is terminating: the service works without it
            logger.warning("accepted manifest not kept", extra={"error": str(error)})
            return False
        return True

    def count(self, view: StatusInputs, turn_plan: TurnPlan) -> None:
        """Set the metrics, and log the decisions if one of them changed."""
        absurd = turn_plan.sizing.outcome.estimate.absurd
        if absurd:
            BAD_SAMPLES.labels(reason="absurd").inc(len(absurd))
        changed, service = False, (self._namespace, self._name)
        for role in self._counted.keys() - view.service.spec.pools.present.keys():
            forget(*service, role=role.value)
            del self._counted[role]
        for role in view.service.spec.pools.present:
            pool, decision = (*service, role.value), turn_plan.decisions[role]
            DESIRED_REPLICAS.labels(*pool).set(view.desired[role])
            READY_REPLICAS.labels(*pool).set(len(view.serving(role)))
            ACCELERATORS.labels(*pool).set(pool_accelerators(view, role))
            set_or_remove(COST_PER_HOUR, pool_cost_per_hour(view, role), *pool)
            set_or_remove(RECOMMENDED_REPLICAS, decision.recommendation, *pool)
            now = (decision.to, decision.reason, decision.limited_by)
            before, self._counted[role] = self._counted.get(role), now
            if before is not None and before[2] not in (None, decision.limited_by):
                SCALE_LIMITED.remove(*pool, before[2])
            if decision.limited_by is not None:
                SCALE_LIMITED.labels(*pool, decision.limited_by).set(1)
            changed = changed or before != now
            if before is not None and before[0] != decision.to:
                SCALE_DECISIONS.labels(*pool, decision.reason).inc()
        expiry = {item.role: item.not_after for item in view.identity.certificates}
        for role in Role:
            set_or_remove(IDENTITY_EXPIRY, expiry.get(role), *service, role.value)
        set_or_remove(WAKING, _waking(view), *service)
        targets = view.policy.ttft_seconds
        for modality in ("text", "image", "video"):
            set_or_remove(TTFT_TARGET, targets.get(modality), *service, modality)
        set_or_remove(ITL_TARGET, view.policy.itl_seconds, *service)
        if changed:
            self._log(view, turn_plan)

    def _log(self, view: StatusInputs, turn_plan: TurnPlan) -> None:
        """Log the decisions, with a record for replay unless all pools are Manual."""
        decided = {
            role.value: f"{item.before} → {item.to} {item.reason}: {item.message}"
            for role, item in turn_plan.decisions.items()
        }
        service = f"{self._namespace}/{self._name}"
        sizing = turn_plan.sizing
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


def _waking(view: StatusInputs) -> float | None:
    """Return 1 if the service starts from zero and needs no user; None if it never sleeps."""
    if view.sleep_state is None:
        return None
    return float(view.sleep_state == "waking" and not stalled(examined(view)).status)


def stored_memory(observed: Observed, name: str) -> Memory:
    """Read the memory that an earlier process stored."""
    return load(_stored(observed, name).get(MEMORY_KEY), now=observed.now)


def _decided(memory: Memory) -> Hashable:
    """Return a value that changes only with a new decision."""
    sleep = memory.pace.sleep
    return None if sleep is None else sleep.lasting, tuple(
        (role, pace.changes, tuple(pace.exhausted), pace.foreign)
        for role, pace in memory.pace.pools.items()
    )


def _measured(observed: Observed) -> Hashable:
    """Return a value that changes only if workers did work or restarted."""
    samples = sorted(observed.samples.values(), key=lambda item: item.pod_uid)
    return tuple(
        (
            item.boot_id,
            item.started_work_seconds,
            tuple(sorted((kind, busy.calls) for kind, busy in item.busy.items())),
            tuple(sorted((name, ttft.count) for name, ttft in item.ttft.items())),
        )
        for item in samples
    )


def _stored(observed: Observed, name: str) -> dict[str, str]:
    config_map = observed.child(CONFIG_MAP.kind, names.child(name, "autoscaler"))
    data: dict[str, str] = {} if config_map is None else config_map.get("data", {})
    return data
