"""A worker's progress of a download, as the operator shows it."""

from vlm_operator.status.progress import percent, steady
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
