"""From a parsed request to a job: pictures, prompt, room, sampling. No worker is asked yet."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import secrets
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

from vlm_worker.gateway.api.errors import ApiError, invalid
from vlm_worker.gateway.api.messages import ImagePart, Message, TextPart
from vlm_worker.gateway.api.requests import (
    ChatRequest,
    CompletionRequest,
    Options,
    parse_chat,
    parse_completion,
)
from vlm_worker.gateway.api.sampling import SamplingOptions
from vlm_worker.gateway.api.strict_json import JsonBody, read_json
from vlm_worker.gateway.auth import Salts
from vlm_worker.gateway.config import Admission, Config
from vlm_worker.gateway.orchestrate.job import Job
from vlm_worker.gateway.pictures import Picture, read_pictures
from vlm_worker.gateway.prompt import (
    Language,
    Prompt,
    SamplingDefaults,
    check_context,
    context_exceeded,
)
from vlm_worker.gateway.turns import Steps, Turns
from vlm_worker.types import SamplingParams

T = TypeVar("T")

# Encoding this much text holds the event loop for milliseconds: a thread does it.
LONG_TEXT_BYTES = 32 * 1024
# Nobody waits for room longer than this.
MAX_WAIT_SECONDS = 600.0


@dataclasses.dataclass(frozen=True, slots=True)
class Preparer:
    """What all requests are prepared with; `any_priority`: clients may go before others."""

    language: Language
    served_name: str
    max_model_len: int
    block_size: int
    salts: Salts
    any_priority: bool = False
    turns: Turns = dataclasses.field(default_factory=Turns)

    async def read(
        self,
        body: bytes | bytearray,
        kind: Literal["chat", "completion"],
        config: Config,
        *,
        request_id: str,
        tenant: str,
    ) -> tuple[Job, Options]:
        """A body as a job, and what the client said of its answer.

        Nothing of the body is referenced afterwards.

        Raises:
            ApiError: naming the part at fault.
        """
        ids = {"request_id": request_id, "tenant": tenant}
        if kind == "chat":
            chat, pictures = await self.turns.run(self._read_chat(body, config))
            return await self.chat(chat, pictures, config, **ids), chat.options
        parsed = await self.turns.run(read_json(body))
        completion = parse_completion(parsed.value)
        return await self.completion(completion, config, **ids), completion.options

    def _read_chat(
        self, body: bytes | bytearray, config: Config
    ) -> Steps[tuple[ChatRequest, tuple[Picture | None, ...]]]:
        parsed = yield from read_json(body)
        request = yield from parse_chat(parsed.value)
        _check_urls(parsed, request.images)
        self.check_model(request.options.model)
        pictures = yield from read_pictures(
            request.images, config, self.language.family, parsed.images
        )
        return request, pictures

    async def chat(
        self,
        request: ChatRequest,
        found: Sequence[Picture | None],
        config: Config,
        *,
        request_id: str,
        tenant: str,
    ) -> Job:
        """A chat as a job; raises ApiError naming the part at fault."""
        messages = _without(request.messages, [i for i, p in enumerate(found) if p is None])
        pictures = tuple(p for p in found if p is not None)
        texts = [part.text for m in messages for part in m.parts if isinstance(part, TextPart)]
        num_bytes = self._check_length(texts, config, "messages")
        prompt_of = functools.partial(self._chat_prompt, messages, pictures)
        prompt = await _encode(functools.partial(prompt_of, frozenset()), num_bytes)

        def prompt_without(dropped: frozenset[int]) -> Prompt:
            return prompt_of(dropped) if dropped else prompt

        ask = _Ask(request.options, config, request_id, tenant, num_bytes, param="messages")
        return self._job(ask, prompt_without, pictures)

    async def completion(
        self, request: CompletionRequest, config: Config, *, request_id: str, tenant: str
    ) -> Job:
        """A plain prompt as a job."""
        self.check_model(request.options.model)
        num_bytes = self._check_length([request.prompt], config, "prompt")
        prompt = await _encode(
            functools.partial(self.language.completion, request.prompt), num_bytes
        )
        ask = _Ask(request.options, config, request_id, tenant, num_bytes, param="prompt")
        return self._job(ask, lambda _: prompt, ())

    def _job(
        self,
        ask: _Ask,
        prompt_without: Callable[[frozenset[int]], Prompt],
        pictures: tuple[Picture, ...],
    ) -> Job:
        self._check_biases(ask.options.sampling)
        self._check_priority(ask.options.sampling)
        max_tokens = check_context(
            prompt_without(frozenset()),
            ask.options.max_tokens,
            self.context(ask.config),
            param=ask.param,
            max_tokens_param=ask.options.max_tokens_param,
        )
        return Job(
            request_id=ask.request_id,
            pictures=pictures,
            prompt_without=prompt_without,
            sampling=_sampling(ask.options.sampling, self.language.defaults, max_tokens),
            cache_salt=self.salts.of(ask.tenant),
            skip_corrupt=ask.config.limits.on_corrupt == "Skip",
            max_wait_seconds=max_wait_seconds(ask.config.admission),
            block_size=self.block_size,
            priority=ask.options.sampling.priority,
            inline=ask.config.on_demand == "InlineAtPrefill",
            max_hold_seconds=max_hold_seconds(ask.config),
            num_bytes=ask.num_text_bytes + sum(len(picture.data) for picture in pictures),
        )

    def context(self, config: Config) -> int:
        """Tokens of prompt and answer together."""
        return min(self.max_model_len, config.max_model_len_tokens or self.max_model_len)

    def check_model(self, name: str) -> None:
        """404 for any model but ours."""
        if name != self.served_name:
            raise ApiError(
                404,
                f"There is no model of this name; this service has {self.served_name!r}.",
                param="model",
                code="model_not_found",
            )

    def _check_biases(self, options: SamplingOptions) -> None:
        vocab_size = self.language.family.vocab_size
        if any(token_id >= vocab_size for token_id, _ in options.logit_bias):
            raise invalid(
                f"'logit_bias' names a token that the model does not have; its ids are below "
                f"{vocab_size}.",
                param="logit_bias",
                code="invalid_value",
            )

    def _check_priority(self, options: SamplingOptions) -> None:
        if options.priority > 0 and not self.any_priority:
            raise invalid(
                "'priority' must be 0 or more: on this service a client may let others go first, "
                "not go before them.",
                param="priority",
                code="invalid_value",
            )

    def _chat_prompt(
        self, messages: Sequence[Message], pictures: Sequence[Picture], dropped: frozenset[int]
    ) -> Prompt:
        counts = [p.num_tokens for i, p in enumerate(pictures) if i not in dropped]
        return self.language.chat(_without(messages, sorted(dropped)), counts)

    def _check_length(self, texts: Sequence[str], config: Config, param: str) -> int:
        """Refuse what cannot fit before it is encoded; the bytes of all texts."""
        num_bytes = sum(len(text.encode()) for text in texts)
        least, limit = self.language.least_tokens(num_bytes), self.context(config)
        if least > limit:
            raise context_exceeded(f"the prompt has at least {least}", limit, param)
        return num_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class _Ask:
    """Who asks for what; `param` is what errors call the prompt."""

    options: Options
    config: Config
    request_id: str
    tenant: str
    num_text_bytes: int
    param: str


def _check_urls(body: JsonBody, images: Sequence[ImagePart]) -> None:
    """Refuse a long data URL that is no image's."""
    if sum(image.url in body.images for image in images) != len(body.images):
        raise invalid(
            "A long data URL stands where no image is expected; it belongs into 'image_url.url'.",
            param=None,
            code="invalid_value",
        )


