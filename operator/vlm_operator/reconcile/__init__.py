"""One turn of a service's loop, and what it takes to let a deleted service go.

loop.py       observe ─▶ decide ─▶ plan ─▶ apply ─▶ report                  Loop.turn
decisions.py  what this turn wants, as one value; pure                      Intent
writing.py    carrying it out, in an order that may be cut off anywhere
deletion.py   gateways drain first, then everything goes                    Loop.drain
classes.py    all VLMNodeClasses: their nodes, and who runs there           ClassLoop.turn
"""

from vlm_operator.reconcile.classes import ClassBook, ClassLoop
from vlm_operator.reconcile.decisions import Options
from vlm_operator.reconcile.loop import Loop

__all__ = ["ClassBook", "ClassLoop", "Loop", "Options"]
