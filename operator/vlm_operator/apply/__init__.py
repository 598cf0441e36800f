"""Writing: server-side apply in the plan's order, pruning, gates, events.

compare.py  is this object what we applied?                     drift, stamped
learned.py  what does the API server add by itself?             Learned
contest.py  who else writes what we write? back off             contested
repair.py   one object: what differs, and the writes that put it right
accepted.py what a loop remembers of its writes                 Accepted
objects.py  apply what differs, prune what the plan dropped     apply_plan, prune
marks.py    small writes: pods' gates, status, pools, memory
events.py   a transition becomes one Event, counted if it recurs
"""

from vlm_operator.apply.accepted import Accepted
from vlm_operator.apply.contest import contested
from vlm_operator.apply.events import post_events
from vlm_operator.apply.learned import Learned
from vlm_operator.apply.marks import (
    MEMORY_KEY,
    apply_gates,
    apply_pool_status,
    apply_status,
    save_memory,
)
from vlm_operator.apply.objects import (
    Applied,
    apply_plan,
    check_new,
    claim_pool,
    prune,
)

__all__ = [
    "MEMORY_KEY",
    "Accepted",
    "Applied",
    "Learned",
    "apply_gates",
    "apply_plan",
    "apply_pool_status",
    "apply_status",
    "check_new",
    "claim_pool",
    "contested",
    "post_events",
    "prune",
    "save_memory",
]
