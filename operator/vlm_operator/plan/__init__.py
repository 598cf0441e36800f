"""From what was asked and what was seen to what should exist. Pure: planning twice plans the same.

children.py     every object of a service, in the order in which they are applied       plan
deployments.py  one per role, variant and revision; older ones as they are
policies.py     who may speak to whom, as NetworkPolicies
"""

from vlm_operator.plan.children import Plan, plan, pool_claim
from vlm_operator.plan.deployments import Options, owner_reference
from vlm_operator.plan.policies import Network

__all__ = ["Network", "Options", "Plan", "owner_reference", "plan", "pool_claim"]
