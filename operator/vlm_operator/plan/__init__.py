"""Plans the objects of a service from its spec and the observed state. Pure and idempotent.

children.py     every object of a service, in the order of application                  plan
deployments.py  Deployments: one per role, variant and revision
model_cache.py  claims that hold a model, and the Jobs that fill them
policies.py     NetworkPolicies: the allowed connections
"""
