"""What a client gets of tokens, whatever was held back until the end."""

from __future__ import annotations

import json
from typing import Any

import pytest
from worker.gateway.test_text_assembler import falls_back, with_bytes

from vlm_worker.core.token_texts import TokenTexts
from vlm_worker.gateway.detokenization import TextAssembler
from vlm_worker.gateway.http_response import Response
from vlm_worker.gateway.orchestrate.ttft_trace import Trace
from vlm_worker.gateway.responses import CompletionShape, Envelope, ResponseWriter, Usage
from vlm_worker.types import FinishReason


class Client:
    """Reads what is sent."""

    def __init__(self) -> None:
        self.body = b""

    async def send(self, message: dict[str, Any]) -> None:
        self.body += message.get("body", b"")

    def choice(self, *, stream: bool) -> tuple[str, str]:
        """Text and finish reason of the one choice."""
        if not stream:
            (choice,) = json.loads(self.body)["choices"]
            return choice["text"], choice["finish_reason"]
        events = self.body.decode().removesuffix("data: [DONE]\n\n").split("\n\n")[:-1]
        choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
        return "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]


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
        Envelope(CompletionShape(), "r", created=0, model="m", include_usage=False),
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
