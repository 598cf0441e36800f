"""The choices of one request: several generations that are one answer.

With `n` choices, the first starts and the others follow after its first token:

choice 0  encode ─ prefill ─ token ─ token ─ ...
choice 1                       └─ prefill, its prompt cached ─ token ─ ...
choice 2                       └─ ...

The workers encode the images and compute the prompt once. For the workers each choice is a separate
request that hits the caches which the first one filled. The gateway sends the image bytes once per
choice, because the encoder looks up its cache by them. The choices differ only in their seeds. If
one choice fails, the answer fails and the others are cancelled.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib

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
        prepared: PreparedRequest,
        count: int,
        *,
        writer: ResponseWriter,
        trace: Trace,
        ticket: AdmissionTicket,
    ) -> None:
        """`trace` gets the times of the first choice."""
        self._writer = writer
        self._begun = asyncio.Event()
        self._generations = [
            Generation(
                Routing(
                    request_of_choice(prepared, index),
                    trace if index == 0 else Trace(received=trace.received, clock=trace.clock),
                    context.registry,
                    context.retry_policy,
                    writer.heartbeat,
                ),
                self._emit(index),
                ticket=ticket,
            )
            for index in range(count)
        ]

    @property
    def first(self) -> Generation:
        """The generation of the first choice."""
        return self._generations[0]

    @property
    def num_output_tokens(self) -> int:
        return sum(len(generation.delivered.token_ids) for generation in self._generations)

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
        try:
            async with asyncio.TaskGroup() as group:
                for index in range(len(self._generations)):
                    group.create_task(self._answer(index))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        await self._writer.end(self._usage())

    async def _answer(self, index: int) -> None:
        if index > 0:
            await self._begun.wait()
        reason = await self._generations[index].run()
        await self._writer.finish(index, reason)

    def _emit(self, index: int) -> Emit:
        async def emit(token_id: int, logprobs: TokenLogprobs | None) -> bool:
            more = await self._writer.emit(index, token_id, logprobs)
            self._begun.set()
            return more

        return emit

    def _usage(self) -> Usage:
        first = self._generations[0].delivered
        assert first.prompt is not None
        return Usage(
            image_tokens=first.prompt.num_image_tokens,
            text_tokens=first.prompt.num_text_tokens,
            cached_tokens=first.num_cached_tokens,
            completion_tokens=self.num_output_tokens,
        )


def request_of_choice(prepared: PreparedRequest, index: int) -> PreparedRequest:
    """The request of one choice. The first keeps the id and the seed; the others get new ones."""
    if index == 0:
        return prepared
    digest = hashlib.blake2b(f"{prepared.sampling.seed}/{index}".encode(), digest_size=8).digest()
    sampling = dataclasses.replace(prepared.sampling, seed=int.from_bytes(digest))
    return dataclasses.replace(
        prepared, request_id=f"{prepared.request_id}:{index}", sampling=sampling
    )
