"""Runs the turns of a service, and deletes a service.

queue.py      decides which service gets the next turn, when and why; pure   WorkQueue
workers.py    runs the turns that the queue starts                Workers
service.py    observe ─▶ decide ─▶ plan ─▶ apply ─▶ report                  ServiceReconciler.turn
decisions.py  plans a turn, as one value; pure                             TurnPlan
sizing.py     sizes the pools: one tick of the autoscaler; pure             Sizing
rolling.py    plans the next step of the rollout; pure
writing.py    executes the plan; a turn may end between any two writes      execute
retries.py    holds back what the API server refused, with a backoff        Retries
report.py     writes status, Events, memory, metrics, log                   Reporter
tracking.py   remembers progress and write conflicts between turns          Tracker
accepted_spec.py  stores the last accepted manifest; pure                   AcceptedSpec
deletion.py   drains the gateways, then removes our finalizer
node_classes.py  reconciles all VLMNodeClasses                              NodeClassReconciler.turn
unowned.py    reports VLMPools that no service controls                     PoolLoop.turn
"""

from vlm_operator.reconcile.decisions import Options
from vlm_operator.reconcile.node_classes import NodeClassReconciler, NodeClassUsage
from vlm_operator.reconcile.queue import Cause, Key, Outcome
from vlm_operator.reconcile.service import ServiceReconciler
from vlm_operator.reconcile.unowned import PoolLoop
from vlm_operator.reconcile.workers import Workers

__all__ = [
    "Cause",
    "Key",
    "NodeClassReconciler",
    "NodeClassUsage",
    "Options",
    "Outcome",
    "PoolLoop",
    "ServiceReconciler",
    "Workers",
]
