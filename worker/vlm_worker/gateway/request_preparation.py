"""Prepare a request: fetch and check images, tokenize, check the context, fill defaults.

No worker is called.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from vlm_worker.gateway.answer_grammar import AnswerGrammars
from vlm_worker.gateway.api.completion_prompts import GivenPrompt
from vlm_worker.gateway.api.completions import CompletionRequest, check_shown, parse_completion
from vlm_worker.gateway.api.errors import ApiError, unsupported
from vlm_worker.gateway.api.parts import ImagePart, TextPart
from vlm_worker.gateway.api.requests import (
    ChatRequest,
    Message,
    Options,
    parse_chat,
    parse_message,
)
from vlm_worker.gateway.api.tools import CallsParser
from vlm_worker.gateway.body import BodyBytes, JsonBody, read_json
from vlm_worker.gateway.client_embeddings import check_allowed, layout_for
from vlm_worker.gateway.config import Config, Salts, max_hold_seconds, max_wait_seconds
from vlm_worker.gateway.conversation import (
    Conversation,
    client_texts,
    conversation_without,
    without_images,
)
from vlm_worker.gateway.dialect import Dialect
from vlm_worker.gateway.fetching.fetcher import ImageFetcher
from vlm_worker.gateway.fetching.urls import is_url
from vlm_worker.gateway.grammar_checks import GrammarChecks
from vlm_worker.gateway.images import RequestImage, check_count, check_taken_out, read_images
from vlm_worker.gateway.memory import MemoryReservation
from vlm_worker.gateway.orchestrate.prepared_request import PreparedRequest
from vlm_worker.gateway.orchestrate.ttft_trace import Trace
from vlm_worker.gateway.overflow import Fitted, fit
from vlm_worker.gateway.pod_caches import RequestDigests
from vlm_worker.gateway.prompts import Prompt, PromptBuilder, check_context, context_exceeded
from vlm_worker.gateway.request_guard import Guard, unguarded
from vlm_worker.gateway.responding.message import AnswerForm, schemas
from vlm_worker.gateway.sampling_defaults import check_min_tokens, check_sampling, sampling_of
from vlm_worker.gateway.turns import Steps, Turns, at_once
from vlm_worker.gateway.visual import BrownOut, VisualPolicy, Why, check_visual_tokens
from vlm_worker.types import EmbedLayout

logger = logging.getLogger(__name__)

# Longer texts are tokenized on a thread: they would block the event loop for milliseconds.
LONG_TEXT_BYTES = 8 * 1024
# To write a message takes the time of so many bytes of text.
_MESSAGE_BYTES = 64
# An id in a tuple: the integer and the reference to it.
_ID_BYTES = 36
# Reductions that depend on the question or on load: the next turn may have another.
_WHY_OF_ONE_TURN = frozenset({Why.CLASS, Why.LOAD, Why.CONTEXT})

T = TypeVar("T")
Fetched = Mapping[int, bytearray]


@dataclasses.dataclass(frozen=True, slots=True)
class Preparer:
    """Prepares requests. With `any_priority` clients may set a priority above the default.

    With `session_prefetch`, a chat knows the beginning of its next turn. With `mark_history`,
    prompts of conversations have `num_history_tokens`. With `client_embeddings`, chats may have
    embeddings in place of images, of the layout that `embed_layout` returns; None if none is known.
    """

    prompt_builder: PromptBuilder
    served_name: str
    max_model_len: int
    block_size: int
    salts: Salts
    any_priority: bool = False
    session_prefetch: bool = False
    mark_history: bool = False
    client_embeddings: bool = False
    embed_layout: Callable[[], EmbedLayout | None] = lambda: None
    turns: Turns = dataclasses.field(default_factory=Turns)
    brown_out: BrownOut = dataclasses.field(default_factory=BrownOut)
    fetcher: ImageFetcher = dataclasses.field(default_factory=ImageFetcher)
    grammar_checks: GrammarChecks = dataclasses.field(default_factory=GrammarChecks)

    async def read(
        self,
        body: BodyBytes,
        kind: Literal["chat", "completion"],
        config: Config,
        *,
        dialect: Dialect,
        held: MemoryReservation,
        request_id: str,
        tenant: str,
        trace: Trace,
        guard: Guard,
    ) -> tuple[tuple[PreparedRequest, ...], Options]:
        """Prepare the requests in a body, one per prompt; also returns the response's options.

        The result holds no reference to the body. `held` counts the body's bytes and its values,
        the images that are fetched, and what the answer shows of its prompts. `trace` gets the time
        of the fetches. `guard` ends fetches and checks of grammars if the request ends. `dialect`
        makes a chat of the body.

        Raises:
            ApiError: the request is invalid; the error names the field.
            FullError: the gateway has no memory for these now, or too many fetches or checks
                of the tenant wait.
        """
        ids = {"request_id": request_id, "tenant": tenant}
        if kind == "chat":
            parsed, chat = await self.turns.run(self._read_chat(body, held, dialect))
            prepared = await self.chat_with_images(
                chat, parsed, config, held=held, trace=trace, guard=guard, **ids
            )
            return (prepared,), chat.options
        parsed = await self.turns.run(read_json(body, held.decode))
        completion = parse_completion(parsed.value)
        requests = await self.completions(completion, config, **ids)
        held.add(sum(one.num_shown_bytes for one in requests))
        return requests, completion.options

    async def chat_with_images(
        self,
        request: ChatRequest,
        parsed: JsonBody,
        config: Config,
        *,
        held: MemoryReservation,
        request_id: str,
        tenant: str,
        trace: Trace,
        guard: Guard,
    ) -> PreparedRequest:
        """Fetch and check the images of a chat, and prepare it. Raises as `read` does."""
        if request.options.sampling.grammar is not None:
            grammars = AnswerGrammars(self.grammar_checks, tenant, guard)
            await grammars.check((request.options.sampling.grammar,))
        fetched = await self._fetch(request, config, held, tenant, trace, guard)
        images = await self.turns.run(self._read_images(request, parsed, fetched, config, tenant))
        return await self.chat(
            request, images, config, request_id=request_id, tenant=tenant, guard=guard
        )

    def _read_chat(
        self, body: BodyBytes, held: MemoryReservation, dialect: Dialect
    ) -> Steps[tuple[JsonBody, ChatRequest]]:
        parsed = yield from read_json(body, lambda b, v: held.decode(b, v * dialect.num_copies))
        chat = yield from dialect.translate(parsed.value)
        return parsed, (yield from self.checked_chat(parsed, chat))

    def checked_chat(self, parsed: JsonBody, chat: dict[str, Any]) -> Steps[ChatRequest]:
        """Check the chat that a body has or asks for. Raises ApiError that names the field."""
        request = yield from parse_chat(chat)
        check_taken_out(parsed.images, request.images)
        check_allowed(request.images, is_on=self.client_embeddings)
        self.check_model(request.options.model)
        return request

    async def _fetch(
        self,
        request: ChatRequest,
        config: Config,
        held: MemoryReservation,
        tenant: str,
        trace: Trace,
        guard: Guard,
    ) -> Fetched:
        """Fetch the images that the request names by URL, if the service allows it."""
        if not any(is_url(part.url) for part in request.images):
            return {}
        check_count(request.images, config)
        with trace.fetching():
            return await guard(
                self.fetcher.fetch(
                    request.images,
                    config.media,
                    tenant=tenant,
                    max_bytes=config.limits.bytes_per_image,
                    hold=held.fetch,
                )
            )

    def _read_images(
        self,
        request: ChatRequest,
        parsed: JsonBody,
        fetched: Fetched,
        config: Config,
        tenant: str,
    ) -> Steps[tuple[RequestImage | None, ...]]:
        limits, family = config.limits.visual, self.prompt_builder.family
        visual = VisualPolicy(
            limits,
            family,
            tenant=tenant,
            visual=request.visual,
            messages=request.messages,
            browned_out=self.brown_out.is_on,
        )
        parts, layout = request.images, layout_for(request.images, self.embed_layout())
        images = yield from read_images(
            parts, config, family, parsed.images, fetched, visual=visual, layout=layout
        )
        num_visual = sum(image.num_tokens for image in images if image is not None)
        check_visual_tokens(num_visual, limits, tenant=tenant)
        return images

    async def chat(
        self,
        request: ChatRequest,
        checked: Sequence[RequestImage | None],
        config: Config,
        *,
        request_id: str,
        tenant: str,
        guard: Guard = unguarded,
    ) -> PreparedRequest:
        messages = without_images(request.messages, [i for i, p in enumerate(checked) if p is None])
        images = tuple(p for p in checked if p is not None)
        said = Conversation(messages, request.tools.offered, request.reasoning_effort, request.asks)
        texts = [part.text for m in messages for part in m.parts if isinstance(part, TextPart)]
        if said.tools or any(m.tool_calls or m.reasoning or m.name for m in messages):
            texts = client_texts(said)
        num_bytes = self._check_length(texts, config, "messages")

        ask = _Ask(request.options, config, request_id, tenant, num_bytes, param="messages")
        prompt = await self._prompt(said, images, num_bytes)
        fitted = self._fitted(ask, messages, images, prompt)
        next_turn = None
        if self.session_prefetch and not fitted.dropped and fitted.images == images:
            next_turn = self._next_turn(said, images)
        if fitted.dropped or fitted.images != images:
            said = conversation_without(said, fitted.dropped)
            images = tuple(p for i, p in enumerate(fitted.images) if i not in fitted.dropped)
            prompt = await self._prompt(said, images, num_bytes)

        def prompt_without(dropped: frozenset[int]) -> Prompt:
            if not dropped:
                return prompt
            counts = [p.num_tokens for i, p in enumerate(images) if i not in dropped]
            return self._chat_prompt(conversation_without(said, dropped), counts)

        form = self._answer_form(request, prompt.opening)
        grammars = AnswerGrammars(self.grammar_checks, tenant, guard)
        options = await grammars.enforcing(request, form, self.prompt_builder.control_ids)
        ask = dataclasses.replace(ask, options=options)
        prepared = self._prepared_request(ask, prompt_without, images)
        return dataclasses.replace(
            prepared,
            answer_form=form,
            next_turn=next_turn,
            pins_session=request.is_session,
        )

    def _answer_form(self, request: ChatRequest, opening: str) -> AnswerForm | None:
        """Return how answers are read; None if they are content alone.

        Raises:
            ApiError: 400; no response template reads the calls of this model.
        """
        builder, tools = self.prompt_builder, request.tools.offered
        template = builder.responding.template
        if tools and (template is None or not template.has_calls):
            why = builder.responding.problem or "no response template reads its calls"
            raise unsupported("tools", f"'tools' is not supported by this model: {why}.")
        if template is None or not (tools or template.has_reasoning):
            return None
        template = template if tools else template.without_calls()
        return AnswerForm(
            template,
            tools=schemas((tool.name, tool.parameters) for tool in tools),
            opening=opening,
            max_calls=None if request.tools.parallel else 1,
            kept_ids=builder.ids_of(template.anchors_in(builder.control_tokens)),
        )

    def _next_turn(
        self, said: Conversation, images: Sequence[RequestImage]
    ) -> Callable[[Mapping[str, Any]], Prompt | None] | None:
        """The beginning of the next turn by the answer's message; None if its images may differ.

        The result keeps no image: it is called after the request has ended.
        """
        if any(image.choice.why in _WHY_OF_ONE_TURN for image in images):
            return None
        counts = [image.num_tokens for image in images]
        builder = self.prompt_builder

        def build(message: Mapping[str, Any]) -> Prompt | None:
            try:
                answer = at_once(parse_message("messages", dict(message), CallsParser()))
            except ApiError:  # a call that was cut: no client can send it
                return None
            return builder.next_turn(said, answer, counts)

        return build

    async def _prompt(
        self, said: Conversation, images: Sequence[RequestImage], num_bytes: int
    ) -> Prompt:
        counts = [image.num_tokens for image in images]
        num_bytes += _MESSAGE_BYTES * len(said.messages)
        return await _encode(functools.partial(self._chat_prompt, said, counts), num_bytes)

    def _chat_prompt(self, said: Conversation, counts: Sequence[int]) -> Prompt:
        return self.prompt_builder.chat(said, counts, mark_history=self.mark_history)

    def _fitted(
        self,
        ask: _Ask,
        messages: Sequence[Message],
        images: tuple[RequestImage, ...],
        prompt: Prompt,
    ) -> Fitted:
        """Apply the policy of `overflow` if prompt and answer exceed the context."""
        needed = len(prompt.token_ids) + (ask.options.max_tokens or 1)
        num_excess = needed - self.context(ask.config)
        if num_excess <= 0:
            return Fitted(images)
        last = next((m for m in reversed(messages) if m.role == "user"), None)
        num_last = 0 if last is None else sum(isinstance(p, ImagePart) for p in last.parts)
        policy = ask.config.limits.visual.on_context_exceeded
        family = self.prompt_builder.family
        fitted = fit(images, num_excess, policy, family, num_last=num_last)
        if fitted.dropped:
            logger.info(
                "images dropped: the request exceeds the context",
                extra={"request_id": ask.request_id, "num_images": len(fitted.dropped)},
            )
        return fitted

    async def completions(
        self, request: CompletionRequest, config: Config, *, request_id: str, tenant: str
    ) -> tuple[PreparedRequest, ...]:
        """Prepare a request per prompt. Each is as if it were alone.

        Raises:
            ApiError: the first invalid prompt; the error names it.
        """
        self.check_model(request.options.model)
        num_bytes = [self._check_given(given, config) for given in request.prompts]
        prepared = []
        for given, num_text_bytes in zip(request.prompts, num_bytes, strict=True):
            build = functools.partial(self._given_prompt, given, echo=request.echo)
            prompt, text = await _encode(build, sum(num_bytes))
            ask = _Ask(request.options, config, request_id, tenant, num_text_bytes, given.path)
            without = functools.partial(_unchanged, prompt)
            one = self._prepared_request(ask, without, ())
            echo = request.echo_of(text)
            shown = request.options.num_choices * echo.num_bytes(one.num_tokens(0))
            one = dataclasses.replace(one, echo=echo, num_bytes=one.num_bytes + shown)
            prepared.append(dataclasses.replace(one, num_shown_bytes=shown))
        check_shown(request, [(one.echo, one.num_tokens(0)) for one in prepared])
        return tuple(prepared)

    def _check_given(self, given: GivenPrompt, config: Config) -> int:
        """Check a prompt before it is encoded; return its bytes."""
        if isinstance(given.content, str):
            return self._check_length([given.content], config, given.path)
        self.prompt_builder.check_ids(given.content, given.path, with_images=False)
        return _ID_BYTES * len(given.content)

    def _given_prompt(self, given: GivenPrompt, *, echo: bool) -> tuple[Prompt, str]:
        """Build a prompt. With `echo`, also return its text, else ""."""
        builder, content = self.prompt_builder, given.content
        if isinstance(content, str):
            return builder.completion(content), content if echo else ""
        return Prompt(content), builder.text_of(content) if echo else ""

    async def text_prompt(self, text: str, config: Config, *, is_bare: bool = False) -> Prompt:
        """Build the prompt of a text.

        Raises:
            ApiError: 400 `context_length_exceeded`.
        """
        num_bytes = self._check_length([text], config, "prompt")
        build = functools.partial(self.prompt_builder.completion, text, is_bare=is_bare)
        return await _encode(build, num_bytes)

    def _prepared_request(
        self,
        ask: _Ask,
        prompt_without: Callable[[frozenset[int]], Prompt],
        images: tuple[RequestImage, ...],
    ) -> PreparedRequest:
        check_sampling(
            ask.options.sampling,
            vocab_size=self.prompt_builder.family.vocab_size,
            any_priority=self.any_priority,
        )
        prompt, cache_salt = prompt_without(frozenset()), self.salts.of(ask.tenant)
        max_tokens = check_context(
            prompt,
            ask.options.max_tokens,
            self.context(ask.config),
            param=ask.param,
            max_tokens_param=ask.options.max_tokens_param,
        )
        check_min_tokens(ask.options.sampling, max_tokens)
        return PreparedRequest(
            request_id=ask.request_id,
            images=images,
            prompt_without=prompt_without,
            sampling=sampling_of(ask.options.sampling, self.prompt_builder.defaults, max_tokens),
            cache_salt=cache_salt,
            skip_corrupt=ask.config.limits.on_corrupt == "Skip",
            max_wait_seconds=max_wait_seconds(ask.config.admission),
            digests=RequestDigests.of(prompt, images, salt=cache_salt, block_size=self.block_size),
            priority=ask.options.sampling.priority,
            inline=ask.config.on_demand == "InlineAtPrefill",
            max_hold_seconds=max_hold_seconds(ask.config),
            wake_timeout_seconds=ask.config.wake_timeout_seconds or 0.0,
            num_bytes=ask.num_text_bytes + sum(len(image.data) for image in images),
        )

    def context(self, config: Config) -> int:
        """Return the maximum tokens of prompt and answer together."""
        return min(self.max_model_len, config.max_model_len_tokens or self.max_model_len)

    def check_model(self, name: str) -> None:
        """Raise ApiError (404) if `name` is not the served model."""
        if name != self.served_name:
            raise ApiError(
                404,
                f"There is no model of this name; this service has {self.served_name!r}.",
                param="model",
                code="model_not_found",
            )

    def _check_length(self, texts: Sequence[str], config: Config, param: str) -> int:
        """Reject a prompt that cannot fit, before encoding; return the bytes of all texts.

        Raises:
            ApiError: 400 `context_length_exceeded`.
        """
        num_bytes = sum(len(text.encode()) for text in texts)
        least, limit = self.prompt_builder.min_tokens(num_bytes), self.context(config)
        if least > limit:
            raise context_exceeded(f"the prompt has at least {least}", limit, param)
        return num_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class _Ask:
    """A parsed request and its origin. `param` is the prompt's name in errors."""

    options: Options
    config: Config
    request_id: str
    tenant: str
    num_text_bytes: int
    param: str


def _unchanged(prompt: Prompt, dropped: frozenset[int]) -> Prompt:
    """Return the prompt of a request without images."""
    assert not dropped
    return prompt


async def _encode(encode: Callable[[], T], num_bytes: int) -> T:
    return await asyncio.to_thread(encode) if num_bytes > LONG_TEXT_BYTES else encode()
