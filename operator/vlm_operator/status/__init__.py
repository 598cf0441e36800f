"""What a user reads: conditions, the whole status, events. Pure; computed from what was seen.

view.py        what one turn knows                              View, Failure, Verdict
conditions.py  a list of predicates, in reading order            verdicts
generation.py  Ready, Reconciling, Stalled, the rollout          ready
causes.py      why pods do not serve: one table, cause and fix   POD_CAUSES, Problem
places.py      where a pod stands in its manifest                place_of, references
progress.py    whether the service gets on                       Progress, follow
readiness.py   of roles: the one thing that blocks               examined
sizing.py      of sizes: who decides, on what, is there room, does it help
pools.py       the pools: counts, load, decisions
decisions.py   one decision, rounded                             decision_status
build.py       all of it, rounded                                build_status
refused.py     the same of a refused manifest or a deletion      refused_status
changes.py     what is written at once, and what is spaced       Spaced
classes.py     what a VLMNodeClass is told of itself             class_status
events.py      transitions worth an Event, and their reasons     events, REASONS
"""

from vlm_operator.status.build import build_status, pool_status_of_kind
from vlm_operator.status.changes import Spaced
from vlm_operator.status.classes import ClassUse, Start, class_status, class_uses, is_told, latest
from vlm_operator.status.decisions import decision_status
from vlm_operator.status.events import REASONS, Event, events, foreign_event
from vlm_operator.status.progress import Progress, follow, restored
from vlm_operator.status.readiness import examined, reached
from vlm_operator.status.refused import deleting_status, refusal, refused_status
from vlm_operator.status.view import Failure, Told, View

__all__ = [
    "REASONS",
    "ClassUse",
    "Event",
    "Failure",
    "Progress",
    "Spaced",
    "Start",
    "Told",
    "View",
    "build_status",
    "class_status",
    "class_uses",
    "decision_status",
    "deleting_status",
    "events",
    "examined",
    "follow",
    "foreign_event",
    "is_told",
    "latest",
    "pool_status_of_kind",
    "reached",
    "refusal",
    "refused_status",
    "restored",
]
