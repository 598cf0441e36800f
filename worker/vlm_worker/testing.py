"""A model without a model: what it says is a checksum of what it reads.

Its KV cache holds one number per token, made of the token (or of the encoder row in its place) and
of its position. The next token is the checksum of the numbers read back through the block table.
Any mistake in blocks, slots, positions, chunks, images, transfers or preemption changes the text.

`ChecksumRunner` implements `engine.runner.Runner`; `answer_alone` is the same model, bare.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from vlm_worker.core.inputs import NOT_FINITE, LogitEdits, SampleParams, StepInputs, StepOutput
from vlm_worker.errors import CorruptTransferError, InvalidImageError
from vlm_worker.types import (
    EmbedLayout,
    ImageItem,
    KVLayout,
    PreparedImage,
    Request,
    TokenLogprobs,
)

VOCABULARY = 997
IMAGE_TOKEN = 7
UNWRITTEN = -1

_AXES = np.array([[0x9E3779B1], [0x85EBCA77], [0xC2B2AE3D]], np.int64)


@dataclasses.dataclass(slots=True)
class Faults:
    """What goes wrong, on purpose. Changed by tests while the engine runs.

    Attributes:
        step_seconds, encode_seconds: how long each call takes.
        crash_token: a step with this token among its new ones raises.
        crash_steps: so many coming steps raise, whatever they hold.
        poison_token: the logits of a sequence whose chunk has this token are not finite.
        bad_images: keys of pictures that fail, each by itself.
        crash_images: keys of pictures that make the whole encoder call raise.
        lost_images: keys of pictures for which the encoder returns nothing.
    """

    step_seconds: float = 0.0
    encode_seconds: float = 0.0
    crash_token: int | None = None
    crash_steps: int = 0
    poison_token: int | None = None
    bad_images: set[bytes] = dataclasses.field(default_factory=set)
    crash_images: set[bytes] = dataclasses.field(default_factory=set)
    lost_images: set[bytes] = dataclasses.field(default_factory=set)


class ChecksumRunner:
    """Runs batches on a KV cache of numbers: one int64 for each slot, block-major, real bytes.

    Attributes:
        faults: what goes wrong.
        gate: steps and encoder calls wait until it is set; clear it to keep one in flight.
        num_steps: calls of `execute`.
        batch_sizes: images of each encoder call.
    """

    def __init__(self, num_blocks: int = 65, *, block_size: int = 4, has_kv: bool = True) -> None:
        self.faults = Faults()
        self.gate = threading.Event()
        self.gate.set()
        self.num_steps = 0
        self.batch_sizes: list[int] = []
        self._never = threading.Event()
        self._layout = KVLayout("checksum", 1, 1, 1, block_size, "float32")
        self._has_kv = has_kv
        self._kv = np.full((num_blocks, block_size), UNWRITTEN, np.int64)

    @property
    def kv_layout(self) -> KVLayout | None:
        """One number per slot, in the space of a float32 key and value."""
        return self._layout if self._has_kv else None

    @property
    def embed_layout(self) -> EmbedLayout:
        """One number per row."""
        return EmbedLayout("checksum", hidden_size=2, num_levels=0, dtype="float32")

    @property
    def num_blocks(self) -> int:
        """KV blocks, the null block included."""
        return len(self._kv)

    @property
    def vocab_size(self) -> int:
        """Tokens that it may say."""
        return VOCABULARY

    def execute(self, inputs: StepInputs) -> StepOutput:
        """Write this step's numbers to their slots and read every sampled context back."""
        self.num_steps += 1
        self._wait(self.faults.step_seconds)
        if self.faults.crash_steps or self.faults.crash_token in inputs.token_ids:
            self.faults.crash_steps = max(self.faults.crash_steps - 1, 0)
            raise RuntimeError("the step was told to crash")
        _check_whole_images(inputs)
        contents = inputs.token_ids.copy()
        contents[contents == IMAGE_TOKEN] = UNWRITTEN  # a placeholder alone says nothing
        for rows in inputs.image_rows:
            taken = rows.embedding[rows.src_start : rows.src_start + rows.num_rows]
            contents[rows.dst_start : rows.dst_start + rows.num_rows] = taken
        self._kv.reshape(-1)[inputs.slot_mapping] = slot_values(contents, inputs.positions)
        ends = inputs.query_start[1:] - 1
        sampled = np.searchsorted(ends, inputs.sample_rows)
        return self.choose([self._context(inputs, int(s)) for s in sampled], inputs.sampling)

    def choose(self, contexts: Sequence[np.ndarray | None], params: SampleParams) -> StepOutput:
        """A token after each of R contexts, the numbers read back; None is one of poison."""
        edits = {one.row: told(one.edits, one.token_ids, one.num_prompt) for one in params.edited}
        drawn = zip(params.temperature.tolist(), params.seed, params.index, strict=True)
        tokens = [
            NOT_FINITE
            if context is None
            else next_token(context, temperature, int(seed), int(index), edits=edits.get(row, b""))
            for row, (context, (temperature, seed, index)) in enumerate(
                zip(contexts, drawn, strict=True)
            )
        ]
        return _output(tokens, params.num_logprobs)

    def encode(self, images: Sequence[PreparedImage]) -> list[np.ndarray | Exception]:
        """One number per visual token, made of the patches."""
        self.batch_sizes.append(len(images))
        self._wait(self.faults.encode_seconds)
        if any(image.image_key in self.faults.crash_images for image in images):
            raise RuntimeError("the encoder was told to crash")
        results: list[np.ndarray | Exception | None] = [
            InvalidImageError("this picture was told to fail", item=number)
            if image.image_key in self.faults.bad_images
            else None
            if image.image_key in self.faults.lost_images
            else embed(image)
            for number, image in enumerate(images)
        ]
        return results  # type: ignore[return-value]  # None is the fault that is injected

    def export_embedding(self, embedding: np.ndarray) -> memoryview:
        """The numbers as bytes."""
        return memoryview(embedding.tobytes())

    def import_embedding(self, rows: memoryview, num_tokens: int) -> np.ndarray:
        """Numbers from bytes."""
        wanted = num_tokens * self.embed_layout.row_bytes
        if rows.nbytes != wanted:
            raise CorruptTransferError(f"an embedding of {wanted} bytes came as {rows.nbytes}")
        return np.frombuffer(bytes(rows), np.int64)

    def export_blocks(self, block_ids: Sequence[int]) -> memoryview:
        """A copy of whole blocks."""
        return memoryview(self._kv[list(block_ids)].tobytes())

    def import_blocks(self, block_ids: Sequence[int], data: memoryview) -> None:
        """Write whole blocks."""
        blocks = np.frombuffer(bytes(data), np.int64).reshape(len(block_ids), -1)
        self._kv[list(block_ids)] = blocks

    def embedding_bytes(self, embedding: np.ndarray) -> int:
        """Bytes of the numbers."""
        return embedding.nbytes

    def _context(self, inputs: StepInputs, s: int) -> np.ndarray | None:
        start, end = int(inputs.query_start[s]), int(inputs.query_start[s + 1])
        poison = self.faults.poison_token
        if poison is not None and poison in inputs.token_ids[start:end]:
            return None
        length = int(inputs.context_lens[s]) + end - start
        context: np.ndarray = self._kv[inputs.block_table[s]].reshape(-1)[:length]
        return context

    def _wait(self, seconds: float) -> None:
        self.gate.wait()
        if seconds:
            self._never.wait(seconds)


