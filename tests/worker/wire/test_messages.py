"""Messages: every call survives the wire; what a peer may not say is refused by field."""

from __future__ import annotations

import dataclasses
import math
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_worker.annotations import MAX_PROMPT_LOGPROBS, MAX_TEXT
from vlm_worker.errors import IncompatibleError, InvalidRequestError
from vlm_worker.pb import worker_pb2 as pb
from vlm_worker.types import (
    EmbedLayout,
    FinishReason,
    ImageItem,
    PromptLogprobs,
    Request,
    RequestKey,
    Role,
    SamplingParams,
    Source,
    Stage,
    StageSpan,
    TokenLogprobs,
)
from vlm_worker.wire import messages
from vlm_worker.wire.codec import Codec
from vlm_worker.wire.prefetch_messages import PREFETCH_CALL, PrefetchCall

KEY = RequestKey("01J9-abc_d.e:f/g", 3)
SOURCE = Source("[::1]:9000", b"b" * 16, "t-1", b"f" * 16)

samplings = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 4096),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    top_p=st.sampled_from([0.25, 0.5, 1.0]),
    top_k=st.integers(0, 1000),
    seed=st.integers(0, 2**64 - 1),
    stop_token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=5).map(tuple),
    ignore_eos=st.booleans(),
    min_tokens=st.integers(0, 4096),
    min_p=st.sampled_from([0.0, 0.125, 1.0]),
    frequency_penalty=st.sampled_from([-2.0, 0.0, 0.5]),
    presence_penalty=st.sampled_from([0.0, 0.25, 2.0]),
    repetition_penalty=st.sampled_from([0.5, 1.0, 1.25, 10.0]),
    logit_bias=st.dictionaries(
        st.integers(0, 2**31 - 1), st.sampled_from([-100.0, 0.5, 100.0]), max_size=4
    ).map(lambda biases: tuple(sorted(biases.items()))),
    num_logprobs=st.none() | st.integers(0, 20),
    num_prompt_logprobs=st.none() | st.integers(0, 20),
    grammar=st.sampled_from([b"", b'start: "\xc3\xbc"', b"x" * (256 << 10)]),
)
LOGPROBS = TokenLogprobs(-0.5, ((7, -0.5), (9, -2.25)))


@st.composite
def requests(draw: st.DrawFn) -> Request:
    tokens = draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=50))
    items, end = [], 0
    while end < len(tokens) and draw(st.booleans()):
        offset = draw(st.integers(end, len(tokens) - 1))
        count = draw(st.integers(1, len(tokens) - offset))
        items.append(ImageItem(draw(st.binary(min_size=32, max_size=32)), offset, count, (1, 2, 4)))
        end = offset + count
    return Request(
        key=KEY,
        token_ids=tuple(tokens),
        num_prompt_tokens=draw(st.integers(1, len(tokens))),
        sampling=draw(samplings),
        items=tuple(items),
        cache_salt=draw(st.sampled_from([b"", b"s" * 32])),
        priority=draw(st.integers(-1000, 1000)),
        weighted_seconds=draw(st.sampled_from([0.0, 0.125, 1e6])),
    )


@given(requests(), st.booleans(), st.booleans())
def test_a_prefill_call_survives(request: Request, handoff: bool, last_resort: bool) -> None:
    sources = (SOURCE,) * len(request.items)
    call = messages.PrefillCall(request, "t", sources, handoff=handoff, last_resort=last_resort)
    message = pb.PrefillRequest.FromString(messages.PREFILL_CALL.encode(call).SerializeToString())
    assert messages.PREFILL_CALL.decode(message) == call


@given(requests())
def test_a_prefetch_call_survives(request: Request) -> None:
    call = PrefetchCall(request)
    message = pb.PrefetchRequest.FromString(PREFETCH_CALL.encode(call).SerializeToString())
    assert PREFETCH_CALL.decode(message) == call


@given(requests())
def test_a_decode_call_survives(request: Request) -> None:
    call = messages.DecodeCall(request, "reservation", SOURCE, b"x" * 16)
    message = pb.DecodeRequest.FromString(messages.DECODE_CALL.encode(call).SerializeToString())
    assert messages.DECODE_CALL.decode(message) == call


def test_an_encode_call_survives() -> None:
    items = tuple(messages.EncodeItem(t, 100, 640, 480, 12, 5000, "JPEG") for t in ("t", "u"))
    rows = messages.EncodeItem("v", 100, 0, 0, 12, 0, "bfloat16", grid_thw=(1, 6, 8))
    call = messages.EncodeCall(
        KEY,
        (*items, rows),
        b"s" * 32,
        last_resort=True,
        skip_corrupt=True,
        priority=-3,
        pins_session=True,
        weighted_seconds=2.5,
    )
    message = pb.EncodeBegin.FromString(messages.ENCODE_CALL.encode(call).SerializeToString())
    assert messages.ENCODE_CALL.decode(message) == call


