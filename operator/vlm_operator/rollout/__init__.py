"""Rollouts: revisions, the steps from old to new pods, drains.

revisions.py      digest of a role's pod inputs; stable across operator upgrades
target.py         target revision of a rollout; the previous one if the new one failed
surge.py          number of pods allowed above and below a pool's size  SurgeLimits
steps.py          replicas of each revision in this turn                next_step
  coordinated.py    all roles in steps, if old and new cannot communicate
  independent.py    one role, if old and new can communicate
replica_counts.py sums over Deployments; distribution of a change       Key
drain.py          which pods stop accepting work, and when they may end plan_drain
"""

from vlm_operator.rollout.drain import DrainPlan, PodPatch, plan_drain
from vlm_operator.rollout.replica_counts import Key, key_of
from vlm_operator.rollout.revisions import (
    current_revisions,
    drain_seconds,
    keep_defaults,
    service_revision,
)
from vlm_operator.rollout.steps import Step, next_step
from vlm_operator.rollout.surge import BudgetUse, SurgeLimits, share, within_budget
from vlm_operator.rollout.target import RevisionTarget, RolloutTarget, select_target, sizes

__all__ = [
    "BudgetUse",
    "DrainPlan",
    "Key",
    "PodPatch",
    "RevisionTarget",
    "RolloutTarget",
    "Step",
    "SurgeLimits",
    "current_revisions",
    "drain_seconds",
    "keep_defaults",
    "key_of",
    "next_step",
    "plan_drain",
    "select_target",
    "service_revision",
    "share",
    "sizes",
    "within_budget",
]
