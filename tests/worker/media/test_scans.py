"""JPEGs of thousands of scans are refused by their header: small files that take seconds."""

from __future__ import annotations

import io

import pytest
from worker.media.files import noise

from vlm_worker.errors import InvalidImageError
from vlm_worker.media.image_header import MAX_SCANS, read_header


def jpeg(*, progressive: bool = True, quality: int = 90) -> bytes:
    out = io.BytesIO()
    noise(seed=1).save(out, "JPEG", progressive=progressive, quality=quality)
    return out.getvalue()


def with_scans(count: int) -> bytes:
    """The last scan of a progressive file, again and again."""
    data = jpeg()
    last = data.rindex(b"\xff\xda")
    end = data.rindex(b"\xff\xd9")
    return data[:end] + data[last:end] * count + data[end:]


@pytest.mark.parametrize("progressive", [True, False])
def test_common_files_pass(progressive: bool) -> None:
    assert read_header(jpeg(progressive=progressive), item=0).format == "JPEG"


def test_more_scans_than_any_encoder_makes_are_refused() -> None:
    assert read_header(with_scans(MAX_SCANS // 2), item=0).format == "JPEG"
    with pytest.raises(InvalidImageError, match=f"more than {MAX_SCANS} scans"):
        read_header(with_scans(MAX_SCANS), item=0)
    with pytest.raises(InvalidImageError, match="scans"):
        read_header(with_scans(2000), item=0)


def test_bytes_that_look_like_scans_in_metadata_or_behind_the_end_count_for_nothing() -> None:
    data = jpeg()
    looks = b"\xff\xda" * (2 * MAX_SCANS)
    comment = b"\xff\xfe" + (len(looks) + 2).to_bytes(2, "big") + looks
    assert read_header(data[:2] + comment + data[2:], item=0).format == "JPEG"
    assert read_header(data + looks, item=0).format == "JPEG"


def test_markers_without_a_length_hide_no_scans() -> None:
    data = with_scans(2 * MAX_SCANS)
    scan = data.index(b"\xff\xda")
    for alone in (b"\xff\x01", b"\xff\xd3", b"\xff\xff"):
        with pytest.raises(InvalidImageError, match="scans"):
            read_header(data[:scan] + alone + data[scan:], item=0)
