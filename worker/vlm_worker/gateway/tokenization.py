"""`/tokenize` and `/detokenize`, in vLLM's form: the tokens of a prompt, and their text.

body ─▶ chat with images, or text ─▶ the prompt that a request would have ─▶ count and ids
body ─▶ ids ─▶ text

The gateway answers alone: no worker is called. A prompt is refused as that of a generation is.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final

from vlm_worker.gateway.api import errors, schema
from vlm_worker.gateway.api.errors import invalid, unsupported
from vlm_worker.gateway.api.requests import ChatRequest
from vlm_worker.gateway.api.schema import MAX_TEXT, Fields, check_token_ids, refuse
from vlm_worker.gateway.body import (
    BodyBytes,
    JsonBody,
    Receive,
    read_body,
    read_json,
    timeout_of,
)
from vlm_worker.gateway.context import GatewayContext
from vlm_worker.gateway.dialect import Dialect
from vlm_worker.gateway.endpoint import Endpoint, Exchange, run_until_ended
from vlm_worker.gateway.http_response import Response, encode
from vlm_worker.gateway.orchestrate.ttft_trace import Trace
from vlm_worker.gateway.prompts import Prompt, check_context
from vlm_worker.gateway.request_guard import unguarded
from vlm_worker.gateway.turns import Steps

MAX_MODEL: Final = 256
# Longer prompts are written on a thread: they would block the event loop for milliseconds.
MANY_TOKENS: Final = 4096
_OF_CHATS: Final = ("messages", "tools", "tool_choice", "reasoning_effort", "visual")


@dataclasses.dataclass(frozen=True, slots=True)
class TextToCount:
    """A text to tokenize; a bare one without what the tokenizer adds around a text."""

    text: str
    is_bare: bool


def split(body: Mapping[str, Any]) -> tuple[dict[str, Any] | TextToCount, bool, bool]:
    """Return a chat's body or a text, whether it asks, and whether token strings are wanted.

    Raises:
        ApiError: 400; it names the invalid part.
    """
    fields = Fields("", body)
    refuse(fields, schema.TOKENIZE)
    model = fields.required_text("model", max_length=MAX_MODEL)
    with_strings = fields.boolean("return_token_strs") or False
    special = fields.boolean("add_special_tokens")
    asks = fields.boolean("add_generation_prompt")
    chat = {name: value for name in _OF_CHATS if (value := fields.take(name)) is not None}
    if "messages" in chat:
        if fields.take("prompt") is not None:
            raise invalid("'prompt' and 'messages' exclude each other.", param="prompt")
        if special:
            raise unsupported(
                "add_special_tokens",
                "'add_special_tokens' must be false with 'messages': the chat template writes "
                "them.",
            )
        fields.done()
        return {"model": model, **chat}, asks is not False, with_strings
    text = fields.text("prompt", max_length=MAX_TEXT, min_length=1)
    fields.done()
    if text is None:
        raise fields.missing("prompt")
    if asks is not None:
        chat["add_generation_prompt"] = asks
    for name in chat:
        raise invalid(f"'{name}' needs 'messages'.", param=name)
    return TextToCount(text, special is False), False, with_strings


class _Tokenize(Dialect):
    name = "tokenize"


class _Detokenize(Dialect):
    name = "detokenize"


class _Alone(Endpoint):
    """An endpoint that the gateway answers without workers."""

    needs_workers = False

    async def _exchange(
        self, exchange: Exchange, scope: dict[str, Any], receive: Receive, response: Response
    ) -> None:
        context, held = self._context, exchange.held
        if context.refusing:
            raise errors.unavailable("This gateway is shutting down; another one takes requests.")
        timeout = timeout_of(scope)
        body = [await read_body(scope, receive, held=held, turns=context.preparer.turns)]
        trace = Trace(received=context.clock(), clock=context.clock)
        until = None if timeout is None else trace.received + timeout
        # pass on the only reference, so that the body is freed once it is parsed
        work = self._answer(body.pop(), exchange, trace)
        answer = await run_until_ended(work, ends=self._ends(receive, trace, until))
        await response.whole(200, answer, {})

    async def _answer(self, body: BodyBytes, exchange: Exchange, trace: Trace) -> bytes:
        raise NotImplementedError


class TokenizeEndpoint(_Alone):
    """`POST /tokenize`: the prompt that a chat or a completion would have."""

    def __init__(self, context: GatewayContext) -> None:
        super().__init__(context, "chat", _Tokenize)
        self._operation = "tokenize"

    async def _answer(self, body: BodyBytes, exchange: Exchange, trace: Trace) -> bytes:
        context, preparer = self._context, self._context.preparer
        config = context.config_watcher.now.config
        parsed, request, with_strings = await preparer.turns.run(self._read(body, exchange))
        if isinstance(request, ChatRequest):
            prepared = await preparer.chat_with_images(
                request,
                parsed,
                config,
                held=exchange.held,
                request_id=exchange.request_id,
                tenant=exchange.tenant,
                trace=trace,
                guard=unguarded,
            )
            prompt = prepared.prompt_without(frozenset())
        else:
            prompt = await preparer.text_prompt(request.text, config, is_bare=request.is_bare)
        limit = preparer.context(config)
        check_context(prompt, None, limit, param="prompt", max_tokens_param="max_tokens")
        return await _run(lambda: self._written(prompt, limit, with_strings), len(prompt.token_ids))

    def _read(
        self, body: BodyBytes, exchange: Exchange
    ) -> Steps[tuple[JsonBody, ChatRequest | TextToCount, bool]]:
        preparer = self._context.preparer
        parsed = yield from read_json(body, exchange.held.decode)
        asked, asks, with_strings = split(parsed.value)
        if isinstance(asked, TextToCount):
            preparer.check_model(parsed.value["model"])
            return parsed, asked, with_strings
        chat = yield from preparer.checked_chat(parsed, asked)
        return parsed, dataclasses.replace(chat, asks=asks), with_strings

    def _written(self, prompt: Prompt, limit: int, with_strings: bool) -> bytes:
        tokenizer = self._context.prompt_builder.tokenizer
        body: dict[str, Any] = {
            "count": len(prompt.token_ids),
            "max_model_len": limit,
            "tokens": prompt.token_ids,
            "token_strs": None,
        }
        if with_strings:
            body["token_strs"] = [tokenizer.id_to_token(one) or "" for one in prompt.token_ids]
        return encode(body)


class DetokenizeEndpoint(_Alone):
    """`POST /detokenize`: the text of tokens."""

    def __init__(self, context: GatewayContext) -> None:
        super().__init__(context, "completion", _Detokenize)
        self._operation = "detokenize"

    async def _answer(self, body: BodyBytes, exchange: Exchange, trace: Trace) -> bytes:
        del trace  # no image is fetched
        preparer, builder = self._context.preparer, self._context.prompt_builder
        parsed = await preparer.turns.run(read_json(body, exchange.held.decode))
        fields = Fields("", parsed.value)
        model = fields.required_text("model", max_length=MAX_MODEL)
        values = fields.take("tokens")
        fields.done()
        preparer.check_model(model)
        if values is None:
            raise fields.missing("tokens")
        token_ids = check_token_ids(values, "tokens")
        builder.check_ids(token_ids, "tokens", with_images=True)
        return await _run(lambda: encode({"prompt": builder.text_of(token_ids)}), len(token_ids))


async def _run(write: Callable[[], bytes], num_tokens: int) -> bytes:
    return await asyncio.to_thread(write) if num_tokens > MANY_TOKENS else write()
