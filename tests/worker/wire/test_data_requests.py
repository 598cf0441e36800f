"""The request of a data connection: it comes back as itself, or is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_worker.errors import InvalidRequestError
from vlm_worker.types import RequestKey
from vlm_worker.wire.data_protocol import LENGTH, MAX_REQUEST_BYTES, Fetch, request_of, request_to
from vlm_worker.wire.messages import FetchCall

CALL = FetchCall("t-1", b"b" * 16, b"f" * 16, RequestKey("r-1", 1), 3, "shared-memory.2", b"me")


@pytest.mark.parametrize("fetch", Fetch)
def test_a_request_is_decoded_as_it_was_encoded(fetch: Fetch) -> None:
    data = request_to(fetch, CALL)
    (length,) = LENGTH.unpack_from(data)
    assert length == len(data) - LENGTH.size <= MAX_REQUEST_BYTES
    assert request_of(data[LENGTH.size :]) == (fetch, CALL)


@given(st.binary(max_size=300), st.integers(0, 100))
def test_an_invalid_request_is_refused(data: bytes, cut: int) -> None:
    honest = request_to(Fetch.KV, CALL)[LENGTH.size :]
    for request in (data, honest[:cut] + data):
        try:
            _, call = request_of(request)
        except InvalidRequestError:
            continue
        assert isinstance(call, FetchCall)
