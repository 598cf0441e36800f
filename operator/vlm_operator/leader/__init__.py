"""Leader election with one Lease. kopf's peering does not guarantee a single leader.

lease.py            acquires and renews the Lease; its remaining time   Lease
background_loop.py  renews on a thread, so that no turn delays it       BackgroundLoop
fenced.py           refuses writes that could outlast the lease         Fenced
"""

from vlm_operator.leader.background_loop import BackgroundLoop
from vlm_operator.leader.fenced import AT_ONCE, Fenced
from vlm_operator.leader.lease import Lease, Timing

__all__ = ["AT_ONCE", "BackgroundLoop", "Fenced", "Lease", "Timing"]
