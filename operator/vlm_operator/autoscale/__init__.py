"""How many replicas a pool should have, and why: values in, one decision record out.

types.py     Policy, PoolNow, History, Decision
decide.py    who owns the number: Manual, External, Auto                        decide
auto.py      the rule of mode Auto: queue seconds, KV tokens
memory.py    History and Decision to JSON and back, for ConfigMap <svc>-autoscaler
"""

from vlm_operator.autoscale.decide import decide
from vlm_operator.autoscale.memory import dump_history, load_history, record
from vlm_operator.autoscale.types import Candidate, Decision, Foreign, History, Policy, PoolNow

__all__ = [
    "Candidate",
    "Decision",
    "Foreign",
    "History",
    "Policy",
    "PoolNow",
    "decide",
    "dump_history",
    "load_history",
    "record",
]
