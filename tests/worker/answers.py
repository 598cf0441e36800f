"""The answer of `ChecksumRunner` to a request, computed without blocks, batches or chunks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np

from vlm_worker.core.pruning import kept_tokens, observed_rows
from vlm_worker.core.step_values import LogitEdits
from vlm_worker.testing import (
    IMAGE_TOKEN,
    UNWRITTEN,
    PlacedRows,
    checksum_mass,
    edits_bytes,
    embed,
    encoded,
    kept_cells,
    next_token,
    not_banned,
    plain_positions,
    slot_values,
)
from vlm_worker.testing_scores import prompt_logprob
from vlm_worker.types import ImageItem, PreparedImage, Request


def make_image(number: int, *, num_tokens: int) -> PreparedImage:
    """An image whose key and patches depend on its number and size."""
    patches = np.full(4 * num_tokens, number, np.float32).tobytes()
    key = hashlib.sha256(b"%d/%d" % (number, num_tokens)).digest()
    return PreparedImage(key, (1, 2, 2 * num_tokens), num_tokens, memoryview(patches))


def kept_rows(image: PreparedImage) -> np.ndarray:
    """The embedding that a prompt gets: int64 [kept tokens]."""
    if image.reduction is None or image.is_approximate:
        return encoded(image)
    kept = kept_cells(image.cells, image.reduction)
    return PlacedRows(embed(image)[kept], np.stack(np.divmod(kept, image.cells[1]), axis=1))


def image_item(image: PreparedImage, offset: int) -> ImageItem:
    """The place of an image in a prompt."""
    return ImageItem(
        image.kept_key, offset, image.kept_tokens, image.grid_thw, reduction=image.reduction
    )


def folded_positions(
    token_ids: Sequence[int], items: Sequence[ImageItem]
) -> tuple[np.ndarray, int]:
    """Three rows and a negative delta, as in M-RoPE: an image advances the position by one."""
    steps = np.ones(len(token_ids), np.int64)
    column = np.zeros(len(token_ids), np.int64)
    for item in items:
        steps[item.offset : item.end - 1] = 0
        if item.reduction is None:
            column[item.offset : item.end] = np.arange(item.num_tokens)
    line = np.cumsum(steps) - steps
    last = int(line[-1]) + 1 if len(line) else 0
    return np.stack([line, line, line + column]), last - len(token_ids)


def prompt_alone(
    request: Request,
    *,
    positions: Callable[
        [Sequence[int], Sequence[ImageItem]], tuple[np.ndarray, int]
    ] = plain_positions,
) -> list[float]:
    """The log-probabilities of a prompt of text, from its second token on."""
    ids = request.token_ids[: request.num_prompt_tokens]
    context = slot_values(np.array(ids, np.int64), positions(ids, ())[0])
    return [prompt_logprob(context[:index], ids[index]) for index in range(1, len(ids))]


def answer_alone(
    request: Request,
    images: Sequence[PreparedImage] = (),
    *,
    positions: Callable[
        [Sequence[int], Sequence[ImageItem]], tuple[np.ndarray, int]
    ] = plain_positions,
    max_model_len: int = 2**31,
    eos_token_ids: Sequence[int] = (),
    kept_permille: int = 0,
) -> list[int]:
    """The whole answer to a request, delivered tokens included; 0 permille prunes nothing."""
    known, delta = positions(request.token_ids, request.items)
    contents = np.array(request.token_ids, np.int64)
    contents[contents == IMAGE_TOKEN] = UNWRITTEN
    for item, image in zip(request.items, images, strict=True):
        rows = kept_rows(image)
        contents[item.offset : item.end] = rows
        if isinstance(rows, PlacedRows):
            known[1:3, item.offset : item.end] += rows.places.T
    values = list(slot_values(contents, known))
    answer = list(request.token_ids[request.num_prompt_tokens :])
    kept = None
    if kept_permille:
        rows, num_prompt = observed_rows(request), request.num_prompt_tokens
        observed = contents[rows.start : rows.stop], known[:, rows.start : rows.stop]
        mass = checksum_mass(np.array(values[:num_prompt]), *observed)
        kept = kept_tokens(request, mass, kept_permille).tolist()
    sampling = request.sampling
    stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids)}
    ordered = (*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids))
    while True:
        if kept is not None and answer:  # the first token is chosen before
            values = [values[index] for index in kept] + values[request.num_prompt_tokens :]
            kept = None
        known_ids = np.array([*request.token_ids[: request.num_prompt_tokens], *answer])
        is_early = len(answer) < sampling.min_tokens
        edits = LogitEdits.of(sampling, banned=ordered if is_early else ())
        edited = b"" if edits is None else edits_bytes(edits, known_ids, request.num_prompt_tokens)
        token = next_token(
            np.array(values), sampling.temperature, sampling.seed, len(answer), edits=edited
        )
        token = token if edits is None else not_banned(token, edits)
        answer.append(token)
        num_tokens = request.num_prompt_tokens + len(answer)
        full = len(answer) >= sampling.max_tokens or num_tokens >= max_model_len
        if token in stops or full:
            return answer
        position = np.full((len(known), 1), num_tokens - 1 + delta)
        content = np.array([UNWRITTEN if token == IMAGE_TOKEN else token])
        values.append(slot_values(content, position)[0])
