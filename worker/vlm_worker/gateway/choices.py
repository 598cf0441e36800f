"""The choices of one request: several generations that are one answer.

With `n` choices, the first starts and the others follow after its first token:

choice 0  encode ─ prefill ─ token ─ token ─ ...
choice 1                       └─ prefill, its prompt cached ─ token ─ ...
choice 2                       └─ ...

Of several prompts, all first choices start at once. The indices of choices follow the order of
prompts. Each prompt is a request to the pool, as if it were alone.

The workers encode the images and compute the prompt once. For the workers each choice is a separate
request that hits the caches which the first one filled. The gateway sends the image bytes once per
choice, because the encoder looks up its cache by them. The choices differ only in their seeds. If
one choice fails, the answer fails and the others are cancelled.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from collections.abc import Sequence

from vlm_worker.gateway.context import GatewayContext
from vlm_worker.gateway.orchestrate.generation import AdmissionTicket, Generation, Routing
from vlm_worker.gateway.orchestrate.prepared_request import Emit, PreparedRequest
from vlm_worker.gateway.orchestrate.ttft_trace import Trace
from vlm_worker.gateway.responses import ResponseWriter, Usage
from vlm_worker.types import TokenLogprobs


class Choices:
    """The choices of one request. `run` is called once."""

    def __init__(
        self,
        context: GatewayContext,
        requests: Sequence[PreparedRequest],
        count: int,
        *,
        writer: ResponseWriter,
        trace: Trace,
        tickets: Sequence[AdmissionTicket],
    ) -> None:
        """`requests` and `tickets` have one per prompt; `count` is the number of choices of each.

        `trace` gets the times of the first choice.
        """
        self._writer = writer
        self.count = count
        self._begun = [asyncio.Event() for _ in requests]
        self._generations = [
            Generation(
                Routing(
                    request_of_choice(prepared, choice, number=prompt * count + choice),
                    trace
                    if prompt == choice == 0
                    else Trace(received=trace.received, clock=trace.clock),
                    context.registry,
                    context.retry_policy,
                    writer.heartbeat,
                ),
                self._emit(prompt * count + choice),
                ticket=ticket,
            )
            for prompt, (prepared, ticket) in enumerate(zip(requests, tickets, strict=True))
            for choice in range(count)
        ]

    @property
    def first(self) -> Generation:
        """The generation of the first choice."""
        return self._generations[0]

    @property
    def num_output_tokens(self) -> int:
        """Tokens of the answers; none if they are the prompts alone."""
        shown = [one for one in self._generations if not one.shows_no_answer]
        return sum(len(generation.delivered.token_ids) for generation in shown)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompts that pods had cached; a prompt counts once for all choices."""
        return sum(one.delivered.num_cached_tokens for one in self._firsts)

    @property
    def _firsts(self) -> list[Generation]:
        """The generation of the first choice of each prompt."""
        return self._generations[:: self.count]

    @property
    def num_retries(self) -> int:
        return sum(generation.num_retries for generation in self._generations)

    @property
    def routes(self) -> list[dict[str, str]]:
        """Pods and reasons of the last attempt at each choice that had one."""
        return [one.route.reasons for one in self._generations if one.route is not None]

    async def run(self) -> None:
        """Generate all choices and end the response.

        Raises:
            WorkerError, ClientGoneError: the error of the choice that failed first.
        """
        if len(self._generations) == 1:
            await self._answer(0)
        else:
            await self._answer_all()
        assert all(one.delivered.prompt is not None for one in self._firsts)
        await self._writer.end(self._usage())

    async def _answer_all(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for index in range(len(self._generations)):
                    group.create_task(self._answer(index))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _answer(self, index: int) -> None:
        prompt, choice = divmod(index, self.count)
        if choice > 0:
            await self._begun[prompt].wait()
        reason = await self._generations[index].run()
        await self._writer.finish(index, reason)

    def _emit(self, index: int) -> Emit:
        async def emit(token_id: int, logprobs: TokenLogprobs | None) -> bool:
            # the first choice of a prompt has its log-probabilities, before any token
            first = self._generations[index - index % self.count]
            self._writer.begin(index, first.delivered.scored, self._usage)
            more = await self._writer.emit(index, token_id, logprobs)
            self._begun[index // self.count].set()
            return more

        return emit

    def _usage(self) -> Usage:
        """The usage so far: the prompts that pods have, and the tokens of their answers."""
        prompts = [one.delivered.prompt for one in self._firsts if one.delivered.prompt is not None]
        return Usage(
            image_tokens=sum(prompt.num_image_tokens for prompt in prompts),
            text_tokens=sum(prompt.num_text_tokens for prompt in prompts),
            cached_tokens=self.num_cached_tokens,
            completion_tokens=self.num_output_tokens,
        )


def request_of_choice(
    prepared: PreparedRequest, choice: int, *, number: int | None = None
) -> PreparedRequest:
    """The request of one choice of a prompt; `number` counts the choices of all prompts.

    The first choice keeps the seed, and the first of all the id; the others get new ones. The first
    choice alone has the log-probabilities of the prompt: they are the same for all.
    """
    number = choice if number is None else number
    if number > 0:
        prepared = dataclasses.replace(prepared, request_id=f"{prepared.request_id}:{number}")
    if choice == 0:
        return prepared
    seed = f"{prepared.sampling.seed}/{choice}".encode()
    digest = hashlib.blake2b(seed, digest_size=8).digest()
    sampling = dataclasses.replace(
        prepared.sampling, seed=int.from_bytes(digest), num_prompt_logprobs=None
    )
    return dataclasses.replace(prepared, sampling=sampling)
