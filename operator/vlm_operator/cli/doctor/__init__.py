"""`vlm doctor`: what is missing in a cluster, and what to do about it.

gather.py ─ Facts ─▶ installed.py  API, CRDs, the operator, its Lease     ─┐
                     rights.py     who may do what                         ├─▶ Finding ─▶ command.py
                     nodes.py      node classes, devices                   │
                     services.py   claims, conditions, pods, other writers ┘
"""
