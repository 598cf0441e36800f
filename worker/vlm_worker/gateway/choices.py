"""Several answers to one prompt: the first goes ahead, the others follow its first token.

choice 0  encode ─ prefill ─ token ─ token ─ ...
choice 1                       └─ prefill, its prompt cached ─ token ─ ...
choice 2                       └─ ...

So the pictures of a request are encoded, and its prompt is computed, once: to the workers each
choice is a request of its own, that finds in their caches what the first has left there. The bytes
of a picture, by which the encoder knows it again, travel once per choice. The choices differ by
their seeds alone. What fails one of them fails the answer, and the others are cancelled.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from collections.abc import Callable

from vlm_worker.gateway.answering import Writer
from vlm_worker.gateway.api.answers import Usage
from vlm_worker.gateway.orchestrate.generation import Generation
from vlm_worker.gateway.orchestrate.job import Emit, Job
from vlm_worker.types import TokenLogprobs

Generate = Callable[[Job, Emit, int], Generation]
"""`(job, emit, index)`: the generation of one choice."""


class Choices:
    """Of one request. `run` is called once."""

    def __init__(self, job: Job, count: int, *, writer: Writer, generate: Generate) -> None:
        self._writer = writer
        self._begun = asyncio.Event()
        self._generations = [
            generate(job_of_choice(job, index), self._emit(index), index) for index in range(count)
        ]

    @property
    def num_output_tokens(self) -> int:
        """Of all choices, so far."""
        return sum(len(generation.answer.token_ids) for generation in self._generations)

    @property
    def num_retries(self) -> int:
        """Of all choices, so far."""
        return sum(generation.num_retries for generation in self._generations)

    async def run(self) -> None:
        """Answer to the last word.

        Raises:
            WorkerError, ClientGoneError: what failed the choice that failed first.
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
        first = self._generations[0].answer
        assert first.prompt is not None
        return Usage(
            image_tokens=first.prompt.num_image_tokens,
            text_tokens=first.prompt.num_text_tokens,
            cached_tokens=first.num_cached_tokens,
            completion_tokens=self.num_output_tokens,
        )


def job_of_choice(job: Job, index: int) -> Job:
    """The job of one choice: an id and a seed of its own; the first has the request's."""
    if index == 0:
        return job
    digest = hashlib.blake2b(f"{job.sampling.seed}/{index}".encode(), digest_size=8).digest()
    sampling = dataclasses.replace(job.sampling, seed=int.from_bytes(digest))
    return dataclasses.replace(job, request_id=f"{job.request_id}:{index}", sampling=sampling)
