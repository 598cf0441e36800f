"""From the pods there are to the pods there should be: revisions, steps between them, drains.

revisions.py  what a role's pods are made of, as a digest; kept across operator upgrades
goal.py       which revision a rollout goes to; back, if the new one failed   course
pace.py       how many pods above and below a pool's size                     Pace
steps.py      how many replicas of which revision now                         next_step
together.py     all roles in steps, where old and new cannot talk to each other
alone.py        one role, where they can
counts.py     sums over Deployments, and sharing out a change of a sum         Key
drain.py      which pods stop taking work, and when they may go               settle
"""

from vlm_operator.rollout.counts import Key, key_of
from vlm_operator.rollout.drain import Gate, Settled, settle
from vlm_operator.rollout.goal import Course, Goal, course, sizes
from vlm_operator.rollout.pace import Bill, Pace, share, within_budget
from vlm_operator.rollout.revisions import (
    current_revisions,
    drain_seconds,
    keep_defaults,
    service_revision,
)
from vlm_operator.rollout.steps import Step, next_step

__all__ = [
    "Bill",
    "Course",
    "Gate",
    "Goal",
    "Key",
    "Pace",
    "Settled",
    "Step",
    "course",
    "current_revisions",
    "drain_seconds",
    "keep_defaults",
    "key_of",
    "next_step",
    "service_revision",
    "settle",
    "share",
    "sizes",
    "within_budget",
]
