"""A request as the gateway prepared it, and the tokens that were delivered so far."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from vlm_worker.errors import CorruptTransferError
from vlm_worker.gateway.echo import NO_ECHO, Echo, ScoredPrompt
from vlm_worker.gateway.images import RequestImage
from vlm_worker.gateway.pod_caches import PodCaches, RequestDigests
from vlm_worker.gateway.prompts import Prompt
from vlm_worker.gateway.responding.message import AnswerForm
from vlm_worker.route import Demand
from vlm_worker.types import (
    EmbedLayout,
    ImageItem,
    PromptLogprobs,
    Request,
    RequestKey,
    SamplingParams,
    TokenLogprobs,
)
from vlm_worker.wire.messages import DecodedItem

Emit = Callable[[int, TokenLogprobs | None], Awaitable[bool]]
"""`(token_id, logprobs)` returns whether the client wants more tokens."""


@dataclasses.dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A validated request.

    Attributes:
        images: in the order of their placeholders.
        prompt_without: returns the prompt without these images, by index.
        skip_corrupt: leave out images that cannot be decoded, instead of failing.
        max_wait_seconds: maximum wait for free KV before the client gets a 429.
        inline: if no encoder pod exists, the prefill pod may encode the images.
        max_hold_seconds: if it may not, the maximum wait for an encoder pod.
        wake_timeout_seconds: maximum wait for the pods of a service at zero; 0 if it never is.
        digests: what pods may hold of it from earlier requests.
        priority: requests of a larger priority run first.
        num_bytes: bytes of images and texts, and `num_shown_bytes`.
        num_shown_bytes: memory of the log-probabilities that its choices show of the prompt.
        answer_form: how its answers are read; None: they are content alone.
        next_turn: returns the beginning of the next turn's prompt, by the answer's message as the
            client has it. It may take milliseconds. None if nothing is prefetched.
        echo: what its answers have of the prompt.
        tenant, work_seconds: whose turn it needs where requests wait for a pod, and the estimate of
            its work; "" and 0 if requests wait in order of arrival.
        weighted_seconds: the work by the tenant's weight, for its turn in the queues of pods.
        pins_session: the images are of a conversation: encoders evict them after others.
    """

    request_id: str
    images: tuple[RequestImage, ...]
    prompt_without: Callable[[frozenset[int]], Prompt]
    sampling: SamplingParams
    cache_salt: bytes
    skip_corrupt: bool
    max_wait_seconds: float
    digests: RequestDigests
    priority: int = 0
    inline: bool = True
    max_hold_seconds: float = 0.0
    wake_timeout_seconds: float = 0.0
    num_bytes: int = 0
    num_shown_bytes: int = 0
    answer_form: AnswerForm | None = None
    next_turn: Callable[[Mapping[str, Any]], Prompt | None] | None = None
    pins_session: bool = False
    echo: Echo = NO_ECHO
    tenant: str = ""
    work_seconds: float = 0.0
    weighted_seconds: float = 0.0

    @property
    def embed_layout(self) -> EmbedLayout | None:
        """The layout of its embeddings in place of images, which is one; None without any."""
        return next((image.layout for image in self.images if image.layout is not None), None)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt with all images."""
        return len(self.prompt_without(frozenset()).token_ids)

    def num_tokens(self, num_delivered: int) -> int:
        """Tokens for which a pod needs KV, after so many were delivered."""
        return self.num_prompt_tokens + num_delivered + 1

    def demand(self, num_delivered: int, caches: PodCaches) -> Demand:
        """The demand on the route after `num_delivered` tokens of the answer."""
        digests = self.digests
        images = [
            (key, image.num_tokens) for key, image in zip(digests.images, self.images, strict=True)
        ]
        return Demand(
            num_tokens=self.num_tokens(num_delivered),
            image_digest=self.images[0].digest if self.images else b"",
            prefix_digest=digests.head,
            needs_decode=self.sampling.max_tokens - num_delivered > 1,
            constrained=bool(self.sampling.grammar),
            has_minimum=self.sampling.min_tokens > num_delivered,
            is_scored=self.sampling.num_prompt_logprobs is not None and not num_delivered,
            embed_layout=self.embed_layout,
            inline=self.inline,
            num_image_tokens=sum(dict(images).values()),
            cached_images=caches.images(images),
            cached_prefix=caches.prefix(digests.marks),
        )


class DeliveredTokens:
    """The tokens delivered so far, by any attempt; each is delivered once and in order.

    `emit` gets each token, with its log-probabilities if requested. It returns False when the
    client needs no more (a stop string). `prompt` is the computed prompt: corrupt images may be
    left out. `scored` has its log-probabilities, all of one attempt, before the first token; None
    if they are not wanted. `turn` is locked while tokens are delivered. `failure` is the error of
    `emit`: a token is lost, so no attempt may go on.
    """

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._early: dict[int, tuple[int, TokenLogprobs | None]] = {}
        self.turn = asyncio.Lock()
        self._grown = asyncio.Event()
        self.token_ids: list[int] = []
        self.prompt: Prompt | None = None
        self.scored: ScoredPrompt | None = None
        self._parts: list[PromptLogprobs] = []
        self.num_cached_tokens = 0
        self.complete = False
        self.failure: Exception | None = None

    async def deliver(
        self,
        first_index: int,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs | None] = (),
    ) -> None:
        """Deliver tokens from `first_index` on; drop known ones, keep early ones for later."""
        async with self.turn:
            tokens = zip(token_ids, logprobs or [None] * len(token_ids), strict=True)
            for index, token in enumerate(tokens, first_index):
                if index >= len(self.token_ids):
                    self._early.setdefault(index, token)
            while not self.complete and len(self.token_ids) in self._early:
                token_id, its_logprobs = self._early.pop(len(self.token_ids))
                self.token_ids.append(token_id)
                try:
                    self.complete = not await self._emit(token_id, its_logprobs)
                except Exception as error:
                    self.failure = error
                    raise
            self._grown.set()

    def take_scores(self, part: PromptLogprobs) -> None:
        """Add log-probabilities of the prompt. Those of an answer that began are known."""
        if not self.token_ids:
            self._parts.append(part)

    def end_scores(self) -> None:
        """End the log-probabilities of the prompt, before the first token of its answer.

        Raises:
            CorruptTransferError: they are not those of all tokens, in order.
        """
        assert self.prompt is not None
        scored = ScoredPrompt.of(self.prompt.token_ids, self._parts)
        if scored is None:
            num_sent = sum(len(part.logprobs) for part in self._parts)
            raise CorruptTransferError(
                f"prefill sent {num_sent} log-probabilities, not in order those of the "
                f"{len(self.prompt.token_ids)} tokens of a prompt"
            )
        self.scored = scored
        self._parts.clear()

    def forget_early(self) -> None:
        """Drop tokens and log-probabilities of the prompt that a lost attempt sent too early."""
        self._early.clear()
        self._parts.clear()

    async def wait_for(self, num_tokens: int) -> None:
        """Wait until `num_tokens` are delivered, or the answer is complete."""
        while len(self.token_ids) < num_tokens and not self.complete:
            self._grown.clear()
            await self._grown.wait()


def build_request(
    prepared: PreparedRequest,
    key: RequestKey,
    delivered: DeliveredTokens,
    items: Sequence[DecodedItem],
) -> tuple[Request, list[int]]:
    """Build the request for the workers, without the images that could not be decoded.

    Returns:
        The request, and the indices of the images that are kept.
    """
    dropped = frozenset(i for i, item in enumerate(items) if item.error is not None)
    prompt = delivered.prompt = prepared.prompt_without(dropped)
    sampling = prepared.sampling
    if delivered.token_ids:  # the log-probabilities of the prompt came before them
        sampling = dataclasses.replace(sampling, num_prompt_logprobs=None)
    kept = [i for i in range(len(items)) if i not in dropped]
    request = Request(
        key=key,
        token_ids=(*prompt.token_ids, *delivered.token_ids),
        num_prompt_tokens=len(prompt.token_ids),
        sampling=sampling,
        items=tuple(
            ImageItem(
                items[i].image_key,
                offset,
                items[i].num_tokens,
                items[i].grid_thw,
                prepared.images[i].reduction,
            )
            for i, offset in zip(kept, prompt.offsets, strict=True)
        ),
        cache_salt=prepared.cache_salt,
        priority=prepared.priority,
        weighted_seconds=prepared.weighted_seconds,
        num_history_tokens=prompt.num_history_tokens,
    )
    return request, kept
