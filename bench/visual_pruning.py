"""Answers in conversations whose text lost a share of its KV, against the same ones unpruned.

    python bench/visual_tokens.py --lever=prune --questions 100

A conversation of `shapes` asks about one image in its last turn. Earlier turns of other questions
and their right answers, without their images, precede it until they have 256 tokens of text. Each
is answered by an engine that prunes as `--kv-prune-text` does.

    mass      keeps what receives most attention, as workers do
    recent    keeps the last tokens of the history
    random    keeps any

`shapes` converses poorly, so the figure is agreement with the unpruned answer, not accuracy. The
first token of an answer is chosen before pruning, and answers of `shapes` have two or three. So
"tokens" also compares TOKENS tokens, past the end of the answer.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import table
from paired import Paired
from visual_levers import Worker
from visual_questions import KINDS, Question, draw, prompts
from worker.identity.questions import SHAPES

from vlm_worker.core.pruning import MIN_HISTORY_TOKENS
from vlm_worker.engine.engine import Engine
from vlm_worker.engine.settings import EngineSettings
from vlm_worker.gateway.api.parts import ImagePart, TextPart
from vlm_worker.gateway.api.requests import Message
from vlm_worker.gateway.prompts import PromptBuilder
from vlm_worker.types import (
    FailedEvent,
    ImageItem,
    PreparedImage,
    Request,
    RequestKey,
    SamplingParams,
    TokenEvent,
)

TOKENS: Final = 24
SETTINGS: Final = (
    ("mass", 700),
    ("mass", 500),
    ("mass", 300),
    ("recent", 700),
    ("random", 700),
)
TOGETHER: Final = 16
_numbers = itertools.count()


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Conversation:
    """A prompt, and its image."""

    request: Request
    image: PreparedImage

    @property
    def num_text(self) -> int:
        """Tokens of its history; no image is in it."""
        return self.request.num_history_tokens


class ScoredRunner:
    """A runner whose attention mass may be replaced by another score of the tokens."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.score = "mass"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def attention_mass(self, inputs: Any) -> np.ndarray:
        """Float32 `[N]`, as the runner's."""
        num_tokens = int(inputs.context_lens[0]) + len(inputs.token_ids)
        if self.score == "recent":
            return np.arange(num_tokens, dtype=np.float32)
        if self.score == "random":
            seed = int(inputs.token_ids.sum())
            return np.random.default_rng(seed).random(num_tokens).astype(np.float32)
        mass: np.ndarray = self._runner.attention_mass(inputs)
        return mass


def main(*, questions: int, seed: int, threads: int) -> None:
    """Ask `questions` of all kinds, and print a JSON line per setting and a table."""
    worker = Worker(threads=threads)
    conversations = list(make(worker, questions, seed=seed))
    runner = ScoredRunner(worker.runner)
    off, _ = asyncio.run(answers(runner, conversations, permille=0))
    lines = []
    for score, permille in SETTINGS:
        runner.score = score
        given, counted = asyncio.run(answers(runner, conversations, permille=permille))
        line = figures(given, off, [one.num_text for one in conversations], counted)
        asked = {"bench": "visual_pruning", "seed": seed, "score": score, "permille": permille}
        lines.append({**asked, **line})
        print(json.dumps(lines[-1]), flush=True)
    header = ["keeps", "history", "answers unchanged", f"{TOKENS} tokens unchanged", "prompts hit"]
    rows = [
        [
            f"{line['score']} {line['permille'] / 10:g} %",
            f"{line['history']:.3f}",
            f"{line['unchanged']:.1f} % [{line['low']:.1f}, {line['high']:.1f}]",
            f"{line['tokens_unchanged']:.1f} %",
            f"{line['hit']:.1f} %",
        ]
        for line in lines
    ]
    lengths = [len(until_end(one)) for one in off]
    text = np.mean([one.num_text for one in conversations])
    print(f"\nprune\n\n{table.markdown([header, *rows])}", file=sys.stderr)
    print(
        f"{len(off)} conversations, {text:.0f} tokens of history; {np.mean(lengths):.1f} tokens of "
        "answer, of which pruning can change all but the first",
        file=sys.stderr,
    )


