"""Rollouts: revisions, the steps from old to new pods, drains.

revisions.py      digest of a role's pod inputs; stable across operator upgrades
target.py         target revision of a rollout; the previous one if the new one failed
hold.py           the serving revision stays the target until the model is downloaded
replica_counts.py limits above and below a pool's size; sums over Deployments  SurgeLimits
steps.py          replicas of each revision in this turn                       next_step
  coordinated.py    all roles in steps, if old and new cannot communicate
drain.py          which pods stop accepting work, and when they may end        plan_drain
"""
