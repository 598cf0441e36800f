"""The way of images to their encoder is part of the stage `media`; other ways are nobody's."""

from __future__ import annotations

import pytest

from vlm_worker.gateway.orchestrate.ttft_trace import Trace
from vlm_worker.types import StageSpan
from vlm_worker.wire.messages import Accepted, Reply

WAY = 0.2
WORK = 1.0


@pytest.mark.parametrize(
    ("stage", "outbound", "want"),
    [("media", "media", {"media": WAY + WORK, "other": WAY}),
     ("prefill", None, {"prefill": WORK, "other": 2 * WAY})],
)  # fmt: skip
def test_the_way_to_a_worker_belongs_to_whom_the_call_says(
    stage: str, outbound: str | None, want: dict[str, float]
) -> None:
    now = 10.0
    trace = Trace(received=now, clock=lambda: now)
    trace.gateway_waits()
    call = trace.call(outbound=outbound)
    now += 2 * WAY + WORK  # there, work, and back
    event = Accepted("t", bytes(16), bytes(16), 10.0)
    call.report(Reply(event, (StageSpan(stage, 0.0, WORK, 1),), WORK))
    trace.first_byte_sent()
    owned = {name: seconds for name, seconds in trace.stages().items() if seconds > 1e-9}
    assert owned == pytest.approx(want)


def test_a_reply_that_arrives_after_the_stages_were_asked_for_counts() -> None:
    now = 10.0
    trace = Trace(received=now, clock=lambda: now)
    trace.gateway_waits()
    call = trace.call()
    event = Accepted("t", bytes(16), bytes(16), 10.0)
    now += 2 * WAY + WORK
    trace.first_byte_sent()
    before = trace.stages()
    assert before["prefill"] == 0.0
    before["prefill"] = -1.0  # the result belongs to the caller
    assert trace.stages()["prefill"] == 0.0
    call.report(Reply(event, (StageSpan("prefill", 0.0, WORK, 1),), WORK))
    assert trace.stages()["prefill"] == pytest.approx(WORK)