def slot_values(contents: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """What a KV slot holds: int64 [T] of contents [T] and positions [P, T]."""
    axes = _AXES[: len(positions)]
    values: np.ndarray = contents.astype(np.int64) * 1_000_003 + (positions * axes).sum(axis=0)
    return values


def next_token(
    context: np.ndarray, temperature: float, seed: int, index: int, *, edits: bytes = b""
) -> int:
    """The token after a context; drawn by (seed, index) where the temperature is not 0."""
    drawn = f"{seed}/{index}".encode() if temperature else b""
    return zlib.crc32(context.astype(np.int64).tobytes() + drawn + edits) % VOCABULARY


def told(edits: LogitEdits, token_ids: np.ndarray, num_prompt: int) -> bytes:
    """All that penalties and biases depend on: numbers, biases, and the tokens of the answer."""
    numbers = (edits.frequency_penalty, edits.presence_penalty, edits.repetition_penalty)
    answer = token_ids[num_prompt:].astype(np.int32)
    arrays = (np.array(numbers, np.float32), edits.bias_ids, edits.bias_values, answer)
    return b"".join(array.tobytes() for array in arrays)


def token_logprobs(token_id: int, num_top: int) -> TokenLogprobs:
    """What it says of the likelihood of a token: exact in float32, the token itself the best."""
    best = -(token_id % 16 + 1) / 8
    top = [((token_id + rank) % VOCABULARY, best - rank) for rank in range(num_top)]
    return TokenLogprobs(best, tuple(top))


def embed(image: PreparedImage) -> np.ndarray:
    """The encoder: int64 [num_tokens]."""
    digest = zlib.crc32(bytes(image.patches))
    return digest * 31 + np.arange(image.num_tokens, dtype=np.int64)


def make_image(number: int, *, num_tokens: int) -> PreparedImage:
    """A picture that differs from those with another number or size."""
    patches = np.full(4 * num_tokens, number, np.float32).tobytes()
    key = hashlib.sha256(b"%d/%d" % (number, num_tokens)).digest()
    return PreparedImage(key, (1, 2, 2 * num_tokens), num_tokens, memoryview(patches))


def plain_positions(token_ids: Sequence[int], items: Sequence[ImageItem]) -> tuple[np.ndarray, int]:
    """Positions 0, 1, 2 ...; for `Engine(positions=...)`."""
    del items
    return np.arange(len(token_ids), dtype=np.int64)[None], 0


def folded_positions(
    token_ids: Sequence[int], items: Sequence[ImageItem]
) -> tuple[np.ndarray, int]:
    """Three rows and a negative delta, as M-RoPE has them: an image advances by one."""
    steps = np.ones(len(token_ids), np.int64)
    column = np.zeros(len(token_ids), np.int64)
    for item in items:
        steps[item.offset : item.end - 1] = 0
        column[item.offset : item.end] = np.arange(item.num_tokens)
    line = np.cumsum(steps) - steps
    last = int(line[-1]) + 1 if len(line) else 0
    return np.stack([line, line, line + column]), last - len(token_ids)


def answer_alone(
    request: Request,
    images: Sequence[PreparedImage] = (),
    *,
    positions: Callable[
        [Sequence[int], Sequence[ImageItem]], tuple[np.ndarray, int]
    ] = plain_positions,
    max_model_len: int = 2**31,
    eos_token_ids: Sequence[int] = (),
) -> list[int]:
    """The whole answer to a request, delivered tokens included; no blocks, batches or chunks."""
    known, delta = positions(request.token_ids, request.items)
    contents = np.array(request.token_ids, np.int64)
    contents[contents == IMAGE_TOKEN] = UNWRITTEN
    for item, image in zip(request.items, images, strict=True):
        contents[item.offset : item.end] = embed(image)
    values = list(slot_values(contents, known))
    answer = list(request.token_ids[request.num_prompt_tokens :])
    sampling = request.sampling
    edits = LogitEdits.of(sampling)
    stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids)}
    while True:
        known_ids = np.array([*request.token_ids[: request.num_prompt_tokens], *answer])
        told_edits = b"" if edits is None else told(edits, known_ids, request.num_prompt_tokens)
        token = next_token(
            np.array(values), sampling.temperature, sampling.seed, len(answer), edits=told_edits
        )
        answer.append(token)
        num_tokens = request.num_prompt_tokens + len(answer)
        full = len(answer) >= sampling.max_tokens or num_tokens >= max_model_len
        if token in stops or full:
            return answer
        position = np.full((len(known), 1), num_tokens - 1 + delta)
        content = np.array([UNWRITTEN if token == IMAGE_TOKEN else token])
        values.append(slot_values(content, position)[0])


