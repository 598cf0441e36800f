"""The checksum model as plain functions of tokens, images and positions.

`answer_alone` is the complete model, without blocks, batches or chunks.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Sequence

import numpy as np

from vlm_worker.core.step_values import LogitEdits
from vlm_worker.types import ImageItem, PreparedImage, Request, TokenLogprobs

VOCABULARY = 997
IMAGE_TOKEN = 7
UNWRITTEN = -1

_AXES = np.array([[0x9E3779B1], [0x85EBCA77], [0xC2B2AE3D]], np.int64)


def slot_values(contents: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The content of KV slots: int64 [T], from contents [T] and positions [P, T]."""
    axes = _AXES[: len(positions)]
    values: np.ndarray = contents.astype(np.int64) * 1_000_003 + (positions * axes).sum(axis=0)
    return values


def next_token(
    context: np.ndarray, temperature: float, seed: int, index: int, *, edits: bytes = b""
) -> int:
    """The token after a context; if the temperature is not 0, it depends on (seed, index)."""
    drawn = f"{seed}/{index}".encode() if temperature else b""
    return zlib.crc32(context.astype(np.int64).tobytes() + drawn + edits) % VOCABULARY


def told(edits: LogitEdits, token_ids: np.ndarray, num_prompt: int) -> bytes:
    """The inputs of penalties and biases as bytes: parameters, biases, and the answer's tokens."""
    numbers = tuple(edits.penalties.values())
    answer = token_ids[num_prompt:].astype(np.int32)
    arrays = (np.array(numbers, np.float32), edits.bias_ids, edits.bias_values, answer)
    return b"".join(array.tobytes() for array in arrays)


def token_logprobs(token_id: int, num_top: int) -> TokenLogprobs:
    """Log-probabilities of a token, exact in float32; the token itself is the best."""
    best = -(token_id % 16 + 1) / 8
    top = [((token_id + rank) % VOCABULARY, best - rank) for rank in range(num_top)]
    return TokenLogprobs(best, tuple(top))


def embed(image: PreparedImage) -> np.ndarray:
    """Encode an image: int64 [num_tokens]."""
    digest = zlib.crc32(image.patches)
    return digest * 31 + np.arange(image.num_tokens, dtype=np.int64)


def make_image(number: int, *, num_tokens: int) -> PreparedImage:
    """An image whose key and patches depend on its number and size."""
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
    """Three rows and a negative delta, as in M-RoPE: an image advances the position by one."""
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
    """The whole answer to a request, delivered tokens included."""
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
