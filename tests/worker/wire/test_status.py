"""A client raises what the server raised."""

from __future__ import annotations

from urllib.parse import quote

import grpc
import pytest

from vlm_worker import errors
from vlm_worker.wire.status import error_of, status_of

ERRORS = [
    errors.InvalidRequestError("bad", param="messages[1]", code="bad_thing"),
    errors.InvalidRequestError("bad \u00e9"),
    errors.ContextTooLongError("5000 tokens, 4096 fit"),
    errors.InvalidImageError("broken", item=2, code="image_too_large"),
    errors.OverloadedError("full", retry_after_seconds=1.5),
    errors.DrainingError("going"),
    errors.PeerLostError("gone"),
    errors.GoneError("expired"),
    errors.DuplicateError("again"),
    errors.IncompatibleError("other"),
    errors.UnauthorizedError("not yours"),
    errors.CorruptTransferError("flipped"),
    errors.CancelledError("stop"),
    errors.EngineError("defect"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_is_decoded_as_it_was_encoded(error: errors.WorkerError) -> None:
    code, message, metadata = status_of(error)
    back = error_of(code, message, metadata)
    assert type(back) is type(error)
    assert (str(back), vars(back)) == (str(error), vars(error))


def test_every_leaf_of_the_tree_has_a_status() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    leaves = {kind for kind in kinds if issubclass(kind, errors.WorkerError)}
    assert leaves - {errors.WorkerError} == {type(error) for error in ERRORS}


def test_a_defect_is_internal_and_names_itself() -> None:
    code, message, metadata = status_of(KeyError("x"))
    assert code is grpc.StatusCode.INTERNAL
    assert isinstance(error_of(code, message, metadata), errors.EngineError)
    assert "KeyError" in message


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, errors.PeerLostError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.PeerLostError),
        (grpc.StatusCode.UNKNOWN, errors.PeerLostError),
        (grpc.StatusCode.INTERNAL, errors.PeerLostError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.OverloadedError),
        (grpc.StatusCode.UNIMPLEMENTED, errors.IncompatibleError),
        (grpc.StatusCode.CANCELLED, errors.CancelledError),
    ],
)
def test_what_the_transport_says_has_an_error_too(
    code: grpc.StatusCode, kind: type[errors.WorkerError]
) -> None:
    assert type(error_of(code, "", (), peer="10.0.0.1:9000")) is kind


def test_metadata_of_a_stranger_is_no_reason_to_fail() -> None:
    metadata = (("vlm-error", "OverloadedError"), ("vlm-retry-after-ms", "-1e9"))
    back = error_of(grpc.StatusCode.RESOURCE_EXHAUSTED, "m" * 9000, metadata)
    assert isinstance(back, errors.OverloadedError)
    assert back.retry_after_seconds == 0
    assert len(str(back)) == 700


def test_a_long_message_in_any_script_fits_into_the_trailing_metadata() -> None:
    _, message, _ = status_of(errors.EngineError("x" + "\N{GRINNING FACE}" * 5000))
    assert message.startswith("x\N{GRINNING FACE}")
    assert len(quote(message)) < 3 * 1024
