"""One turn of a service's loop, and what it takes to let a deleted service go.

loop.py       observe ─▶ decide ─▶ plan ─▶ apply ─▶ report                  Loop.turn
decisions.py  what this turn wants, as one value; pure                      Intent
sizing.py     how many replicas: the autoscaler's tick; pure                Sizing
rolling.py    how the rollout goes on; pure
writing.py    carrying it out, in an order that may be cut off anywhere
report.py     status, Events, memory, metrics, log                          Reporter
deletion.py   gateways drain first, then everything goes                    Loop.drain
rehearsal.py  the same turns without a cluster, for `vlm rollout` and `vlm render`; pure
classes.py    all VLMNodeClasses: their nodes, and who runs there           ClassLoop.turn
"""

from vlm_operator.reconcile.classes import ClassBook, ClassLoop
from vlm_operator.reconcile.decisions import Options
from vlm_operator.reconcile.loop import Loop

__all__ = ["ClassBook", "ClassLoop", "Loop", "Options"]
