"""Clients that never stop asking while a service is changed, and what became of their answers.

loop: a ready gateway ─▶ stream ─▶ its tokens beside the undisturbed answer's
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import time
from collections.abc import AsyncIterator, Sequence

import openai
from served import Served, body, is_ready

from vlm_local.client import Object
from vlm_operator.names import Role


@dataclasses.dataclass
class Answer:
    """One answer as it streamed; `ended` is None while it does.

    Attributes:
        asked: how many tokens were asked for.
        tokens: those that stand in the text; control tokens are counted alone, in `num_tokens`.
        error: what the client raised, "" where it raised nothing.
    """

    asked: int
    began: float
    ended: float | None = None
    tokens: list[str] = dataclasses.field(default_factory=list)
    num_tokens: int = 0
    finish: str | None = None
    error: str = ""

    def spans(self, since: float, until: float) -> bool:
        """Whether it streamed all the while."""
        return self.began <= since and (self.ended is None or self.ended >= until)

    def fault(self, undisturbed: Sequence[str]) -> str:
        """What is wrong with it, beside a long answer of a service that nobody disturbs."""
        if self.error:
            return f"failed after {len(self.tokens)} tokens: {self.error}"
        pairs = zip(self.tokens, undisturbed, strict=False)
        for number, (mine, right) in enumerate(pairs):
            if mine != right:
                return f"token {number} is {mine!r}, was to be {right!r}"
        if self.num_tokens != self.asked:
            return f"{self.num_tokens} of {self.asked} tokens"
        return "" if self.finish == "length" else f"ended with {self.finish}"


class Clients:
    """Long and short answers to the same question, over and over.

    Attributes:
        answers: all of them.
        long_alone: who holds it sees no short answer, neither asked for nor under way.
    """

    def __init__(self, served: Served, *, long: int, short: int) -> None:
        self.answers: list[Answer] = []
        self._served = served
        self._long = long
        self._short = short
        self.long_alone = asyncio.Lock()
        self._enough = asyncio.Event()
        self._num_long = 0
        self._tasks: list[asyncio.Task[None]] = []

    @contextlib.asynccontextmanager
    async def asking(self, *, num_long: int) -> AsyncIterator[None]:
        """Ask for short answers one by one, and for several long ones at once.

        Leaving waits for every answer that has begun.
        """
        self._num_long = num_long
        self._tasks = [
            asyncio.create_task(self._ask_long(num_long)),
            asyncio.create_task(self._ask_short()),
        ]
        try:
            yield
            self._enough.set()
            await asyncio.gather(*self._tasks)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def fresh(self) -> bool:
        """Whether the long answers have begun, and most of each is still to come."""
        last = [one for one in self.answers if one.asked == self._long][-self._num_long :]
        return all(0 < len(one.tokens) < self._long // 8 for one in last)

    async def _ask_long(self, number: int) -> None:
        while not self._enough.is_set():
            await self._ask([self._long] * number)

    async def _ask_short(self) -> None:
        while not self._enough.is_set():
            async with self.long_alone:
                await self._ask([self._short])

    async def _ask(self, lengths: Sequence[int]) -> None:
        answers = [Answer(length, time.monotonic()) for length in lengths]
        self.answers += answers
        await asyncio.gather(*(stream(self._served, one) for one in answers))


async def stream(served: Served, answer: Answer) -> None:
    """Ask as one does through a Service: any gateway that is ready, nothing tried again."""
    asked = body(served.name, answer.asked)
    try:
        async with served.client(await _gateway(served)) as client:
            chunks = await client.chat.completions.create(
                stream=True, stream_options={"include_usage": True}, logprobs=True, **asked
            )
            async for chunk in chunks:
                answer.num_tokens = chunk.usage.completion_tokens if chunk.usage else 0
                for choice in chunk.choices:
                    if choice.logprobs is not None:
                        answer.tokens += [item.token for item in choice.logprobs.content or ()]
                    answer.finish = choice.finish_reason or answer.finish
    except openai.OpenAIError as error:
        answer.error = repr(error)
    answer.ended = time.monotonic()


async def _gateway(served: Served) -> Object:
    ready = [pod for pod in await served.pods(Role.GATEWAY) if is_ready(pod)]
    if not ready:
        raise openai.OpenAIError("no gateway is ready")
    return random.choice(ready)
