"""What test_bottlenecks.py shows with pods that are held back, from a run of it that was recorded.

Where CPU limits cannot be set no pool is the slow one; here it is decided again on the stage times
of real pods. recorded/keep.py makes the recording.
"""

import dataclasses
from pathlib import Path

import pytest

from vlm_operator.autoscale.explain import explain
from vlm_operator.autoscale.outcome import Reason
from vlm_operator.autoscale.record import load_record, replay
from vlm_operator.names import Role

RECORDED = Path(__file__).parent / "recorded" / "bottlenecks.jsonl"
UP = {Reason.SCALE_UP}
STORY = [
    pytest.param(Role.ENCODER, UP, "encoder_queue", id="images"),
    pytest.param(Role.DECODE, UP, "KV tokens in use", id="long answers"),
    pytest.param(Role.PREFILL, UP, "prefill_queue", id="long prompts"),
    pytest.param(Role.ENCODER, {Reason.IDLE}, "no image for", id="text alone"),
    pytest.param(Role.ENCODER, {Reason.WAKE}, "images", id="images again"),
]
TICKS = [load_record(line) for line in RECORDED.read_text().splitlines()]


@pytest.mark.parametrize(("role", "reasons", "says"), STORY)
def test_recorded_stage_times_move_the_pool_whose_load_it_was_and_no_other(role, reasons, says):
    moved = []
    for tick in TICKS:
        again = dataclasses.replace(tick, outcome=replay(tick))
        if again.outcome.decisions[role].reason in reasons:
            moved.append(again)
    assert moved, f"no recorded load moves {role}: record anew"
    for tick in moved:
        changed = {name for name, item in tick.outcome.decisions.items() if item.before != item.to}
        assert changed == {role}
        [about] = [part for part in explain(tick).split("\n\n") if part.startswith(f"{role}:")]
        print(about)
        assert says in about