SPANS = (StageSpan("encode", 0.25, 0.5, 2),)
RANKS = array("I", [1, 900])
SCORES = PromptLogprobs(
    5, array("f", [-0.5, -3.0]), RANKS, 2, array("I", [7, 9, 7, 2]), array("f", [-0.5, -2, -1, -9])
)
UNLISTED = PromptLogprobs(1, array("f", [-0.5, -math.inf]), RANKS, 0, array("I"), array("f"))
ERROR = messages.ItemError("invalid_image", "broken")


ENCODE, PREFILL, DECODE = messages.ENCODE_REPLY, messages.PREFILL_REPLY, messages.DECODE_REPLY


@pytest.mark.parametrize(
    ("event", "codec"),
    [
        (messages.ItemReady(1, cache_hit=True, num_bytes=9), ENCODE),
        (messages.ItemFailed(1, "code", "why"), ENCODE),
        (messages.Accepted("t", b"b" * 16, b"f" * 16, 10.0), PREFILL),
        (messages.FirstToken(0, 7, 64, None), PREFILL),
        (messages.FirstToken(3, 7, 0, FinishReason.STOP), PREFILL),
        (messages.FirstToken(0, 7, 64, None, LOGPROBS), PREFILL),
        (messages.PrefillDone(), PREFILL),
        (SCORES, PREFILL),
        (UNLISTED, PREFILL),
        (messages.Tokens(4, (1, 2, 3)), DECODE),
        (messages.Tokens(4, (7, 8), (LOGPROBS, TokenLogprobs(-3.0))), DECODE),
        (messages.Finished(FinishReason.DRAINED, 9), DECODE),
    ],
)
def test_a_reply_survives(event: Any, codec: Codec[Any]) -> None:
    reply = messages.Reply(event, SPANS, 1.5)
    assert codec.decode(codec.encode(reply)) == reply


def test_decoded_items_and_their_errors_survive() -> None:
    good = messages.DecodedItem(12, (1, 6, 8), b"k" * 32)
    bad = messages.DecodedItem(0, (0, 0, 0), b"", ERROR)
    sent = ENCODE.encode(messages.Reply(messages.Decoded((good, bad)), (), 0.0))
    event = ENCODE.decode(sent).event
    assert isinstance(event, messages.Decoded)
    assert event.items == (good, bad)


def test_hello_and_load_survive() -> None:
    hello = messages.Hello(
        role=Role.DECODE,
        stages=frozenset({Stage.PREFILL, Stage.DECODE}),
        model="shapes",
        model_revision="r",
        pod_name="p",
        pod_uid="u",
        boot_id=b"b" * 16,
        layout_fingerprint=b"l" * 16,
        embed_fingerprint=b"e" * 16,
        compat="c",
        weights="int8",
        limits=messages.Limits(64, 4096, 2048, 8),
        grammars=True,
        min_tokens=True,
        prompt_logprobs=True,
        embed_layout=EmbedLayout("r", 8, 1, "bfloat16"),
    )
    older = dataclasses.replace(hello, embed_layout=None)
    assert messages.HELLO.decode(messages.HELLO.encode(older)) == older
    assert messages.HELLO.decode(messages.HELLO.encode(hello)) == hello
    load = messages.Load(1, 2, 0.5, 100, 200, accepting=True, boot_id=b"b" * 16)
    assert messages.LOAD.decode(messages.LOAD.encode(load)) == load
    fetch = messages.FetchCall("t", b"b" * 16, b"f" * 16, KEY, 5)
    assert messages.FETCH_CALL.decode(messages.FETCH_CALL.encode(fetch)) == fetch


def test_a_peer_of_another_protocol_is_refused() -> None:
    with pytest.raises(IncompatibleError, match="protocol 2"):
        messages.HELLO.decode(pb.HelloReply(protocol_version=2, pod_name="p"))


def _valid() -> pb.PrefillRequest:
    request = Request(
        KEY, (1, 2, 3, 4), 4, SamplingParams(4), (ImageItem(b"k" * 32, 1, 2, (1, 2, 4)),)
    )
    return messages.PREFILL_CALL.encode(messages.PrefillCall(request, "t", (SOURCE,)))


BAD = {
    "request_id": {"request_id": ""},
    "request_id with a newline": {"request_id": "a\nb"},
    "transfer_id": {"transfer_id": "x" * 200},
    "token_ids": {"token_ids": [], "num_prompt_tokens": 0},
    "num_prompt_tokens": {"num_prompt_tokens": 5},
    "cache_salt": {"cache_salt": b"short"},
    "priority": {"priority": 1001},
}


@pytest.mark.parametrize("case", BAD)
def test_a_field_out_of_bounds_is_named(case: str) -> None:
    message = _valid()
    for name, value in BAD[case].items():
        if isinstance(value, list):
            message.ClearField(name)
        else:
            setattr(message, name, value)
    with pytest.raises(InvalidRequestError, match=case.split()[0]):
        messages.PREFILL_CALL.decode(message)


FLOATS = (
    "temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
)  # fmt: skip

