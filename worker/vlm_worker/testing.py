"""A runner whose tokens are checksums of its inputs: `--runner=checksum`.

`ChecksumRunner` implements `engine.runner.Runner`. Its KV cache holds one number per token, which
is computed from the token (or the encoder row in its place) and its position. The next token is the
checksum of the numbers read through the block table. Any mistake in blocks, slots, positions,
chunks, images, transfers or preemption changes the text.
"""

from __future__ import annotations

import dataclasses
import threading
import zlib
from collections.abc import Sequence

import numpy as np

from vlm_worker.core.encoding import encode_each
from vlm_worker.core.step_values import (
    BANNED,
    NOT_FINITE,
    EditedRow,
    LogitEdits,
    SampleParams,
    StepInputs,
    StepOutput,
)
from vlm_worker.core.window_cache import WindowCache
from vlm_worker.errors import CorruptTransferError, InvalidImageError
from vlm_worker.reduction import Cells, Reduction
from vlm_worker.testing_scores import checksum_scores
from vlm_worker.types import (
    PLACE_BYTES,
    EmbedLayout,
    ImageItem,
    KVLayout,
    Narrow,
    PreparedImage,
    TokenLogprobs,
)
from vlm_worker.wire.buffers import HostRegions, Regions

VOCABULARY = 997
IMAGE_TOKEN = 7
UNWRITTEN = -1
NARROW_FORM = 0x5A5A5A5A

_AXES = np.array([[0x9E3779B1], [0x85EBCA77], [0xC2B2AE3D]], np.int64)


@dataclasses.dataclass(slots=True)
class Faults:
    """Injected faults. Tests change them while the engine runs.

    Attributes:
        step_seconds, encode_seconds: duration of each call.
        crash_token: a step with this token among its new ones raises.
        crash_steps: number of next steps that raise, with any tokens.
        poison_token: the logits of a sequence whose chunk has this token are not finite.
        bad_images: keys of images that fail, each by itself.
        crash_images: keys of images that make the whole encoder call raise.
        lost_images: keys of images for which the encoder returns nothing.
        encode_error: error of every encoder call, as from a lost or full device.
        export_error: error of every copy of an embedding from the device.
        unranked: next reductions whose embedding cannot tell which tokens to keep.
        reduce_error: error of every reduction of an embedding.
        observe_error: error of every call that sums attention.
        move_error: error of every copy of rows within the KV cache.
    """

    step_seconds: float = 0.0
    encode_seconds: float = 0.0
    crash_token: int | None = None
    crash_steps: int = 0
    poison_token: int | None = None
    bad_images: set[bytes] = dataclasses.field(default_factory=set)
    crash_images: set[bytes] = dataclasses.field(default_factory=set)
    lost_images: set[bytes] = dataclasses.field(default_factory=set)
    encode_error: Exception | None = None
    export_error: Exception | None = None
    unranked: int = 0
    reduce_error: Exception | None = None
    observe_error: Exception | None = None
    move_error: Exception | None = None


