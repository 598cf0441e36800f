"""`vlm doctor`: finds what is missing in a cluster, and names the remedy.

gather.py ─ Facts ─▶ installed.py  API, CRDs, the operator, its Lease     ─┐
                     rights.py     RBAC of users and operators             ├─▶ Finding ─▶ command.py
                     nodes.py      node classes, devices                   │
                     services.py   claims, conditions, pods, other writers ┘
"""
