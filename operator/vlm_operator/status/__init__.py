"""Computes conditions, the whole status and Events of one turn. Pure.

inputs.py           inputs from one turn                            StatusInputs, Failure
conditions.py       all conditions, in reading order                condition_states
generation.py       Ready, Reconciling, Stalled, the rollout        ready
causes.py           why pods do not serve: table of causes, fixes   POD_CAUSES, Problem
manifest_fields.py  which fields of the manifest a pod refers to    field_of, references
progress.py         whether the service makes progress              Progress, update_progress
readiness.py        readiness of roles, with the blocking cause     examined
sizing.py           conditions on scaling, metrics, capacity, SLO   scaling
pools.py            the pools: counts, load, decisions              pool_status
decisions.py        one decision, rounded                           decision_status
build.py            the whole status, rounded                       build_status
refused.py          the status of a refused manifest or a deletion  refused_status
reasons.py          every reason of every condition                 REASONS_OF
write_pacing.py     which changes may wait for a later write        WritePacing
classes.py          the status of a VLMNodeClass                    class_status
unowned.py          the status of a VLMPool without a service       unowned_status
events.py           transitions that become Events, their reasons   events, REASONS
"""

from vlm_operator.status.build import build_status, pool_status_of_kind
from vlm_operator.status.causes import sentence
from vlm_operator.status.classes import (
    ClassUse,
    Start,
    class_status,
    class_uses,
    is_current,
    latest,
)
from vlm_operator.status.decisions import decision_status
from vlm_operator.status.events import REASONS, Event, events, foreign_event
from vlm_operator.status.inputs import ConditionReason, Failure, StatusInputs
from vlm_operator.status.progress import Progress, restored, update_progress
from vlm_operator.status.readiness import examined, reached
from vlm_operator.status.refused import deleting_status, refusal, refused_status
from vlm_operator.status.unowned import unowned_status
from vlm_operator.status.write_pacing import WritePacing

__all__ = [
    "REASONS",
    "ClassUse",
    "ConditionReason",
    "Event",
    "Failure",
    "Progress",
    "Start",
    "StatusInputs",
    "WritePacing",
    "build_status",
    "class_status",
    "class_uses",
    "decision_status",
    "deleting_status",
    "events",
    "examined",
    "foreign_event",
    "is_current",
    "latest",
    "pool_status_of_kind",
    "reached",
    "refusal",
    "refused_status",
    "restored",
    "sentence",
    "unowned_status",
    "update_progress",
]
