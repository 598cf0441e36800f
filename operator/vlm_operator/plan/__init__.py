"""Plans the objects of a service from its spec and the observed state. Pure and idempotent.

children.py     every object of a service, in the order of application                  plan
deployments.py  Deployments: one per role, variant and revision
policies.py     NetworkPolicies: the allowed connections
"""

from vlm_operator.plan.children import Plan, plan, replicas_apply
from vlm_operator.plan.deployments import Options, owner_reference
from vlm_operator.plan.policies import Network

__all__ = ["Network", "Options", "Plan", "owner_reference", "plan", "replicas_apply"]
