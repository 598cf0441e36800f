"""Prepare a request: check images, tokenize the prompt, check the context length, fill defaults.

No worker is called.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from vlm_worker.gateway.api.errors import ApiError, invalid
from vlm_worker.gateway.api.requests import (
    ChatRequest,
    CompletionRequest,
    ImagePart,
    Message,
    Options,
    SamplingOptions,
    TextPart,
    parse_chat,
    parse_completion,
)
from vlm_worker.gateway.body import BodyBytes, JsonBody, read_json
from vlm_worker.gateway.config import Admission, Config, Salts
from vlm_worker.gateway.images import RequestImage, read_images
from vlm_worker.gateway.memory import MemoryReservation
from vlm_worker.gateway.orchestrate.prepared_request import PreparedRequest
from vlm_worker.gateway.overflow import Fitted, fit
from vlm_worker.gateway.pod_caches import RequestDigests
from vlm_worker.gateway.prompts import Prompt, PromptBuilder, check_context, context_exceeded
from vlm_worker.gateway.turns import Steps, Turns
from vlm_worker.gateway.visual import BrownOut, VisualPolicy, check_visual_tokens
from vlm_worker.types import SamplingParams

logger = logging.getLogger(__name__)

# Longer texts are tokenized on a thread: they would block the event loop for milliseconds.
LONG_TEXT_BYTES = 32 * 1024
# No request waits longer than this for free KV.
MAX_WAIT_SECONDS = 600.0


@dataclasses.dataclass(frozen=True, slots=True)
class Preparer:
    """Prepares requests. With `any_priority` clients may set a priority above the default.

    With `mark_history`, prompts of conversations have `num_history_tokens`.
    """

    prompt_builder: PromptBuilder
    served_name: str
    max_model_len: int
    block_size: int
    salts: Salts
    any_priority: bool = False
    mark_history: bool = False
    turns: Turns = dataclasses.field(default_factory=Turns)
    brown_out: BrownOut = dataclasses.field(default_factory=BrownOut)

    async def read(
        self,
        body: BodyBytes,
        kind: Literal["chat", "completion"],
        config: Config,
        *,
        held: MemoryReservation,
        request_id: str,
        tenant: str,
    ) -> tuple[PreparedRequest, Options]:
        """Prepare the request in a body; also returns the options of the response.

        The result holds no reference to the body. `held` counts the body's bytes and its values.

        Raises:
            ApiError: the request is invalid; the error names the field.
            FullError: the gateway has no memory for the values now.
        """
        ids = {"request_id": request_id, "tenant": tenant}
        if kind == "chat":
            chat, images = await self.turns.run(self._read_chat(body, config, held, tenant))
            return await self.chat(chat, images, config, **ids), chat.options
        parsed = await self.turns.run(read_json(body, held.decode))
        completion = parse_completion(parsed.value)
        return await self.completion(completion, config, **ids), completion.options

    def _read_chat(
        self, body: BodyBytes, config: Config, held: MemoryReservation, tenant: str
    ) -> Steps[tuple[ChatRequest, tuple[RequestImage | None, ...]]]:
        parsed = yield from read_json(body, held.decode)
        request = yield from parse_chat(parsed.value)
        _check_urls(parsed, request.images)
        self.check_model(request.options.model)
        limits, family = config.limits.visual, self.prompt_builder.family
        visual = VisualPolicy(
            limits,
            family,
            tenant=tenant,
            visual=request.visual,
            messages=request.messages,
            browned_out=self.brown_out.is_on,
        )
        images = yield from read_images(
            request.images, config, family, parsed.images, visual=visual
        )
        num_visual = sum(image.num_tokens for image in images if image is not None)
        check_visual_tokens(num_visual, limits, tenant=tenant)
        return request, images

    async def chat(
        self,
        request: ChatRequest,
        checked: Sequence[RequestImage | None],
        config: Config,
        *,
        request_id: str,
        tenant: str,
    ) -> PreparedRequest:
        messages = _without(request.messages, [i for i, p in enumerate(checked) if p is None])
        images = tuple(p for p in checked if p is not None)
        texts = [part.text for m in messages for part in m.parts if isinstance(part, TextPart)]
        num_bytes = self._check_length(texts, config, "messages")

        ask = _Ask(request.options, config, request_id, tenant, num_bytes, param="messages")
        prompt = await self._prompt(messages, images, num_bytes)
        fitted = self._fitted(ask, messages, images, prompt)
        if fitted.dropped or fitted.images != images:
            messages = _without(messages, sorted(fitted.dropped))
            images = tuple(p for i, p in enumerate(fitted.images) if i not in fitted.dropped)
            prompt = await self._prompt(messages, images, num_bytes)

        def prompt_without(dropped: frozenset[int]) -> Prompt:
            if not dropped:
                return prompt
            counts = [p.num_tokens for i, p in enumerate(images) if i not in dropped]
            return self._chat_prompt(_without(messages, sorted(dropped)), counts)

        return self._prepared_request(ask, prompt_without, images)

    async def _prompt(
        self, messages: Sequence[Message], images: Sequence[RequestImage], num_bytes: int
    ) -> Prompt:
        counts = [image.num_tokens for image in images]
        build = functools.partial(self._chat_prompt, messages, counts)
        return await _encode(build, num_bytes)

    def _chat_prompt(self, messages: Sequence[Message], counts: Sequence[int]) -> Prompt:
        return self.prompt_builder.chat(messages, counts, mark_history=self.mark_history)

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

    async def completion(
        self, request: CompletionRequest, config: Config, *, request_id: str, tenant: str
    ) -> PreparedRequest:
        self.check_model(request.options.model)
        num_bytes = self._check_length([request.prompt], config, "prompt")
        prompt = await _encode(
            functools.partial(self.prompt_builder.completion, request.prompt), num_bytes
        )
        ask = _Ask(request.options, config, request_id, tenant, num_bytes, param="prompt")
        return self._prepared_request(ask, lambda _: prompt, ())

    def _prepared_request(
        self,
        ask: _Ask,
        prompt_without: Callable[[frozenset[int]], Prompt],
        images: tuple[RequestImage, ...],
    ) -> PreparedRequest:
        self._check_sampling(ask.options.sampling)
        prompt, cache_salt = prompt_without(frozenset()), self.salts.of(ask.tenant)
        max_tokens = check_context(
            prompt,
            ask.options.max_tokens,
            self.context(ask.config),
            param=ask.param,
            max_tokens_param=ask.options.max_tokens_param,
        )
        return PreparedRequest(
            request_id=ask.request_id,
            images=images,
            prompt_without=prompt_without,
            sampling=_sampling(ask.options.sampling, self.prompt_builder.defaults, max_tokens),
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

    def _check_sampling(self, options: SamplingOptions) -> None:
        vocab_size = self.prompt_builder.family.vocab_size
        if any(token_id >= vocab_size for token_id, _ in options.logit_bias):
            raise invalid(
                f"'logit_bias' names a token that the model does not have; its ids are below "
                f"{vocab_size}.",
                param="logit_bias",
            )
        if options.priority > 0 and not self.any_priority:
            raise invalid(
                "'priority' must be 0 or more: on this service a client may let others go first, "
                "not go before them.",
                param="priority",
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


def _check_urls(body: JsonBody, images: Sequence[ImagePart]) -> None:
    """Raise ApiError (400) if a long data URL is not the URL of an image part."""
    if sum(image.url in body.images for image in images) != len(body.images):
        raise invalid(
            "A long data URL stands where no image is expected; it belongs into 'image_url.url'.",
            param=None,
        )


def max_hold_seconds(config: Config) -> float:
    """Return how long a request with images waits for a pool at zero to have an encoder."""
    if config.on_demand != "Queue":
        return 0.0
    bound = config.admission.max_queue_seconds
    return MAX_WAIT_SECONDS if bound is None else min(bound, MAX_WAIT_SECONDS)


def max_wait_seconds(admission: Admission) -> float:
    """Return how long a request may wait for admission before it is rejected."""
    if admission.on_exceeded == "Reject" and admission.max_queue_seconds is not None:
        return min(admission.max_queue_seconds, MAX_WAIT_SECONDS)
    return MAX_WAIT_SECONDS


async def _encode(encode: Callable[[], Prompt], num_bytes: int) -> Prompt:
    return await asyncio.to_thread(encode) if num_bytes > LONG_TEXT_BYTES else encode()


def _without(messages: Sequence[Message], dropped: Sequence[int]) -> tuple[Message, ...]:
    """Return the conversation without the images whose indices are in `dropped`."""
    if not dropped:
        return tuple(messages)
    kept, index = [], 0
    for message in messages:
        if isinstance(message.content, str):
            kept.append(message)
            continue
        parts: list[TextPart | ImagePart] = []
        for part in message.content:
            if isinstance(part, ImagePart):
                index += 1
                if index - 1 in dropped:
                    continue
            parts.append(part)
        kept.append(dataclasses.replace(message, content=tuple(parts)))
    return tuple(kept)


def _sampling(
    options: SamplingOptions, defaults: Mapping[str, float], max_tokens: int
) -> SamplingParams:
    chosen: dict[str, Any] = {**defaults, **options.given}
    if chosen.get("top_p") == 0:  # a nucleus of 0 contains only the most likely token
        chosen |= {"top_p": 1.0, "temperature": 0.0}
    seed = chosen.pop("seed", None)
    return SamplingParams(
        max_tokens=max_tokens,
        seed=secrets.randbits(63) if seed is None else seed % 2**64,
        logit_bias=options.logit_bias,
        num_logprobs=options.num_logprobs,
        **chosen,
    )