class ChecksumRunner:
    """Runs batches on a KV cache of numbers: one int64 per slot, block-major, in real memory.

    With `narrow`, blocks have two kinds, and a narrow block's numbers are stored in another form: a
    block that is read as the other kind changes the answer, and a mixed cache changes none. In 4
    bits, a step that writes a part of such a block fails.

    Attributes:
        faults: the injected faults.
        gate: steps and encoder calls wait until it is set; clear it to keep one in flight.
        num_steps: calls of `execute`.
        batch_sizes: images of each encoder call.
        num_idle_steps: remaining calls of `prefault` that report work.
        lends_memory: other threads may write into blocks; False behaves as a GPU does.
        script: the tokens of every answer, instead of checksums; the last one is repeated.
    """

    def __init__(
        self,
        num_blocks: int = 65,
        *,
        block_size: int = 4,
        has_kv: bool = True,
        narrow: Narrow | None = None,
    ) -> None:
        self.faults = Faults()
        self.gate = threading.Event()
        self.gate.set()
        self.num_steps = 0
        self.num_idle_steps = 0
        self.batch_sizes: list[int] = []
        self.lends_memory = True
        self.script: Sequence[int] = ()
        self.windows: WindowCache | None = None
        self._never = threading.Event()
        # in both, a narrow block has four parts
        dtype = "bfloat16" if narrow is not None and narrow.is_grouped else "float32"
        self._layout = KVLayout("checksum", 1, 1, 1, block_size, dtype, narrow=narrow)
        self._has_kv = has_kv
        self._kv = np.full((num_blocks, self._layout.block_bytes // 8), UNWRITTEN, np.int64)

    @property
    def kv_layout(self) -> KVLayout | None:
        return self._layout if self._has_kv else None

    @property
    def embed_layout(self) -> EmbedLayout:
        return EmbedLayout("checksum", hidden_size=2, num_levels=0, dtype="float32")

    @property
    def num_blocks(self) -> int:
        return len(self._kv)

    @property
    def vocab_size(self) -> int:
        return VOCABULARY

    def execute(self, inputs: StepInputs) -> StepOutput:
        """Write this step's numbers to their slots and read all sampled contexts."""
        self.num_steps += 1
        self._wait(self.faults.step_seconds)
        if self.faults.crash_steps or self.faults.crash_token in inputs.token_ids:
            self.faults.crash_steps = max(self.faults.crash_steps - 1, 0)
            raise RuntimeError("the step was told to crash")
        _check_whole_images(inputs)
        contents = inputs.token_ids.copy()
        contents[contents == IMAGE_TOKEN] = UNWRITTEN  # a placeholder has no content
        for rows in inputs.image_rows:
            values = rows.embedding[rows.src_start : rows.src_start + rows.num_rows]
            contents[rows.dst_start : rows.dst_start + rows.num_rows] = values
        places, form = self._places(inputs.slot_mapping)
        _check_whole_blocks(inputs.slot_mapping[form != 0], self._layout)
        self._kv.reshape(-1)[places] = slot_values(contents, inputs.positions) ^ form
        ends = inputs.query_start[1:] - 1
        sampled = np.searchsorted(ends, inputs.sample_rows)
        output = self.choose([self._context(inputs, int(s)) for s in sampled], inputs.sampling)
        if inputs.scored is None:
            return output
        contexts, scored = [], inputs.scored.rows
        for row, s in zip(scored.tolist(), np.searchsorted(ends, scored).tolist(), strict=True):
            context, num_later = self._context(inputs, s), int(ends[s]) - row
            contexts.append(None if context is None else context[: len(context) - num_later])
        return dataclasses.replace(output, scores=checksum_scores(contexts, inputs.scored))

    def choose(self, contexts: Sequence[np.ndarray | None], params: SampleParams) -> StepOutput:
        """The token after each of R contexts of numbers; None is a context with poison."""
        edits = {one.row: one for one in params.edited}
        if self.script:
            last = len(self.script) - 1
            told = [self.script[min(int(index), last)] for index in params.index]
            return _output(told, params.num_logprobs)
        allowed = allowed_tokens(params)
        temperature, seed = params.columns["temperature"].tolist(), params.columns["seed"]
        drawn = zip(temperature, seed, params.index, strict=True)
        tokens = [
            NOT_FINITE
            if context is None
            else among(
                _edited_token(context, temperature, int(seed), int(index), edits.get(row)),
                allowed.get(row),
            )
            for row, (context, (temperature, seed, index)) in enumerate(
                zip(contexts, drawn, strict=True)
            )
        ]
        return _output(tokens, params.num_logprobs)

    def encode(self, images: Sequence[PreparedImage]) -> list[np.ndarray | Exception]:
        """One number per visual token, computed from the patches."""
        return encode_each(self._encode_together, images)

    def _encode_together(self, images: Sequence[PreparedImage]) -> list[np.ndarray | Exception]:
        self.batch_sizes.append(len(images))
        self._wait(self.faults.encode_seconds)
        if self.faults.encode_error is not None:
            raise self.faults.encode_error
        if any(image.image_key in self.faults.crash_images for image in images):
            raise RuntimeError("the encoder was told to crash")
        results: list[np.ndarray | Exception | None] = [
            InvalidImageError("this image was told to fail", item=number)
            if image.image_key in self.faults.bad_images
            else None
            if image.image_key in self.faults.lost_images
            else encoded(image)
            for number, image in enumerate(images)
        ]
        return results  # type: ignore[return-value]  # None is the fault that is injected

    def encode_async(self, call: object) -> None:
        """None: the engine makes encoder calls itself, between steps."""

    def reduce_embedding(self, embedding: np.ndarray, image: PreparedImage) -> PlacedRows | None:
        """Rows at equal distances (`kept_cells`)."""
        if self.faults.reduce_error is not None:
            raise self.faults.reduce_error
        if self.faults.unranked > 0:
            self.faults.unranked -= 1
            return None
        assert image.reduction is not None
        kept = kept_cells(image.cells, image.reduction)
        places = np.stack(np.divmod(kept, image.cells[1]), axis=1).astype(np.int16)
        return PlacedRows(embedding[kept], places)

    def export_embedding(self, embedding: np.ndarray) -> memoryview:
        if self.faults.export_error is not None:
            raise self.faults.export_error
        if isinstance(embedding, PlacedRows):
            return memoryview(embedding.to_bytes())
        return memoryview(embedding.tobytes())

    def import_embedding(self, rows: memoryview, num_tokens: int) -> np.ndarray:
        if rows.nbytes == num_tokens * (self.embed_layout.row_bytes + PLACE_BYTES):
            return PlacedRows.from_bytes(bytes(rows))
        num_bytes = num_tokens * self.embed_layout.row_bytes
        if rows.nbytes != num_bytes:
            raise CorruptTransferError(f"an embedding of {num_bytes} bytes has {rows.nbytes}")
        return np.frombuffer(bytes(rows), np.int64)

    def export_scores(self, embedding: np.ndarray) -> memoryview:
        """None: `kept_cells` needs no scores."""
        del embedding
        return memoryview(b"")

    def with_scores(self, embedding: np.ndarray, scores: memoryview) -> np.ndarray:
        assert not scores.nbytes
        return embedding

    def export_blocks(self, block_ids: Sequence[int], out: memoryview | None = None) -> memoryview:
        data = memoryview(self._kv[list(block_ids)].tobytes())
        if out is None:
            return data
        out[:] = data
        return out

    def block_memory(self, block_ids: Sequence[int], *, to_write: bool = False) -> Regions | None:
        """The memory of the numbers; any thread may write there."""
        del to_write
        if not self.lends_memory:
            return None
        return HostRegions([self._kv[block].data.cast("B") for block in block_ids])

    def import_blocks(self, block_ids: Sequence[int], data: memoryview) -> None:
        blocks = np.frombuffer(bytes(data), np.int64).reshape(len(block_ids), -1)
        self._kv[list(block_ids)] = blocks

    @property
    def pruning_problem(self) -> str | None:
        return None

    def attention_mass(self, inputs: StepInputs) -> np.ndarray:
        """A number per token of the one sequence, from its content and all new tokens."""
        if self.faults.observe_error is not None:
            raise self.faults.observe_error
        num_tokens = int(inputs.context_lens[0]) + len(inputs.token_ids)
        context = self._kv[inputs.block_table[0]].reshape(-1)[:num_tokens]
        return checksum_mass(context, inputs.token_ids, inputs.positions)

    def move_rows(self, sources: np.ndarray, targets: np.ndarray) -> None:
        if self.faults.move_error is not None:
            raise self.faults.move_error
        slots = self._kv.reshape(-1)
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            slots[target] = slots[source]

    def embedding_bytes(self, embedding: np.ndarray) -> int:
        has_places = isinstance(embedding, PlacedRows)
        return embedding.nbytes + (PLACE_BYTES * len(embedding) if has_places else 0)

    def prefault(self) -> bool:
        if self.num_idle_steps == 0:
            return False
        self.num_idle_steps -= 1
        return True

    def _context(self, inputs: StepInputs, s: int) -> np.ndarray | None:
        start, end = int(inputs.query_start[s]), int(inputs.query_start[s + 1])
        poison = self.faults.poison_token
        if poison is not None and poison in inputs.token_ids[start:end]:
            return None
        length = int(inputs.context_lens[s]) + end - start
        size = self._layout.block_size
        first = inputs.block_table[s].astype(np.int64) * size
        slots = (first[:, None] + np.arange(size)).reshape(-1)[:length]
        places, form = self._places(slots)
        context: np.ndarray = self._kv.reshape(-1)[places] ^ form
        return context

    def _places(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where the numbers of slots are in the memory, and what their form is XORed with."""
        layout, width = self._layout, self._kv.shape[1]
        if layout.narrow is None:
            return slots, np.zeros_like(slots)
        kind, place = np.divmod(slots, layout.num_parts * layout.block_size)
        block, is_narrow = np.divmod(kind, 2)
        assert (is_narrow | (place < layout.block_size)).all(), "a wide block has one part"
        return block * width + place, np.where(is_narrow, NARROW_FORM, 0)

    def _wait(self, seconds: float) -> None:
        self.gate.wait()
        if seconds:
            self._never.wait(seconds)


def _output(tokens: list[int], num_logprobs: np.ndarray | None) -> StepOutput:
    token_ids = np.array(tokens, np.int64)
    if num_logprobs is None:
        return StepOutput(token_ids)
    num_top = int(num_logprobs.max(initial=0))
    logprobs = [token_logprobs(token, num_top) for token in tokens]
    top = np.array([one.top for one in logprobs], np.float64).reshape(len(tokens), num_top, 2)
    return StepOutput(
        token_ids,
        np.array([one.logprob for one in logprobs], np.float32),
        top[..., 0].astype(np.int64),
        top[..., 1].astype(np.float32),
    )


def _check_whole_blocks(narrow_slots: np.ndarray, layout: KVLayout) -> None:
    """Raise if a step writes a part of a block in 4 bits."""
    if layout.narrow is None or not layout.narrow.is_grouped:
        return
    size = layout.num_parts * layout.block_size
    groups = narrow_slots[: len(narrow_slots) // size * size].reshape(-1, size)
    assert groups.size == narrow_slots.size, "a part of a block is written"
    assert (groups % size == np.arange(size)).all(), "a block is written in parts"
    assert (groups // size == groups[:, :1] // size).all(), "a block is written in parts"


def _check_whole_images(inputs: StepInputs) -> None:
    """Raise if a chunk ends inside an image that must not be cut."""
    counts = np.diff(inputs.query_start)
    for spans, context, count in zip(inputs.spans, inputs.context_lens, counts, strict=True):
        for start, end in spans:
            if start < context + count < end:
                raise RuntimeError(f"a chunk ends inside the image [{start}, {end})")


def slot_values(contents: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The content of KV slots: int64 [T], from contents [T] and positions [P, T]."""
    axes = _AXES[: len(positions)]
    values: np.ndarray = contents.astype(np.int64) * 1_000_003 + (positions * axes).sum(axis=0)
    return values


def checksum_mass(context: np.ndarray, token_ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The attention that `ChecksumRunner` gives: float32 [T], equal for some tokens.

    `context` is int64 [T], `token_ids` and `positions` are those of the observed rows.
    """
    seed = zlib.crc32(token_ids.astype(np.int64).tobytes() + positions.astype(np.int64).tobytes())
    mass: np.ndarray = ((context ^ seed) * 0x9E3779B1 >> 7 & 0x3F).astype(np.float32)
    return mass


def next_token(
    context: np.ndarray, temperature: float, seed: int, index: int, *, edits: bytes = b""
) -> int:
    """The token after a context; if the temperature is not 0, it depends on (seed, index)."""
    drawn = f"{seed}/{index}".encode() if temperature else b""
    return zlib.crc32(context.astype(np.int64).tobytes() + drawn + edits) % VOCABULARY


def _edited_token(
    context: np.ndarray, temperature: float, seed: int, index: int, edited: EditedRow | None
) -> int:
    if edited is None:
        return next_token(context, temperature, seed, index)
    edits = edits_bytes(edited.edits, edited.token_ids, edited.num_prompt)
    return not_banned(next_token(context, temperature, seed, index, edits=edits), edited.edits)


def not_banned(token_id: int, edits: LogitEdits) -> int:
    """The token, or the first behind it that the edits do not ban."""
    banned = set(edits.bias_ids[edits.bias_values <= BANNED].tolist())
    return next(
        one for i in range(VOCABULARY) if (one := (token_id + i) % VOCABULARY) not in banned
    )


def allowed_tokens(params: SampleParams) -> dict[int, np.ndarray]:
    """The tokens that each masked row may get."""
    if params.masks is None:
        return {}
    bits = np.unpackbits(params.masks.words().view(np.uint8), axis=1, bitorder="little")
    masked = enumerate(params.masks.rows.tolist())
    return {row: np.flatnonzero(bits[mask]) for row, mask in masked if mask >= 0}


def among(token_id: int, allowed: np.ndarray | None) -> int:
    """One of the allowed tokens, chosen by the token; the token itself if all are allowed."""
    if allowed is None:
        return token_id
    return int(allowed[token_id % len(allowed)]) if len(allowed) else NOT_FINITE


def edits_bytes(edits: LogitEdits, token_ids: np.ndarray, num_prompt: int) -> bytes:
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


_PLACED = np.dtype([("value", "<i8"), ("place", "<i2", 2)])


class PlacedRows(np.ndarray):
    """The embedding of a reduced image: int64 [N], with `places` int16 [N, 2]."""

    places: np.ndarray

    def __new__(cls, values: np.ndarray, places: np.ndarray) -> PlacedRows:
        rows = np.ascontiguousarray(values, np.int64).view(cls)
        rows.places = places
        return rows

    def to_bytes(self) -> bytes:
        packed = np.empty(len(self), _PLACED)
        packed["value"], packed["place"] = self, self.places
        return packed.tobytes()

    @classmethod
    def from_bytes(cls, rows: bytes) -> PlacedRows:
        packed = np.frombuffer(rows, _PLACED)
        return cls(packed["value"], packed["place"].copy())


def encoded(image: PreparedImage) -> np.ndarray:
    """What `ChecksumRunner` makes of an image: all rows, or the kept ones of an approximation.

    These differ from all rows of the whole image.
    """
    if not image.is_approximate:
        return embed(image)
    assert image.reduction is not None
    kept = kept_cells(image.cells, image.reduction)
    places = np.stack(np.divmod(kept, image.cells[1]), axis=1).astype(np.int16)
    return PlacedRows(embed(image)[kept] ^ 1, places)


def kept_cells(cells: Cells, reduction: Reduction) -> np.ndarray:
    """The cells that `ChecksumRunner` keeps: int64 [N], increasing, another choice per method."""
    total, num_kept = cells[0] * cells[1], reduction.num_tokens(cells)
    shift = len(reduction.method) % max(1, total // num_kept)
    return np.arange(num_kept) * total // num_kept + shift


def plain_positions(token_ids: Sequence[int], items: Sequence[ImageItem]) -> tuple[np.ndarray, int]:
    """Positions 0, 1, 2 ...; for `Engine(positions=...)`."""
    del items
    return np.arange(len(token_ids), dtype=np.int64)[None], 0
