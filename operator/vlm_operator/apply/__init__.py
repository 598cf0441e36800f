"""Writes objects: server-side apply in the plan's order, pruning, pod patches, status, Events.

compare.py                compares live object and manifest                drift, with_digest
learned.py                finds defaults and injections by dry run         Learned
write_conflicts.py        finds other writers of our fields; backoff       newly_contested
repair.py                 repairs one object
sync_state.py             state of one reconciler's writes                 SyncState
objects.py                applies what differs, prunes what is not planned apply_plan, prune
pod_and_status_writes.py  writes pods' gates, status, finalizers, memory
events.py                 posts one Event per transition; counts repeats   post_events
"""

from vlm_operator.apply.events import post_events
from vlm_operator.apply.learned import Learned
from vlm_operator.apply.objects import (
    Applied,
    apply_plan,
    apply_replicas,
    check_new,
    prune,
)
from vlm_operator.apply.pod_and_status_writes import (
    MEMORY_KEY,
    apply_pod_patches,
    apply_pool_status,
    apply_status,
    save_memory,
    write_finalizers,
)
from vlm_operator.apply.sync_state import SyncState
from vlm_operator.apply.write_conflicts import newly_contested

__all__ = [
    "MEMORY_KEY",
    "Applied",
    "Learned",
    "SyncState",
    "apply_plan",
    "apply_pod_patches",
    "apply_pool_status",
    "apply_replicas",
    "apply_status",
    "check_new",
    "newly_contested",
    "post_events",
    "prune",
    "save_memory",
    "write_finalizers",
]
