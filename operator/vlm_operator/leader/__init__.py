"""One writer at a time: our own Lease, because kopf's peering is no leader election.

lease.py   take it, renew it, know how much of it is left       Lease
aside.py   the thread on which that runs: a renewal waits for no turn
fenced.py  refuses writes that could outlive the lease          Fenced
"""

from vlm_operator.leader.aside import Aside
from vlm_operator.leader.fenced import AT_ONCE, Fenced
from vlm_operator.leader.lease import Lease, Timing

__all__ = ["AT_ONCE", "Aside", "Fenced", "Lease", "Timing"]
