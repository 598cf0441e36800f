"""What a client gets of tokens, whatever was held back until the end."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
import threading
from array import array
from typing import Any

import pytest
from worker.gateway.test_text_assembler import falls_back, with_bytes

from vlm_worker.core.token_texts import TokenTexts
from vlm_worker.gateway.api.schema import StreamUsage
from vlm_worker.gateway.detokenization import TextAssembler
from vlm_worker.gateway.echo import Echo, ScoredPrompt, completion_body
from vlm_worker.gateway.http_response import MESSAGE_BYTES, Response
from vlm_worker.gateway.orchestrate.ttft_trace import Trace
from vlm_worker.gateway.responses import CompletionShape, Envelope, ResponseWriter, Usage
from vlm_worker.types import FinishReason, PromptLogprobs


class Client:
    """Reads what is sent."""

    def __init__(self) -> None:
        self.body = b""
        self.sizes: list[int] = []

    async def send(self, message: dict[str, Any]) -> None:
        self.body += message.get("body", b"")
        self.sizes.append(len(message.get("body", b"")))

    def choice(self, *, stream: bool) -> tuple[str, str]:
        """Text and finish reason of the one choice."""
        if not stream:
            (choice,) = json.loads(self.body)["choices"]
            return choice["text"], choice["finish_reason"]
        events = self.body.decode().removesuffix("data: [DONE]\n\n").split("\n\n")[:-1]
        choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
        return "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]


class Texts(TokenTexts):
    """Those of a prompt of one letter per token; `threads` read them."""

    def __init__(self) -> None:
        self.threads: set[int] = set()

    def of(self, token_id: int) -> tuple[str, bytes]:
        self.threads.add(threading.get_ident())
        text = chr(ord("a") + token_id % 26)
        return text, text.encode()


NUM_TOP = 20
LONG_PROMPT = tuple(range(2000))
MOST_BYTES = 3 * MESSAGE_BYTES


def scored(token_ids: tuple[int, ...]) -> ScoredPrompt:
    count = len(token_ids) - 1
    ids = array("I", [token_id + at for token_id in token_ids[1:] for at in range(NUM_TOP)])
    values = array("f", [-float(at) for at in range(1, count + 1)])
    likeliest = array("f", [-float(one) / 8 for one in ids])
    scores = PromptLogprobs(1, values, array("I", ids[::NUM_TOP]), NUM_TOP, ids, likeliest)
    return ScoredPrompt(token_ids, scores)


async def written(echo: Echo, texts: Texts, *, stream: bool) -> Client:
    client = Client()
    prompt = scored(LONG_PROMPT)
    writer = ResponseWriter(
        Response(client.send),
        Envelope(CompletionShape(), "r", created=0, model="m", usage=StreamUsage.NONE),
        stream=stream,
        assemblers=[
            TextAssembler(falls_back(), TokenTexts(falls_back()), stop=()) for _ in range(2)
        ],
        echoes=[echo] * 2,
        texts=texts,
        with_logprobs=True,
        trace=Trace(received=0.0, clock=lambda: 1.0),
        on_token=lambda _: None,
    )

    async def answer(choice: int) -> None:
        writer.begin(choice, prompt, lambda: Usage(0, 1, 0, 1))
        for token_id in with_bytes("yes"):
            await writer.emit(choice, token_id, None)
        await writer.finish(choice, FinishReason.LENGTH)

    await asyncio.gather(answer(0), answer(1))
    await writer.end(Usage(image_tokens=0, text_tokens=1, cached_tokens=0, completion_tokens=2))
    return client


@pytest.mark.parametrize(
    ("echo", "stream"),
    [
        (Echo("text", num_logprobs=NUM_TOP), False),
        (Echo("text", num_logprobs=NUM_TOP), True),
        (Echo(num_prompt_logprobs=NUM_TOP), False),
        (Echo("text", NUM_TOP, NUM_TOP), False),
    ],
)
async def test_the_loop_writes_little_of_a_long_prompt_at_once(echo: Echo, stream: bool) -> None:
    texts = Texts()
    echo = dataclasses.replace(echo, text="".join(texts.of(one)[0] for one in LONG_PROMPT))
    texts.threads.clear()
    sizes: list[int] = []

    def watch(frame: Any, event: str, _: object) -> None:
        if event == "call" and frame.f_code is completion_body.__code__:
            sizes.append(len(frame.f_locals["tokens"] or ()))

    sys.setprofile(watch)  # of this thread alone
    try:
        client = await written(echo, texts, stream=stream)
    finally:
        sys.setprofile(None)
    assert texts.threads
    assert threading.get_ident() not in texts.threads
    assert max(sizes, default=0) <= 1
    assert max(client.sizes) <= MOST_BYTES < len(client.body)


def of_choice(client: Client, index: int, *, stream: bool) -> list[dict[str, Any]]:
    if not stream:
        return [json.loads(client.body)["choices"][index]]
    events = client.body.decode().removesuffix("data: [DONE]\n\n").split("\n\n")[:-1]
    choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    return [one for one in choices if one["index"] == index]


@pytest.mark.parametrize("stream", [True, False])
async def test_each_choice_of_a_long_prompt_has_its_values_in_order(stream: bool) -> None:
    texts = Texts()
    text = "".join(texts.of(one)[0] for one in LONG_PROMPT)
    client = await written(Echo(text, num_logprobs=NUM_TOP), texts, stream=stream)
    for index in range(2):
        choices = of_choice(client, index, stream=stream)
        assert "".join(one["text"] for one in choices) == f"{text}yes"
        shown = [one["logprobs"] for one in choices if one["logprobs"]]
        joined = {name: [v for one in shown for v in one[name]] for name in shown[0]}
        assert joined["tokens"] == list(text)
        assert joined["token_logprobs"] == [None, *(-float(one) for one in LONG_PROMPT[1:])]
        assert joined["text_offset"] == list(LONG_PROMPT)
        assert [len(one) for one in joined["top_logprobs"][1:]] == [NUM_TOP] * 1999


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("text", "said"),
    [("are é한", ("are é한", "length")), ("are é한😀", ("are é", "stop"))],
)
async def test_a_stop_string_in_the_last_run_of_bytes_is_why_the_answer_ends(
    text: str, said: tuple[str, str], stream: bool
) -> None:
    client = Client()
    writer = ResponseWriter(
        Response(client.send),
        Envelope(CompletionShape(), "r", created=0, model="m", usage=StreamUsage.NONE),
        stream=stream,
        assemblers=[TextAssembler(falls_back(), TokenTexts(falls_back()), stop=("한😀",))],
        with_logprobs=False,
        trace=Trace(received=0.0, clock=lambda: 1.0),
        on_token=lambda _: None,
    )
    for token_id in with_bytes(text):
        assert await writer.emit(0, token_id, None)
    await writer.finish(0, FinishReason.LENGTH)
    await writer.end(Usage(image_tokens=0, text_tokens=1, cached_tokens=0, completion_tokens=9))
    assert client.choice(stream=stream) == said