def make(worker: Worker, questions: int, *, seed: int) -> Iterator[Conversation]:
    """Conversations of all kinds in turn; their histories come from another seed."""
    per_kind = -(-questions // len(KINDS))
    drawn = [draw(kind, per_kind, seed=seed) for kind in KINDS]
    asked = [one for some in zip(*drawn, strict=True) for one in some]
    earlier = [one for kind in KINDS for one in draw(kind, 8, seed=seed + 1)]
    builder = PromptBuilder(SHAPES)
    order = np.random.default_rng(seed)
    for question in asked[:questions]:
        (seen,) = worker.see([question])
        yield conversation(builder, question, seen.image, earlier, order)


def conversation(
    builder: PromptBuilder,
    question: Question,
    image: PreparedImage,
    earlier: Sequence[Question],
    order: np.random.Generator,
) -> Conversation:
    """A conversation with just enough earlier turns to be pruned."""
    last = Message("user", (ImagePart("", "auto", ""), TextPart(question.text)))
    history: list[Message] = []
    for index in order.permutation(len(earlier)):
        turn = earlier[index]
        right = builder.tokenizer.decode(list(turn.answer[:-1]))
        history += [Message("user", turn.text), Message("assistant", right)]
        prompt = builder.chat([*history, last], [image.num_tokens], mark_history=True)
        if prompt.num_history_tokens >= MIN_HISTORY_TOKENS:
            break
    key = int(next(_numbers)).to_bytes(32, "big")
    image = dataclasses.replace(image, image_key=key, reduction=None)
    request = Request(
        RequestKey("", 0),
        prompt.token_ids,
        len(prompt.token_ids),
        SamplingParams(TOKENS, ignore_eos=True),
        (ImageItem(key, prompt.offsets[0], image.num_tokens, image.grid_thw),),
        num_history_tokens=prompt.num_history_tokens,
    )
    return Conversation(request, image)


async def answers(
    runner: ScoredRunner, conversations: Sequence[Conversation], *, permille: int
) -> tuple[list[tuple[int, ...]], dict[str, int]]:
    """The TOKENS greedy tokens of each, and what was counted.

    A second request with each prompt shows whether it is still cached; it ends before it is pruned.
    """
    settings = EngineSettings(
        max_model_len=2048, kv_prune_text=permille, max_waiting=4096, max_waiting_images=4096
    )
    engine = Engine(runner, settings=settings, positions=runner.family.positions)
    engine.start(asyncio.get_running_loop())
    found: list[tuple[int, ...]] = []
    num_hits = 0
    for first in range(0, len(conversations), TOGETHER):
        some = conversations[first : first + TOGETHER]
        found += [tokens for tokens, _ in await asyncio.gather(*(ask(engine, o) for o in some))]
        again = await asyncio.gather(*(ask(engine, one, max_tokens=1) for one in some))
        num_hits += sum(
            num_cached >= len(one.request.token_ids) - 1 - runner.kv_layout.block_size
            for one, (_, num_cached) in zip(some, again, strict=True)
        )
    stats = engine.stats()
    counted = {
        "pruned": int(stats.count("kv_pruned_sequences")),
        "dropped": int(stats.count("kv_pruned_tokens")),
        "hits": num_hits,
    }
    await engine.stop()
    return found, counted


async def ask(
    engine: Engine, one: Conversation, *, max_tokens: int = TOKENS
) -> tuple[tuple[int, ...], int]:
    """The answer, and the tokens of the prompt that were cached."""
    key = RequestKey(f"p{next(_numbers)}", 0)
    sampling = SamplingParams(max_tokens, ignore_eos=True)
    request = dataclasses.replace(one.request, key=key, sampling=sampling)
    images = engine.encode(key, [one.image])
    tokens, num_cached = [], 0
    async for event in engine.submit_prefill(request, for_peer=False):
        if isinstance(event, FailedEvent):
            raise event.error
        if isinstance(event, TokenEvent):
            tokens.append(event.token_id)
            num_cached = max(num_cached, event.num_cached_tokens)
    async for _ in images:
        pass
    engine.release_embedding(key, 0)
    return tuple(tokens), num_cached


def until_end(tokens: Sequence[int]) -> tuple[int, ...]:
    """The answer: up to the end of the turn."""
    end = prompts().end
    return tuple(tokens[: tokens.index(end) + 1] if end in tokens else tokens)


def figures(
    given: Sequence[tuple[int, ...]],
    off: Sequence[tuple[int, ...]],
    num_text: Sequence[int],
    counted: dict[str, int],
) -> dict[str, Any]:
    """Percentages of unchanged answers, and the share of the history's text that keeps its KV."""
    same = [until_end(a) == until_end(b) for a, b in zip(given, off, strict=True)]
    low, high = Paired.of(same, [True] * len(same)).share_interval
    num_whole = sum(a == b for a, b in zip(given, off, strict=True))
    return {
        "conversations": len(off),
        "history": round(1 - counted["dropped"] / sum(num_text), 4),
        "unchanged": round(100 * sum(same) / len(same), 2),
        "low": round(100 * low, 2),
        "high": round(100 * high, 2),
        "tokens_unchanged": round(100 * num_whole / len(off), 2),
        "hit": round(100 * counted["hits"] / len(off), 2),
        "pruned": counted["pruned"],
    }
