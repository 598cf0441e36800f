"""What a user reads: conditions, the whole status, events. Pure; computed from what was seen.

view.py        what one turn knows                              View, Failure, Verdict
conditions.py  a list of predicates, in reading order            verdicts
readiness.py   of roles: the one thing that blocks
sizing.py      of sizes: who decides, on what, is there room, does it help
pools.py       the pools: counts, load, decisions
decisions.py   one decision, rounded                             decision_status
build.py       all of it, rounded                                build_status
classes.py     what a VLMNodeClass is told of itself             class_status
events.py      transitions worth an Event, and their reasons     events, REASONS
"""

from vlm_operator.status.build import build_status, pool_status_of_kind, refused_status
from vlm_operator.status.classes import ClassUse, Start, class_status, class_uses, is_told, latest
from vlm_operator.status.decisions import decision_status
from vlm_operator.status.events import REASONS, Event, events, foreign_event
from vlm_operator.status.view import Failure, Told, View

__all__ = [
    "REASONS",
    "ClassUse",
    "Event",
    "Failure",
    "Start",
    "Told",
    "View",
    "build_status",
    "class_status",
    "class_uses",
    "decision_status",
    "events",
    "foreign_event",
    "is_told",
    "latest",
    "pool_status_of_kind",
    "refused_status",
]
