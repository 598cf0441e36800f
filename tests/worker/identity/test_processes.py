"""Through real processes and gRPC, answers are transformers', wherever each stage runs.

Questions go sixteen at a time, in steps that cut through images; the second round finds every cache
warm.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import io
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from worker.checkpoints import make_checkpoint
from worker.identity import families
from worker.identity.families import make_case
from worker.identity.law import Law
from worker.identity.questions import SHAPES, Question
from worker.identity.random_model import NUM_TOKENS
from worker.identity.reference import MAX_TOKENS, Answer
from worker.processes.driver import Driver, Prompt
from worker.processes.workers import Worker, started

from vlm_worker.core.families import load_family

EOS = 2
IN_FLIGHT = 16
FLAGS = ("--dtype=float32", "--device=cpu", "--max-requests=16", "--max-batched-tokens=48")
Pairs = tuple[tuple[Question, Answer], ...]

TOPOLOGIES = {
    "E-P-D": ("encoder", "prefill", "decode"),
    "E-PD": ("encoder", "prefill,decode"),
    "P-D": ("encoder,prefill", "decode"),
    "colocated": ("encoder,prefill,decode",),
}


@dataclasses.dataclass
class Route:
    """Where each stage of a question runs."""

    encoder: Worker
    prefill: Worker
    decode: Worker
    driver: Driver

    async def ask(
        self, question: Question, delivered: Sequence[int], *, max_tokens: int
    ) -> list[int]:
        """The answer's tokens after the delivered ones."""
        prompt = Prompt(collapsed(question), [png(question, i) for i in range(len(question.items))])
        prompt.max_tokens = max_tokens
        answer = await self.driver.answer(
            prompt,
            encoder=self.encoder.address,
            prefill=self.prefill.address,
            decode=self.decode.address,
            delivered=tuple(delivered),
        )
        return answer.token_ids[len(delivered) :]

    async def hold(self, law: Law, *, max_tokens: int) -> None:
        """Ask everything, some at a time, until nothing is pending, and check."""
        gate = asyncio.Semaphore(IN_FLIGHT)

        async def ask(question: Question, delivered: Sequence[int]) -> list[int]:
            async with gate:
                return await self.ask(question, delivered, max_tokens=max_tokens)

        while law.pending:
            law.record(await asyncio.gather(*(ask(q, d) for q, d in law.pending)))
        law.check()


@contextlib.asynccontextmanager
async def route(topology: str, model_dir: Path = SHAPES) -> AsyncIterator[Route]:
    """The processes of a topology, started together."""
    async with contextlib.AsyncExitStack() as stack:
        all_stages = TOPOLOGIES[topology]
        workers = await asyncio.gather(
            *(
                stack.enter_async_context(
                    started(
                        stages.rpartition(",")[2], f"--stages={stages}", f"--model={model_dir}",
                        *FLAGS, runner="model",
                    )
                )
                for stages in all_stages
            )
        )  # fmt: skip
        at = {
            stage: worker
            for stages, worker in zip(all_stages, workers, strict=True)
            for stage in stages.split(",")
        }
        yield Route(**at, driver=Driver(load_family(model_dir)))
        for worker in workers:
            await worker.until_idle(seconds=15)


@pytest.mark.timeout(240)
async def test_every_stage_apart_answers_as_transformers_cold_and_warm(
    shapes_pairs: Pairs,
) -> None:
    await cold_and_warm("E-P-D", shapes_pairs[:48])


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("topology", TOPOLOGIES)
async def test_every_topology_answers_as_transformers_cold_and_warm(
    all_shapes_pairs: Pairs, topology: str
) -> None:
    await cold_and_warm(topology, all_shapes_pairs)


async def cold_and_warm(topology: str, pairs: Pairs) -> None:
    async with route(topology) as processes:
        await processes.hold(Law(pairs), max_tokens=MAX_TOKENS)
        await processes.hold(Law(pairs[:64]), max_tokens=MAX_TOKENS)
        stats = await processes.encoder.stats()
        assert stats["encoder_cache"]["hits"] > 0, "no cache was warm"


@pytest.mark.full
@pytest.mark.timeout(600)
async def test_random_weights_apart_answer_as_transformers(
    random_model_dir: Path, random_pairs: Pairs
) -> None:
    pairs = [(question, until_end(answer)) for question, answer in random_pairs]
    async with route("E-P-D", random_model_dir) as processes:
        for _ in range(2):
            await processes.hold(Law(pairs), max_tokens=NUM_TOKENS)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("model_type", "topology"),
    [
        pytest.param(
            model_type,
            topology,
            marks=() if (model_type, topology) == ("gemma3", "E-P-D") else pytest.mark.full,
        )
        for model_type in ("gemma3", "llava", "qwen2_vl")
        for topology in TOPOLOGIES
    ],
)
async def test_every_family_answers_as_transformers(
    tmp_path: Path, model_type: str, topology: str
) -> None:
    case = make_case(make_checkpoint(tmp_path / model_type, model_type), count=24, seed=2)
    pairs = [(question, until_end(answer)) for question, answer in case.pairs]
    async with route(topology, case.model_dir) as processes:
        for _ in range(2):
            await processes.hold(Law(pairs), max_tokens=families.NUM_TOKENS)


def until_end(answer: Answer) -> Answer:
    """The answer as far as its first end token, which ends it here."""
    if EOS not in answer.token_ids:
        return answer
    length = answer.token_ids.index(EOS) + 1
    return Answer(answer.token_ids[:length], answer.logits[:length])


def collapsed(question: Question) -> list[int]:
    """The prompt as a gateway tokenises it: one placeholder per image."""
    inside = {p for item in question.items for p in range(item.offset + 1, item.end)}
    return [token for p, token in enumerate(question.token_ids) if p not in inside]


def png(question: Question, item: int) -> bytes:
    """An image as a client sends it."""
    out = io.BytesIO()
    question.images[item].save(out, "PNG")
    return out.getvalue()
