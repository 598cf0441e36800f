"""Writes objects: server-side apply in the plan's order, pruning, pod patches, status, Events.

compare.py                compares live object and manifest                drift, with_digest
learned.py                finds defaults and injections by dry run         Learned
sync_state.py             state of one reconciler's writes; write conflicts; pure       SyncState
objects.py                applies what differs, prunes what is not planned apply_plan, prune
pod_and_status_writes.py  writes pods' gates, status, finalizers, memory, Events
"""