ITEM_CASES = {
    "image_key": lambda item: setattr(item, "image_key", b"k"),
    "offset": lambda item: setattr(item, "offset", 9),
    "no tokens": lambda item: setattr(item, "num_tokens", 0),
    "address": lambda item: setattr(item.source, "address", "nowhere"),
    "boot id": lambda item: setattr(item.source, "boot_id", b"x"),
    "grid": lambda item: item.grid_thw.append(3),
}


@pytest.mark.parametrize("case", ITEM_CASES)
def test_an_item_out_of_bounds_is_refused(case: str) -> None:
    message = _valid()
    ITEM_CASES[case](message.items[0])
    with pytest.raises(InvalidRequestError):
        messages.PREFILL_CALL.decode(message)


def test_items_that_overlap_are_refused() -> None:
    message = _valid()
    message.items.append(message.items[0])
    with pytest.raises(InvalidRequestError, match="overlap"):
        messages.PREFILL_CALL.decode(message)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("num_logprobs", 22),
        ("num_prompt_logprobs", 22),
        *((name, value) for name in FLOATS for value in (-1e30, 1e30, math.nan, math.inf)),
    ],
)
def test_a_sampling_parameter_out_of_bounds_is_named(field: str, value: float) -> None:
    message = _valid()
    setattr(message.sampling, field, value)
    with pytest.raises(InvalidRequestError, match=rf"sampling\.{field} must be"):
        messages.PREFILL_CALL.decode(message)


@pytest.mark.parametrize(
    "biases",
    [{7: 101.0}, {7: math.nan}, dict.fromkeys(range(1025), 1.0)],
    ids=["too large", "no number", "too many"],
)
def test_biases_out_of_bounds_are_refused(biases: dict[int, float]) -> None:
    message = _valid()
    for token_id, bias in biases.items():
        message.sampling.logit_bias[token_id] = bias
    with pytest.raises(InvalidRequestError, match=r"sampling\.logit_bias must be"):
        messages.PREFILL_CALL.decode(message)


@pytest.mark.parametrize(
    "logprobs",
    [
        [pb.TokenLogprobs(logprob=-1.0)],
        [pb.TokenLogprobs(logprob=math.nan)] * 2,
        [pb.TokenLogprobs(logprob=-1.0, top_token_ids=[1])] * 2,
        [pb.TokenLogprobs(logprob=-1.0, top_token_ids=[1] * 21, top_logprobs=[-1.0] * 21)] * 2,
    ],
    ids=["fewer than tokens", "no number", "ids without values", "too many"],
)
def test_log_probabilities_that_cannot_be_are_refused(logprobs: list[Any]) -> None:
    tokens = pb.Tokens(first_index=0, token_ids=[1, 2], logprobs=logprobs)
    with pytest.raises(InvalidRequestError, match="logprobs"):
        messages.DECODE_REPLY.decode(pb.DecodeReply(tokens=tokens))


LONE = pb.TokenLogprobs(logprob=-1.0)
TOP = pb.TokenLogprobs(logprob=-1.0, top_token_ids=[1], top_logprobs=[-1.0])


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"first_index": 0}, "first_index"),
        ({"logprobs": [], "ranks": []}, "logprobs"),
        ({"ranks": [1]}, "ranks"),
        ({"ranks": [1, 0]}, "ranks"),
        ({"ranks": [1, 2**32 - 1]}, "ranks"),
        ({"logprobs": [pb.TokenLogprobs(logprob=math.nan)] * 2}, "logprob"),
        ({"logprobs": [LONE] * (MAX_PROMPT_LOGPROBS + 1)}, "logprobs must have"),
        ({"logprobs": [LONE, TOP]}, "top_logprobs"),
        ({"logprobs": [pb.TokenLogprobs(logprob=-1.0, top_token_ids=[1])] * 2}, "top_logprobs"),
        (
            {"logprobs": [pb.TokenLogprobs(top_token_ids=[1] * 21, top_logprobs=[-1.0] * 21)] * 2},
            "top_logprobs",
        ),
    ],
)
def test_log_probabilities_of_a_prompt_that_cannot_be_are_refused(
    changes: dict[str, Any], what: str
) -> None:
    fields: dict[str, Any] = {
        "first_index": 1,
        "logprobs": [pb.TokenLogprobs(logprob=-1.0)] * 2,
        "ranks": [1, 2],
    }
    part = pb.PromptLogprobs(**fields | changes)
    with pytest.raises(InvalidRequestError, match=what):
        messages.PREFILL_REPLY.decode(pb.PrefillReply(prompt_logprobs=part))


def test_a_value_that_lacks_a_field_of_its_message_is_refused_at_import() -> None:
    @dataclasses.dataclass
    class Chunk:
        item: int

    with pytest.raises(TypeError, match="data"):
        Codec(Chunk, pb.EncodeChunk)


def test_a_text_that_is_too_long_for_a_peer_is_cut() -> None:
    failed = messages.ItemFailed(0, "code", "x" * 5000)
    sent = ENCODE.decode(ENCODE.encode(messages.Reply(failed, (), 0.0))).event
    assert isinstance(sent, messages.ItemFailed)
    assert sent.message == "x" * MAX_TEXT