def _output(tokens: list[int], num_logprobs: np.ndarray | None) -> StepOutput:
    token_ids = np.array(tokens, np.int64)
    if num_logprobs is None:
        return StepOutput(token_ids)
    most = int(num_logprobs.max(initial=0))
    told_all = [token_logprobs(token, most) for token in tokens]
    top = np.array([one.top for one in told_all], np.float64).reshape(len(tokens), most, 2)
    return StepOutput(
        token_ids,
        np.array([one.logprob for one in told_all], np.float32),
        top[..., 0].astype(np.int64),
        top[..., 1].astype(np.float32),
    )


def _check_whole_images(inputs: StepInputs) -> None:
    """Raise where a chunk ends inside an image that may not be cut."""
    counts = np.diff(inputs.query_start)
    for spans, context, count in zip(inputs.spans, inputs.context_lens, counts, strict=True):
        for start, end in spans:
            if start < context + count < end:
                raise RuntimeError(f"a chunk ends inside the image [{start}, {end})")


class Accountable(Protocol):
    """A worker that can tell what it still owes: `server.worker.WorkerServer`."""

    @property
    def left(self) -> Mapping[str, int]:
        """All that has not come back, by what it is."""

    @property
    def num_violations(self) -> int:
        """Broken promises of its books so far."""


async def assert_idle(worker: Accountable, *, within_seconds: float = 15.0) -> None:
    """Wait until a worker has everything back: blocks, pins, leases, calls, tasks, segments.

    Raises:
        AssertionError: something did not come back, with its name and number, or the worker's own
            books broke a promise.
    """
    deadline = time.monotonic() + within_seconds
    while left := worker.left:
        assert time.monotonic() < deadline, f"after {within_seconds:g} s there is left: {left}"
        await asyncio.sleep(0.005)
    assert not worker.num_violations, f"{worker.num_violations} broken promises"