def max_hold_seconds(config: Config) -> float:
    """How long a request with pictures is held until a pool at zero has an encoder."""
    if config.on_demand != "Queue":
        return 0.0
    bound = config.admission.max_queue_seconds
    return MAX_WAIT_SECONDS if bound is None else min(bound, MAX_WAIT_SECONDS)


def max_wait_seconds(admission: Admission) -> float:
    """How long a request may wait for room before it is refused."""
    if admission.on_exceeded == "Reject" and admission.max_queue_seconds is not None:
        return min(admission.max_queue_seconds, MAX_WAIT_SECONDS)
    return MAX_WAIT_SECONDS


async def _encode(encode: Callable[[], Prompt], num_bytes: int) -> Prompt:
    return await asyncio.to_thread(encode) if num_bytes > LONG_TEXT_BYTES else encode()


def _without(messages: Sequence[Message], dropped: Sequence[int]) -> tuple[Message, ...]:
    """The conversation without some of its pictures, by their index in it."""
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
    options: SamplingOptions, defaults: SamplingDefaults, max_tokens: int
) -> SamplingParams:
    def either(asked: T | None, default: T) -> T:
        return default if asked is None else asked

    top_p = either(options.top_p, defaults.top_p)
    return SamplingParams(
        max_tokens=max_tokens,
        # Only the likeliest token is in a nucleus of nothing.
        temperature=0.0 if top_p == 0 else either(options.temperature, defaults.temperature),
        top_p=top_p or 1.0,
        top_k=either(options.top_k, defaults.top_k),
        min_p=either(options.min_p, defaults.min_p),
        seed=secrets.randbits(63) if options.seed is None else options.seed % 2**64,
        ignore_eos=options.ignore_eos,
        frequency_penalty=options.frequency_penalty,
        presence_penalty=options.presence_penalty,
        repetition_penalty=either(options.repetition_penalty, defaults.repetition_penalty),
        logit_bias=options.logit_bias,
        num_logprobs=options.num_logprobs,
    )
