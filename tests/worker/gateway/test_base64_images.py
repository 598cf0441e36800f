"""The bytes of a data URL, piece by piece as at once, and what a client is told of others."""

from __future__ import annotations

import base64
import itertools
import json

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from vlm_worker.gateway import base64_text
from vlm_worker.gateway.base64_text import NotBase64Error, TooManyBytesError, decode_base64
from vlm_worker.gateway.images import split_data_url
from vlm_worker.gateway.turns import at_once


def decoded(text: bytes, *, max_bytes: int = 2**20, escaped: bool = False) -> tuple[bytes, bytes]:
    data, digest = at_once(decode_base64(memoryview(text), max_bytes=max_bytes, escaped=escaped))
    return bytes(data), digest


@pytest.fixture(params=[8, 64, 65536])
def piece(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(base64_text, "PIECE_BYTES", request.param)
    return int(request.param)


@pytest.mark.usefixtures("piece")
@pytest.mark.parametrize("length", [1, 2, 3, 4, 47, 48, 49, 1000])
def test_any_bytes_are_decoded_and_hashed(length: int) -> None:
    data = bytes(i * 37 % 256 for i in range(length))
    assert decoded(base64.b64encode(data)) == (data, xxhash.xxh3_128_digest(data))


WRAPPED = st.lists(st.tuples(st.integers(0, 400), st.sampled_from([b"\n", b"\r\n", b" ", b"\t"])))


@pytest.mark.parametrize("size", [8, 64, 65536])
@given(st.binary(min_size=1, max_size=200), WRAPPED, st.booleans(), st.booleans(), st.booleans())
def test_wrapped_unpadded_and_url_safe_base64_is_the_same_image(
    size: int, data: bytes, spaces: list[tuple[int, bytes]], padded: bool, safe: bool, escaped: bool
) -> None:
    text = base64.urlsafe_b64encode(data) if safe else base64.b64encode(data)
    text = text if padded else text.rstrip(b"=")
    for at, space in spaces:
        text = text[: at % (len(text) + 1)] + space + text[at % (len(text) + 1) :]
    if escaped:
        text = json.dumps(text.decode())[1:-1].encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base64_text, "PIECE_BYTES", size)
        assert decoded(text, escaped=escaped) == (data, xxhash.xxh3_128_digest(data))
        with pytest.raises(TooManyBytesError):
            decoded(text, escaped=escaped, max_bytes=len(data) - 1)


@pytest.mark.usefixtures("piece")
@pytest.mark.parametrize("slash", [b"\\/", b"\\u002f", b"\\u002F"])
@pytest.mark.parametrize("plus", [b"+", b"\\u002B"])
def test_escapes_of_other_json_encoders_are_read(slash: bytes, plus: bytes) -> None:
    data = b"\xff\xef\xfb" * 50 + b"\xff"
    text = base64.b64encode(data).replace(b"/", slash).replace(b"+", plus)
    assert decoded(text, escaped=True)[0] == data


@given(st.binary(min_size=1, max_size=200), st.integers(0, 300), st.sampled_from(b"=!\xff\x0b"))
def test_a_foreign_character_anywhere_is_refused(data: bytes, at: int, character: int) -> None:
    text = base64.b64encode(data)
    at %= len(text.rstrip(b"="))
    spoiled = text[:at] + bytes([character]) + text[at:]
    with pytest.raises(NotBase64Error):
        decoded(spoiled)


@pytest.mark.usefixtures("piece")
@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"QUJD\n!UJD", "character 5 that"),
        (b"QUJDQ", "cut off"),
        (b"QUJDQQ=", "wrong number of '='"),
        (b"QUJDQR==", "last character"),
        (b"QUJDQR", "last character"),
        (b"QUJDQQ==QUJD", "wrong number of '='|before its end|alphabet"),
        (b"QUJDQQ==\n\n\n\n\n\n\n\n\n\n!", "before its end|alphabet|cut off"),
        (b"", "empty"),
        (b" \n", "empty"),
    ],
)
def test_what_is_wrong_is_said(text: bytes, said: str) -> None:
    with pytest.raises(NotBase64Error, match=said):
        decoded(text)


def test_more_bytes_than_allowed_are_not_decoded_to_the_end() -> None:
    text = b"AAAA" * 2**20
    steps = decode_base64(memoryview(text), max_bytes=100_000, escaped=False)
    with pytest.raises(TooManyBytesError):
        list(itertools.islice(steps, 4))


@pytest.mark.parametrize(
    ("url", "escaped", "found"),
    [
        (b"data:image/png;base64,QUJD", False, ("image/png", b"QUJD")),
        (b"data:image\\/png;base64,QUJD", True, ("image/png", b"QUJD")),
        (b"data:image\\/png;base64,QUJD", False, None),
        (b"data:text/plain;base64,QUJD", False, None),
        (b"data:image/png,QUJD", False, None),
    ],
)
def test_a_data_url_is_split(url: bytes, escaped: bool, found: tuple[str, bytes] | None) -> None:
    split = split_data_url(url, escaped=escaped)
    assert (split and (split[0], bytes(split[1]))) == found
