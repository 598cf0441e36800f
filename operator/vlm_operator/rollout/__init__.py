"""From the pods there are to the pods there should be: revisions, steps between them, drains.

revisions.py  what a role's pods are made of, as a digest; kept across operator upgrades
steps.py      how many replicas of which revision now                        next_step
drain.py      which pods stop taking work, and when they may go              settle
"""

from vlm_operator.rollout.drain import Gate, Settled, settle
from vlm_operator.rollout.revisions import (
    current_revisions,
    drain_seconds,
    keep_defaults,
    service_revision,
)
from vlm_operator.rollout.steps import Step, next_step, spread

__all__ = [
    "Gate",
    "Settled",
    "Step",
    "current_revisions",
    "drain_seconds",
    "keep_defaults",
    "next_step",
    "service_revision",
    "settle",
    "spread",
]
