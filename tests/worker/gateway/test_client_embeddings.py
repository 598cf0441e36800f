"""Embeddings in place of images: what is refused, and that the rest answers as the image does."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worker.gateway.embeds import (
    FAMILY,
    GRID,
    LAYOUT,
    NUM_TOKENS,
    ROWS,
    ask_of,
    encoded_rows,
    encoder,
    file_of,
    part,
    text,
)
from worker.gateway.image_files import ask, png
from worker.gateway.stack import (
    ONE_PROCESS,
    TOPOLOGIES,
    D,
    E,
    P,
    Stack,
    client,
    gateway_settings,
    serving,
    stack,
    stack_of,
)
from worker.tensor_files import tensor_file

from vlm_worker.annotations import MAX_IMAGE_BYTES
from vlm_worker.gateway.api.errors import ApiError
from vlm_worker.gateway.api.requests import parse_chat
from vlm_worker.gateway.body import MIN_DATA_URL_BYTES, read_json
from vlm_worker.gateway.client_embeddings import common_layout
from vlm_worker.gateway.config import Config, Limits
from vlm_worker.gateway.images import RequestImage, check_taken_out, read_images
from vlm_worker.gateway.overflow import fit
from vlm_worker.gateway.turns import at_once
from vlm_worker.gateway.visual import Tier, VisualLimits, VisualPolicy
from vlm_worker.types import EmbedLayout, Role, Stage
from vlm_worker.wire import messages

QUESTION = "What is in this image, and which colours does it have?"
PATH = "messages[0].content[0].image_embeds"


def body_of(one: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "shapes", "messages": [ask_of(one, QUESTION)], "max_tokens": 24, **fields}


def read(
    one: Any, visual: VisualLimits | None = None, layout: EmbedLayout = LAYOUT, **limits: Any
) -> RequestImage:
    """What a gateway sends for a part, read from a body."""
    raw = bytearray(json.dumps(body_of(one)).encode())
    parsed = at_once(read_json(raw))
    request = at_once(parse_chat(parsed.value))
    check_taken_out(parsed.images, request.images)
    visual = visual or VisualLimits()
    policy = VisualPolicy(visual, FAMILY, tenant="", visual=None, messages=request.messages)
    config = Config(limits=Limits(**limits))
    steps = read_images(request.images, config, FAMILY, parsed.images, visual=policy, layout=layout)
    (image,) = at_once(steps)
    assert image is not None
    return image


# ---- what is taken -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "one",
    [
        part(file_of()),
        part(file_of(), uuid="mine"),
        part(file_of(grid=json.dumps(GRID)), grid=None),
        part(file_of(grid=json.dumps(GRID))),
        {
            "type": "image_embeds",
            "image_embeds": {"image_embeds": text(file_of()), "image_grid_thw": list(GRID)},
        },
        part(text(file_of()).rstrip("=").replace("+", "-").replace("/", "_")),
        part("\n".join(text(file_of())[i : i + 76] for i in range(0, 400, 76))),
    ],
)
def test_every_form_of_an_embedding_is_the_same(one: Any) -> None:
    image = read(one)
    assert bytes(image.data) == ROWS
    assert (image.format, image.grid_thw, image.num_tokens) == ("bfloat16", GRID, NUM_TOKENS)
    assert image.path == PATH
    assert image.reduction is None


def test_the_digest_is_of_bytes_and_grid() -> None:
    turned = tensor_file(ROWS, "bfloat16", (NUM_TOKENS, 4))
    digests = {
        read(part(file_of())).digest,
        read(part(turned, grid=(1, 8, 6))).digest,
        read(part(file_of(ROWS[:-2] + b"\0\0"))).digest,
    }
    assert len(digests) == 3


@given(st.integers(1, 3), st.booleans(), st.sampled_from(["data", "image_embeds"]), st.booleans())
def test_long_embeddings_are_taken_out_of_the_body(
    count: int, spaced: bool, name: str, escaped: bool
) -> None:
    layout = dataclasses.replace(LAYOUT, hidden_size=200)
    file = file_of(b"\xff\x3f" * (200 * NUM_TOKENS), layout)
    assert len(text(file)) > MIN_DATA_URL_BYTES
    parts = [{"image_embeds": {name: text(file), "grid_thw": [1]}} for _ in range(count)]
    value = {"x": "AAAAAAAB7", "parts": parts, "data": text(file_of()), "text": text(file)}
    written = json.dumps(value, separators=(" , ", " : ") if spaced else (",", ":"))
    if escaped:
        written = written.replace("/", "\\/")
    parsed = at_once(read_json(bytearray(written.encode())))
    assert len(parsed.images) == count
    for one in parsed.value["parts"]:
        inner = one["image_embeds"]
        assert json.loads(b'"' + bytes(parsed.images[inner[name]]) + b'"') == text(file)
    assert (parsed.value["data"], parsed.value["text"]) == (text(file_of()), text(file))


def test_an_embedding_larger_than_a_body_without_images_is_read() -> None:
    layout = dataclasses.replace(LAYOUT, hidden_size=4096, num_levels=63)
    rows = b"\x80\x3f" * (NUM_TOKENS * layout.row_elements)
    assert len(rows) > 4 * 2**20
    image = read(part(file_of(rows, layout)), layout=layout)
    assert bytes(image.data) == rows


def test_an_embedding_where_no_image_is_expected_is_refused() -> None:
    layout = dataclasses.replace(LAYOUT, hidden_size=200)
    file = file_of(b"\xff\x3f" * (200 * NUM_TOKENS), layout)
    value = {**body_of({"type": "text", "text": "a"}), "metadata": {"data": text(file)}}
    parsed = at_once(read_json(bytearray(json.dumps(value).encode())))
    with pytest.raises(ApiError, match="no image is expected"):
        check_taken_out(parsed.images, ())


# ---- what is refused -----------------------------------------------------------------------------

NOT_FINITE = [
    ("bfloat16", b"\x80\x7f"),
    ("bfloat16", b"\x80\xff"),
    ("bfloat16", b"\xc0\x7f"),
    ("float16", b"\x00\x7c"),
    ("float16", b"\x01\xfc"),
    ("float32", b"\x00\x00\x80\x7f"),
    ("float32", b"\x01\x00\x80\xff"),
]


@pytest.mark.parametrize(("dtype", "value"), NOT_FINITE)
def test_a_value_that_is_not_finite_is_named(dtype: str, value: bytes) -> None:
    layout = dataclasses.replace(LAYOUT, dtype=dtype)
    at = 5 * 4 + 3
    rows = bytearray(len(value) * 4 * NUM_TOKENS)
    rows[at * len(value) : (at + 1) * len(value)] = value
    with pytest.raises(ApiError, match=r"element \[5, 3\] is not finite") as refused:
        read(part(file_of(bytes(rows), layout)), layout=layout)
    error = refused.value
    assert (error.status, error.code, error.param) == (400, "invalid_image_embeds", f"{PATH}.data")


BAD: list[tuple[Any, str, str, str]] = [
    ("", "invalid_value", "", "1 to"),
    (5, "invalid_type", "", "an object"),
    (None, "missing_required_parameter", "", "required"),
    ({}, "missing_required_parameter", ".data", "required"),
    ({"data": 5, "grid_thw": [1, 6, 8]}, "invalid_type", ".data", "a string"),
    ({"data": "AA==", "image_embeds": "AA=="}, "invalid_value", ".image_embeds", "the same"),
    ({"data": "AA==", "detail": "low"}, "unknown_parameter", ".detail", "known"),
    ({"data": "AA==", "grid_thw": [1, 6]}, "invalid_image_embeds", ".grid_thw", "three"),
    ({"data": "AA==", "image_grid_thw": "AA=="}, "invalid_image_embeds", ".image_grid_thw",
     "three"),
    ("https://example.com/a", "invalid_image_embeds", "", "a URL"),
    ("data:image/png;base64,AAAA", "invalid_image_embeds", "", "a URL"),
    ("AA=", "invalid_image_embeds", "", "base64"),
    ("AAA!", "invalid_image_embeds", "", "base64"),
    ("AAAA", "invalid_image_embeds", "", "safetensors"),
    ({"image_embeds": "AAAA"}, "invalid_image_embeds", ".image_embeds", "safetensors"),
    (text(b"PK\x03\x04" + bytes(100)), "invalid_image_embeds", "", "torch.save"),
    (text(file_of()), "missing_required_parameter", "", "grid_thw"),
    ({"data": text(file_of())}, "missing_required_parameter", ".grid_thw", "grid_thw"),
    (text(file_of(grid="[1, 6]")), "invalid_image_embeds", "", "metadata"),
    ({"data": text(file_of(grid="[1, 8, 6]")), "grid_thw": GRID}, "invalid_image_embeds",
     ".grid_thw", "metadata"),
    ({"data": text(file_of()), "grid_thw": [1, 5, 8]}, "invalid_image_embeds", ".grid_thw",
     "no image"),
    ({"data": text(file_of()), "grid_thw": [2, 6, 8]}, "invalid_image_embeds", ".grid_thw",
     "no image"),
    ({"data": text(file_of()), "grid_thw": [1, 60, 80]}, "invalid_image_embeds", ".grid_thw",
     "256"),
    ({"data": text(file_of()), "grid_thw": [1, 8, 8]}, "invalid_image_embeds", ".data",
     r"send \[16, 4\]"),
    ({"data": text(tensor_file(bytes(96), "float16", (12, 4))), "grid_thw": GRID},
     "invalid_image_embeds", ".data", "BF16"),
    ({"data": text(file_of(shape=(NUM_TOKENS * 4, 1))), "grid_thw": GRID},
     "invalid_image_embeds", ".data", "4 elements"),
    ({"data": text(file_of()[:-1]), "grid_thw": GRID}, "invalid_image_embeds", ".data",
     "whole file"),
]  # fmt: skip


@pytest.mark.parametrize(("value", "code", "field", "said"), BAD)
def test_each_error_is_one_400_with_its_path(value: Any, code: str, field: str, said: str) -> None:
    one = {"type": "image_embeds", "image_embeds": value}
    with pytest.raises(ApiError, match=said) as refused:
        read(one, on_corrupt="Skip")
    error = refused.value
    assert (error.status, error.code, error.param) == (400, code, f"{PATH}{field}")


def test_the_size_of_an_embedding_is_bounded() -> None:
    with pytest.raises(ApiError, match="more than 100 bytes") as refused:
        read(part(file_of()), bytes_per_image=100)
    assert (refused.value.code, refused.value.param) == ("image_too_large", f"{PATH}.data")
    large = text(file_of(bytes(MAX_IMAGE_BYTES)))
    with pytest.raises(ApiError, match=f"more than {MAX_IMAGE_BYTES} bytes"):
        read(part(large), bytes_per_image=2**30)


def test_an_embedding_counts_as_an_image() -> None:
    with pytest.raises(ApiError) as refused:
        read(part(file_of()), images_per_request=0)
    assert refused.value.code == "too_many_images"


@pytest.mark.parametrize("role", ["system", "assistant"])
def test_an_embedding_belongs_into_a_user_message(role: str) -> None:
    body = {**body_of(0), "messages": [{"role": role, "content": [part(file_of())]}]}
    with pytest.raises(ApiError, match="user messages"):
        at_once(parse_chat(body))


# ---- policies ------------------------------------------------------------------------------------


def test_no_policy_reduces_an_embedding() -> None:
    limits = VisualLimits(policy="Auto", low=Tier(keep_percent=25))
    image = read(part(file_of()), visual=limits)
    assert (image.num_tokens, image.reduction, image.choice.tier) == (NUM_TOKENS, None, "native")


def test_a_request_beyond_the_context_drops_embeddings_and_never_reduces_them() -> None:
    image = read(part(file_of()))
    same = fit([image, image], 1, "ReduceOldest", FAMILY, num_last=1)
    assert (same.images, same.dropped) == ((image, image), frozenset())
    dropped = fit([image, image], 1, "DropOldest", FAMILY, num_last=1)
    assert dropped.dropped == {0}


# ---- the layout ----------------------------------------------------------------------------------


def hello(layout: EmbedLayout | None, *stages: Stage) -> messages.Hello:
    limits = messages.Limits(0, 0, 0, 1)
    return messages.Hello(
        Role.DECODE, frozenset(stages), "m", "r", "p", "u", b"b" * 16, b"", b"e" * 16, "", "",
        limits, embed_layout=layout,
    )  # fmt: skip


def test_the_layout_is_that_of_all_encoders() -> None:
    newer = dataclasses.replace(LAYOUT, model_revision="newer")
    other = dataclasses.replace(LAYOUT, dtype="float16")
    unknown = dataclasses.replace(LAYOUT, dtype="float6")
    assert common_layout([]) is None
    assert common_layout([hello(LAYOUT, E), hello(newer, E, P, D), hello(other, D)]) == LAYOUT
    assert common_layout([hello(LAYOUT, P), hello(LAYOUT, D)]) == LAYOUT
    assert common_layout([hello(LAYOUT, E), hello(None, E)]) is None
    assert common_layout([hello(None, E), hello(LAYOUT, P)]) is None
    assert common_layout([hello(LAYOUT, E), hello(other, E)]) is None
    assert common_layout([hello(unknown, E)]) is None


async def test_without_the_flag_the_error_names_it() -> None:
    async with (
        serving(gateway_settings([])) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=30) as api,
    ):
        body = body_of(part(file_of()))
        counted = {name: body[name] for name in ("model", "messages")}
        for path, asked in (("/v1/chat/completions", body), ("/tokenize", counted)):
            answer = await api.post(path, json=asked)
            error = answer.json()["error"]
            assert answer.status_code == 400
            assert (error["code"], error["param"]) == ("unsupported_parameter", PATH)
            assert "--client-embeddings" in error["message"]
            assert "gateway.clientEmbeddings" in error["message"]


def announce(served: Stack, layout: EmbedLayout | None) -> None:
    """Let the Hello of each pod with the stage encoder have this layout."""
    for peer in served.gateway.context.registry.peers.values():
        assert peer.hello is not None
        if E in peer.hello.stages:
            peer.hello = dataclasses.replace(peer.hello, embed_layout=layout)


@pytest.mark.parametrize("topology", ["E-PD", "P-D"])
async def test_an_encoder_of_an_older_release_gets_no_embedding_after_the_check(
    tmp_path: Path, topology: str
) -> None:
    """It would read the rows as a file, and skip them."""
    config = tmp_path / "gateway.json"
    config.write_text(json.dumps({"limits": {"on_corrupt": "Skip"}}))
    async with stack_of(topology, client_embeddings=True, config=config) as served:
        context = served.gateway.context
        layout = encoder(served).components.context.embed_layout
        context.preparer = dataclasses.replace(context.preparer, embed_layout=lambda: layout)
        announce(served, None)
        body = body_of(part(file_of(bytes(NUM_TOKENS * layout.row_bytes), layout)))
        async with httpx.AsyncClient(base_url=served.url, timeout=60) as api:
            answer = await api.post("/v1/chat/completions", json=body)
            assert answer.status_code == 503
            assert "takes embeddings in place of images" in answer.json()["error"]["message"]
            announce(served, dataclasses.replace(layout, model_revision="newer"))
            answer = await api.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200
            assert answer.json()["usage"]["prompt_tokens"] > NUM_TOKENS
        await served.until_idle()


async def test_an_embedding_that_an_encoder_refuses_is_never_skipped(tmp_path: Path) -> None:
    config = tmp_path / "gateway.json"
    config.write_text(json.dumps({"limits": {"on_corrupt": "Skip"}}))
    async with stack_of("E-PD", client_embeddings=True, config=config) as served:
        assert encoder(served).components.context.embed_layout != LAYOUT
        announce(served, LAYOUT)
        async with httpx.AsyncClient(base_url=served.url, timeout=60) as api:
            answer = await api.post("/v1/chat/completions", json=body_of(part(file_of())))
        await served.until_idle()
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == PATH


async def test_without_a_worker_the_layout_is_not_known() -> None:
    async with (
        serving(gateway_settings([], client_embeddings=True)) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=30) as api,
    ):
        answer = await api.post("/v1/chat/completions", json=body_of(part(file_of())))
    assert answer.status_code == 503
    assert "layout of embeddings" in answer.json()["error"]["message"]
    assert int(answer.headers["retry-after"]) >= 1


# ---- the answer is that to the image -------------------------------------------------------------


async def told(api: openai.AsyncOpenAI, message: Any) -> tuple[str, int, int]:
    """The text of an answer, and the tokens of its prompt, with those that were cached."""
    answer = await api.chat.completions.create(
        model="shapes", messages=[message], max_tokens=24, temperature=0
    )
    usage = answer.usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    cached = usage.prompt_tokens_details.cached_tokens or 0
    return answer.choices[0].message.content or "", usage.prompt_tokens, cached


def taken(served: Stack) -> dict[str, Any]:
    """A part with what the encoder has made of the one image that it has seen."""
    worker = encoder(served)
    layout = worker.components.context.embed_layout
    rows = encoded_rows(worker)
    assert np.isfinite(np.frombuffer(rows, np.float32)).all() or layout.dtype != "float32"
    return part(file_of(rows, layout))


@pytest.mark.parametrize("topology", [*TOPOLOGIES, ONE_PROCESS])
async def test_the_embedding_of_an_image_has_the_answer_to_the_image(topology: str) -> None:
    async with stack_of(topology, client_embeddings=True) as served, client(served) as api:
        expected = await told(api, ask(png(), QUESTION))
        await served.until_idle()
        one, worker = taken(served), encoder(served)
        calls = list(worker.runner.batch_sizes)
        first = await told(api, ask_of(one, QUESTION))
        second = await told(api, ask_of(one, QUESTION))
        other = await told(api, ask(png((1, 2, 3)), QUESTION))
        await served.until_idle()
        assert worker.runner.batch_sizes == [*calls, 1], "the other image alone"
        meters = served.gateway.context.meters
        assert (meters.num_images, meters.num_visual_tokens) == (4, 4 * NUM_TOKENS)
    assert first[:2] == second[:2] == expected[:2]
    assert second[2] >= first[2] + NUM_TOKENS, "other keys than the image, and the same twice"
    assert other[0] != expected[0]


async def test_an_answer_continues_on_another_encoder_if_its_own_is_lost() -> None:
    plans = (
        (Role.ENCODER, (E,)),
        (Role.ENCODER, (E,)),
        (Role.DECODE, (P, D)),
    )
    async with stack_of("E-PD", client_embeddings=True) as served, client(served) as api:
        expected = await told(api, ask(png(), QUESTION))
        await served.until_idle()
        one = taken(served)
    delays = {"media": 0.5}
    async with (
        stack(*plans, worker_delays=delays, client_embeddings=True) as served,
        client(served) as api,
    ):
        answering = asyncio.create_task(told(api, ask_of(one, QUESTION)))
        encoders = served.of(Role.ENCODER)
        async with asyncio.timeout(30):
            while not any(worker.num_held for worker in encoders):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        (victim,) = [worker for worker in encoders if worker.num_held]
        await victim.kill()
        found = await answering
        await served.until_idle()
        (other,) = [worker for worker in encoders if worker is not victim]
        assert other.components.engine.stats().encoder_cache.misses == 1
    assert found[:2] == expected[:2]


@pytest.mark.timeout(120)
async def test_the_small_model_answers_an_embedding_as_the_image() -> None:
    async with (
        stack((Role.DECODE, (E, P, D)), runner="model", client_embeddings=True) as served,
        client(served) as api,
    ):
        expected = await told(api, ask(png(), QUESTION))
        await served.until_idle()
        one = taken(served)
        found = await told(api, ask_of(one, QUESTION))
        other = await told(api, ask_of(part(_zeros(one)), QUESTION))
        await served.until_idle()
    assert found[:2] == expected[:2]
    assert other[1] == expected[1]
    assert other[0] != expected[0], "the answer depends on the embedding"


def _zeros(one: dict[str, Any]) -> bytes:
    """The same file with zeros."""
    layout = EmbedLayout("", hidden_size=FAMILY.hidden_size, num_levels=0, dtype="bfloat16")
    assert len(text(file_of(bytes(NUM_TOKENS * layout.row_bytes), layout))) == len(
        one["image_embeds"]["data"]
    )
    return file_of(bytes(NUM_TOKENS * layout.row_bytes), layout)
