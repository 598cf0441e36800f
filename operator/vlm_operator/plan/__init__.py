"""From what was asked and what was seen to what should exist. Pure: planning twice plans the same.

children.py  every object of a service, in the order in which they are applied       plan
policies.py  who may speak to whom, as NetworkPolicies
"""

from vlm_operator.plan.children import Options, Plan, owner_reference, plan, pool_claim

__all__ = ["Options", "Plan", "owner_reference", "plan", "pool_claim"]
