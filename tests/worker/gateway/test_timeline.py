"""Where the time went: the stages sum to the TTFT, and a delay shows in its own stage alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_worker.gateway.orchestrate.ttft_trace import Call, Report, attribute
from vlm_worker.types import STAGES, StageSpan

INSTANTS = st.floats(-1, 12, allow_nan=False)
SPANS = st.lists(
    st.builds(
        lambda stage, a, b, item: StageSpan(stage, min(a, b), max(a, b), item),
        st.sampled_from([*STAGES, "kv_transfer"]),
        INSTANTS,
        INSTANTS,
        st.integers(0, 3),
    ),
    max_size=20,
)


@given(SPANS, st.floats(0, 3), st.floats(3.001, 10))
def test_the_stages_sum_to_the_ttft_whatever_is_reported(
    spans: list[StageSpan], received: float, first_byte: float
) -> None:
    owned = attribute(spans, received=received, first_byte=first_byte)
    assert tuple(owned) == STAGES
    assert min(owned.values()) >= 0
    assert sum(owned.values()) == pytest.approx(first_byte - received, abs=1e-9)


TOOK = {
    "gateway": 2, "media": 10, "encoder_queue": 3, "encode": 40, "embed_transfer": 5,
    "decode_reserve": 4, "prefill_queue": 6, "prefill": 50, "other": 0,
}  # fmt: skip


def request(**delays: float) -> tuple[list[StageSpan], float]:
    """A request of two images through E, P and D in which each stage takes so long by itself."""
    took = TOOK | delays
    now = took["gateway"]
    spans = [StageSpan("gateway", 0, now)]
    reserved = now + took["decode_reserve"]
    spans.append(StageSpan("decode_reserve", now, reserved))
    decoded = now + took["media"]
    spans += [StageSpan("media", now, decoded, item) for item in (1, 2)]
    encoding = decoded + took["encoder_queue"]
    encoded = encoding + took["encode"]
    prefilling = max(decoded, reserved)
    scheduled = prefilling + took["prefill_queue"]
    fetched = max(scheduled, encoded) + took["embed_transfer"]
    done = fetched + took["prefill"]
    for item in (1, 2):
        spans.append(StageSpan("encoder_queue", decoded, encoding, item))
        spans.append(StageSpan("encode", encoding, encoded, item))
        spans.append(StageSpan("embed_transfer", scheduled, fetched, item))
    spans.append(StageSpan("prefill_queue", prefilling, scheduled))
    spans.append(StageSpan("prefill", scheduled, done))
    return spans, done


@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage != "other"])
def test_a_delay_at_one_hop_shows_in_that_stage_alone(stage: str) -> None:
    spans, done = request()
    before = attribute(spans, received=0, first_byte=done)
    spans, delayed = request(**{stage: TOOK[stage] + 1000})
    after = attribute(spans, received=0, first_byte=delayed)
    assert after[stage] - before[stage] >= 900
    # The others own no more than they took themselves, less where they ran beside the delay.
    assert all(after[name] <= TOOK[name] + 1e-9 for name in STAGES if name != stage), after
    assert before["other"] == after["other"] == 0


def test_what_runs_beside_the_critical_path_owns_nothing() -> None:
    spans, done = request(media=100)
    assert attribute(spans, received=0, first_byte=done)["decode_reserve"] == 0


def test_chunks_of_prefill_own_their_time_while_a_later_image_is_encoded() -> None:
    spans = [
        StageSpan("encode", 0, 10, 1),
        StageSpan("encode", 10, 30, 2),
        StageSpan("prefill", 10, 60),
        StageSpan("prefill", 60, 70),
    ]
    owned = attribute(spans, received=0, first_byte=70)
    assert (owned["encode"], owned["prefill"]) == (10, 60)


def test_time_of_no_stage_is_other() -> None:
    spans = [StageSpan("gateway", 0, 2), StageSpan("prefill", 5, 9)]
    owned = attribute(spans, received=0, first_byte=10)
    assert (owned["gateway"], owned["prefill"], owned["other"]) == (2, 4, 4)


@given(st.floats(0, 100), st.floats(0, 1), st.floats(0, 1), st.floats(0, 10))
def test_a_call_is_placed_within_what_its_fastest_reply_allows(
    started: float, there: float, back: float, worked: float
) -> None:
    span = StageSpan("prefill", 0, worked)
    report = Report(started + there + worked + back, worked, (span,))
    slow = Report(started + there + worked + back + 5, worked, ())
    call = Call(started, [report, slow])
    assert started - 1e-9 <= call.arrived <= started + there + back + 1e-9
    assert abs(call.arrived - (started + there)) <= (there + back) / 2 + 1e-9
    assert call.spans[0].end - call.spans[0].start == pytest.approx(worked)


def test_a_span_that_is_reported_twice_counts_once() -> None:
    short, whole = StageSpan("prefill", 0, 1), StageSpan("prefill", 0, 3)
    call = Call(0.0, [Report(2, 2, (short,)), Report(4, 4, (whole,))])
    assert call.spans == (whole,)
