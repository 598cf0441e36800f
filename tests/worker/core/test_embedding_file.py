"""The format of stored embeddings: what is read is what was written, or an error."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_worker.core.embedding_file import (
    NAME,
    BadFileError,
    StoredEmbedding,
    file_name,
    pack,
    read_header,
    unpack,
)
from vlm_worker.types import EmbedLayout

LAYOUT = EmbedLayout("revision", hidden_size=2, num_levels=1, dtype="bfloat16")
KEY = b"k" * 32


def stored(num_tokens: int = 3, *, scored: bool = True) -> StoredEmbedding:
    rows = bytes(range(num_tokens * LAYOUT.row_bytes))
    scores = b"\0\0\x80\x3f" * num_tokens if scored else b""
    return StoredEmbedding(KEY, num_tokens, memoryview(rows), memoryview(scores))


def whole(one: StoredEmbedding, layout: EmbedLayout = LAYOUT) -> bytes:
    return b"".join(pack(one, layout))


@given(st.integers(1, 20), st.booleans())
def test_an_embedding_survives_the_round_trip(num_tokens: int, scored: bool) -> None:
    one = stored(num_tokens, scored=scored)
    data = memoryview(whole(one))
    read = unpack(data, LAYOUT, image_key=KEY, num_tokens=num_tokens)
    assert (bytes(read.rows), bytes(read.scores)) == (bytes(one.rows), bytes(one.scores))
    assert read_header(data).num_bytes == len(data)


def test_every_flipped_bit_is_an_error() -> None:
    data = whole(stored())
    for place in range(len(data)):
        for bit in (1, 128):
            wrong = bytearray(data)
            wrong[place] ^= bit
            with pytest.raises(BadFileError):
                unpack(memoryview(wrong), LAYOUT, image_key=KEY, num_tokens=3)


def test_every_truncated_or_longer_file_is_an_error() -> None:
    data = whole(stored())
    for wrong in (*(data[:end] for end in range(len(data))), data + b"\0"):
        with pytest.raises(BadFileError):
            unpack(memoryview(wrong), LAYOUT, image_key=KEY, num_tokens=3)


@pytest.mark.parametrize(
    "header",
    [
        b"[" * 4000,
        b"[1]",
        b"\xff",
        b"{}",
        b'{"version": 1, "rows_bytes": Infinity, "scores_bytes": 0}',
        b'{"version": 1, "rows_bytes": null, "scores_bytes": 0}',
    ],
)
def test_a_header_of_anything_else_is_an_error(header: bytes) -> None:
    data = b"triptych" + len(header).to_bytes(4, "little") + header
    with pytest.raises(BadFileError):
        read_header(data)


@pytest.mark.parametrize(
    ("key", "num_tokens", "layout"),
    [
        (b"x" * 32, 3, LAYOUT),
        (KEY, 4, LAYOUT),
        (KEY, 3, dataclasses.replace(LAYOUT, model_revision="other")),
    ],
)
def test_another_image_or_model_is_an_error(
    key: bytes, num_tokens: int, layout: EmbedLayout
) -> None:
    with pytest.raises(BadFileError, match="another image, model or layout"):
        unpack(memoryview(whole(stored())), layout, image_key=key, num_tokens=num_tokens)


def test_a_name_hides_the_key_and_differs_by_key() -> None:
    assert NAME.fullmatch(file_name(KEY))
    assert KEY.hex() not in file_name(KEY)
    assert file_name(KEY) != file_name(b"x" * 32)
