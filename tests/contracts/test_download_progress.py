"""A worker's progress of a download, as the operator shows it."""

import json

import pytest

from vlm_operator.scrape import parse_progress
from vlm_operator.status.progress import percent, steady
from vlm_worker.serve.fetch_progress import FetchProgress
from vlm_worker.serve.hub import progress_text


def test_the_operator_keeps_what_changes_rarely_of_the_progress_of_a_download() -> None:
    gib = 2.0**30
    texts = [
        "downloading a/b: " + progress_text(share * gib, 16 * gib, seconds=seconds)
        for share, seconds in ((0.0, 0.0), (10.0, 7.0), (10.2, 9.0), (16.0, 30.0))
    ]
    assert [percent(text) for text in texts] == [0, 60, 60, 100]
    assert [steady(text) for text in texts] == [
        f"downloading a/b: {share} % of 16.0 GiB" for share in (0, 60, 60, 100)
    ]
    assert " s left" in texts[1]


def test_the_operator_reads_what_a_fetch_reports() -> None:
    now = [100.0]
    progress = FetchProgress(lambda: now[0])
    first = parse_progress(json.loads(json.dumps(progress.to_json("u"))), "u")
    assert (first.num_bytes, first.total_bytes, first.seconds_left) == (0, 0, None)
    progress.total_bytes = 1000
    progress.downloaded(0, 800)  # 200 bytes are there from an earlier run
    now[0] += 10
    progress.downloaded(400, 800)
    half = parse_progress(progress.to_json("u"), "u")
    assert (half.num_bytes, half.seconds_left, half.checking) == (600, 10.0, False)
    progress.checked(250)
    progress.checked(250)
    last = parse_progress(progress.to_json("u"), "u")
    assert (last.num_bytes, last.seconds_left, last.checking) == (500, None, True)
    with pytest.raises(ValueError, match="pod"):
        parse_progress(progress.to_json("other"), "u")
