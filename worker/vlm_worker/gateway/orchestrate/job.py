"""What is to be done for a request, and its answer so far."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence

import xxhash

from vlm_worker.gateway.pictures import Picture
from vlm_worker.gateway.prompt import Prompt
from vlm_worker.route import Demand
from vlm_worker.types import ImageItem, Request, RequestKey, SamplingParams, TokenLogprobs
from vlm_worker.wire.calls import DecodedItem

Emit = Callable[[int, TokenLogprobs | None], Awaitable[bool]]
"""`(token_id, logprobs) -> whether more is wanted`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """A checked request.

    Attributes:
        pictures: in the order of their placeholders.
        prompt_without: the prompt, when these pictures (by index) are left out.
        skip_corrupt: leave out pictures that cannot be decoded, instead of failing.
        max_wait_seconds: how long to wait for room before the client is told to come back.
        inline: its pictures may be encoded where it is prefilled, if no encoder pod is there.
        max_hold_seconds: if they may not, how long it is held until there is one; 0: not at all.
        block_size: tokens of a KV block.
        priority: a larger one goes first.
        num_bytes: of its pictures and texts.
    """

    request_id: str
    pictures: tuple[Picture, ...]
    prompt_without: Callable[[frozenset[int]], Prompt]
    sampling: SamplingParams
    cache_salt: bytes
    skip_corrupt: bool
    max_wait_seconds: float
    block_size: int
    priority: int = 0
    inline: bool = True
    max_hold_seconds: float = 0.0
    num_bytes: int = 0

    def demand(self, num_delivered: int) -> Demand:
        """What the route must provide for, after so many tokens of the answer."""
        prompt = self.prompt_without(frozenset())
        hasher = xxhash.xxh3_128()
        head = prompt.token_ids[: self.block_size]
        hasher.update(b"".join(token.to_bytes(4, "little") for token in head))
        for picture, offset in zip(self.pictures, prompt.offsets, strict=True):
            if offset < self.block_size:
                hasher.update(picture.digest)
        return Demand(
            num_tokens=len(prompt.token_ids) + num_delivered + 1,
            image_digest=self.pictures[0].digest if self.pictures else b"",
            prefix_digest=hasher.digest(),
            needs_decode=self.sampling.max_tokens - num_delivered > 1,
            inline=self.inline,
        )


class Answer:
    """The tokens delivered so far, each once and in order, whoever sends them.

    `emit` gets each token, with its log-probabilities where they were asked for; it returns False
    when the client needs no more (a stop string).
    `prompt` is the one that was computed: pictures may have been left out.
    """

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._early: dict[int, tuple[int, TokenLogprobs | None]] = {}
        self._turn = asyncio.Lock()
        self._grown = asyncio.Event()
        self.token_ids: list[int] = []
        self.prompt: Prompt | None = None
        self.num_cached_tokens = 0
        self.complete = False

    async def take(
        self,
        first_index: int,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs | None] = (),
    ) -> None:
        """Deliver tokens from `first_index` on; what is known is dropped, what is early waits."""
        async with self._turn:
            tokens = zip(token_ids, logprobs or [None] * len(token_ids), strict=True)
            for index, token in enumerate(tokens, first_index):
                if index >= len(self.token_ids):
                    self._early.setdefault(index, token)
            while not self.complete and len(self.token_ids) in self._early:
                token_id, its_logprobs = self._early.pop(len(self.token_ids))
                self.token_ids.append(token_id)
                self.complete = not await self._emit(token_id, its_logprobs)
            self._grown.set()

    def forget_early(self) -> None:
        """Drop what a lost attempt sent out of turn."""
        self._early.clear()

    async def wait_for(self, num_tokens: int) -> None:
        """Until so many tokens are delivered, or the answer is complete."""
        while len(self.token_ids) < num_tokens and not self.complete:
            self._grown.clear()
            await self._grown.wait()


def build_request(
    job: Job, key: RequestKey, answer: Answer, items: Sequence[DecodedItem]
) -> tuple[Request, list[int]]:
    """The request as workers get it, without the pictures that could not be decoded.

    Returns:
        It, and the indices of the pictures that are kept.
    """
    dropped = frozenset(i for i, item in enumerate(items) if item.error is not None)
    prompt = answer.prompt = job.prompt_without(dropped)
    kept = [i for i in range(len(items)) if i not in dropped]
    request = Request(
        key=key,
        token_ids=(*prompt.token_ids, *answer.token_ids),
        num_prompt_tokens=len(prompt.token_ids),
        sampling=job.sampling,
        items=tuple(
            ImageItem(items[i].image_key, offset, items[i].num_tokens, items[i].grid_thw)
            for i, offset in zip(kept, prompt.offsets, strict=True)
        ),
        cache_salt=job.cache_salt,
        priority=job.priority,
    )
    return request, kept
