"""Traces: made up from seeds, or read from a file."""

import json

import pytest

from vlm_cli.simulator.generate import ALL_SHAPES, generate
from vlm_cli.simulator.trace import Request, TraceError, read_trace, write_trace


@pytest.mark.parametrize("shape", sorted(ALL_SHAPES))
def test_a_generated_trace_is_ordered_and_repeatable(shape):
    trace = generate(shape, seed=4, seconds=600.0)
    times = [request.at for request in trace.requests]
    assert times == sorted(times)
    assert times[0] >= 0
    assert times[-1] < 600.0
    assert generate(shape, seed=4, seconds=600.0) == trace
    assert generate(shape, seed=5, seconds=600.0) != trace
    assert {"image", "text"} == {request.modality for request in trace.requests}


def test_the_scale_multiplies_the_rate():
    one, two = (generate("steady", seed=1, seconds=600.0, scale=scale) for scale in (1.0, 2.0))
    assert len(two.requests) == pytest.approx(2 * len(one.requests), rel=0.1)


def test_a_recorded_trace_reads_as_it_was_written():
    trace = generate("steady", seed=1, seconds=60.0)
    assert read_trace("steady", write_trace(trace)).requests == trace.requests


def test_a_recorded_trace_may_leave_out_images_and_cache_and_come_unordered():
    lines = [
        '{"at": 70, "text_tokens": 3, "output_tokens": 4}',
        "",
        '{"at": 5.5, "text_tokens": 1, "output_tokens": 2, "patches": [256, 9]}',
    ]
    trace = read_trace("mine", lines)
    assert trace.requests == (Request(5.5, 1, 2, (256, 9)), Request(70.0, 3, 4))
    assert trace.seconds == 120.0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"at": -1}, "line 2: at must be seconds"),
        ({"at": True}, "line 2: at must be seconds"),
        ({"output_tokens": 0}, "line 2: output_tokens must be an integer of at least 1"),
        ({"text_tokens": None}, "line 2: text_tokens must be"),
        ({"patches": 3}, "line 2: patches must be a list"),
        ({"patches": [0]}, "line 2: patches must be an integer of at least 1"),
        ({"images": 1}, "line 2: images is not a field: use one of at, cached_tokens"),
    ],
)
def test_a_wrong_line_is_named_with_its_field_and_the_fix(change, words):
    good = {"at": 1, "text_tokens": 3, "output_tokens": 4}
    with pytest.raises(TraceError) as caught:
        read_trace("mine", [json.dumps(good), json.dumps(good | change)])
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"), [("{", "line 1 is not JSON"), ("[]", "not an object"), ("", "no request")]
)
def test_a_file_that_is_no_trace_is_refused(text, words):
    with pytest.raises(TraceError, match=words):
        read_trace("mine", [text])
