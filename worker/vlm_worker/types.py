"""The basic types of the worker: requests, images, sampling, layouts, sources, events. No torch."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from array import array
from typing import Annotated, Final

from vlm_worker import annotations as an
from vlm_worker.annotations import Between, Parameter
from vlm_worker.attends import Attends
from vlm_worker.reduction import Cells, Reduction, cells_of, num_kept


class Role(enum.StrEnum):
    """The role of a pod, by which it is named and routed."""

    ENCODER = "encoder"
    PREFILL = "prefill"
    DECODE = "decode"
    GATEWAY = "gateway"


WORKER_ROLES: Final = tuple(role for role in Role if role is not Role.GATEWAY)


class Stage(enum.StrEnum):
    """A kind of work that a worker can load; a role has one or more."""

    ENCODER = "encoder"
    PREFILL = "prefill"
    DECODE = "decode"


class Modality(enum.StrEnum):
    """What a request contains besides text."""

    TEXT = "text"
    IMAGE = "image"
    VIDEO = "video"


class FinishReason(enum.StrEnum):
    """Why an answer ended on this worker. DRAINED: it continues on another one."""

    STOP = "stop"
    LENGTH = "length"
    DRAINED = "drained"


@dataclasses.dataclass(frozen=True, slots=True)
class RequestKey:
    """One attempt at one request. Minted by the gateway; unique on every worker."""

    request_id: Annotated[str, an.identifier()]
    attempt: Annotated[int, Between(0, an.MAX_ATTEMPT)]


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose the next token.

    `temperature` 0 is greedy. Randomness is a function of (seed, index of the token in the answer),
    so that another worker continues an answer identically. `top_p` 1 and `top_k` 0 mean unset.
    `max_tokens` limits the whole answer, including tokens delivered by earlier attempts; no token
    ends it before `min_tokens`, counted likewise. `min_p` excludes tokens below `min_p` times the
    best one's probability; 0 means unset.
    `frequency_penalty` and `presence_penalty` lower the logits of tokens that are in the answer, as
    OpenAI's API defines them; `repetition_penalty` 1 means unset. `logit_bias` holds
    (token id, bias) pairs in the order of their ids. `num_logprobs` n requests log-probabilities
    of the chosen token and the n best ones; None requests none. `num_prompt_logprobs` requests
    those of the prompt's tokens, likewise. `grammar` is llguidance's text of what the answer must
    be (`core.grammars`), in UTF-8; empty if it may be anything.
    """

    max_tokens: Annotated[int, Between(1, an.MAX_TOKENS)]
    temperature: Annotated[
        float,
        Between(0.0, an.MAX_TEMPERATURE),
        Parameter(
            "0 to 2, 0 is greedy; default: the model's `generation_config.json`",
            0, 2, model_default=1.0, dtype="float32",
        ),
    ] = 0.0  # fmt: skip
    top_p: Annotated[
        float,
        Between(0.0, 1.0),
        an.Unset(1.0),
        Parameter(
            "0 to 1, 0 is greedy; default: the model's `generation_config.json`",
            0, 1, model_default=1.0, dtype="float32",
        ),
    ] = 1.0  # fmt: skip
    top_k: Annotated[
        int,
        Between(0, an.MAX_TOKEN_ID),
        Parameter(
            "tokens to choose from; 0 or -1: all; default: `generation_config.json`",
            -1, an.MAX_TOKEN_ID, unset=-1, is_extension=True, model_default=0, dtype="int32",
        ),
    ] = 0  # fmt: skip
    seed: Annotated[
        int,
        Parameter(
            "-2^63 to 2^63-1; the same seed gives the same answer, on any pod",
            -(2**63), 2**63 - 1, dtype="uint64",
        ),
    ] = 0  # fmt: skip
    stop_token_ids: Annotated[tuple[int, ...], an.token_ids(0, an.MAX_STOP_TOKENS)] = ()
    ignore_eos: Annotated[
        bool,
        Parameter("go on to `max_tokens`, past the model's end of the answer", is_extension=True),
    ] = False
    min_tokens: Annotated[
        int,
        Between(0, an.MAX_TOKENS),
        Parameter(
            "tokens of the answer before which nothing ends it; at most `max_tokens`; see below",
            0, an.MAX_TOKENS, is_extension=True,
        ),
    ] = 0  # fmt: skip
    min_p: Annotated[
        float,
        Between(0.0, 1.0),
        Parameter(
            "0 to 1: the least probability, as a share of the likeliest token's",
            0, 1, is_extension=True, model_default=0.0, dtype="float32",
        ),
    ] = 0.0  # fmt: skip
    frequency_penalty: Annotated[
        float,
        Between(-2.0, 2.0),
        Parameter(
            "-2 to 2, for each time that the answer holds a token", -2.0, 2.0, is_penalty=True
        ),
    ] = 0.0
    presence_penalty: Annotated[
        float,
        Between(-2.0, 2.0),
        Parameter("-2 to 2, for a token that the answer holds", -2.0, 2.0, is_penalty=True),
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        Between(0.0, 10.0),
        an.Unset(1.0),
        Parameter(
            "0.01 to 10, for tokens of prompt and answer; default: `generation_config.json`",
            0.01, 10.0, is_extension=True, model_default=1.0, greedy_model_default=True,
            is_penalty=True,
        ),
    ] = 1.0  # fmt: skip
    logit_bias: Annotated[tuple[tuple[int, float], ...], an.Pairs(), an.biases()] = ()
    num_logprobs: Annotated[int | None, Between(0, an.MAX_LOGPROBS), an.OffsetByOne()] = None
    num_prompt_logprobs: Annotated[int | None, Between(0, an.MAX_LOGPROBS), an.OffsetByOne()] = None
    grammar: Annotated[bytes, an.max_bytes(an.MAX_GRAMMAR_BYTES)] = b""


PARAMETERS: Final = [
    (field, parameter)
    for field in an.fields_of(SamplingParams)
    if (parameter := field.marker(Parameter)) is not None
]
"""The sampling parameters of the API that are numbers or Booleans."""


@dataclasses.dataclass(frozen=True, slots=True)
class ImageItem:
    """One image's place in a prompt.

    `offset` is the index of its first placeholder token, `num_tokens` their number, and `grid_thw`
    the patch grid (time, height, width) before merging. `image_key` is the 32-byte content key:
    SHA-256 over model revision, processor parameters, size, pixels and tenant salt. With a
    `reduction`, `num_tokens` and `image_key` are those of the reduced embedding.
    """

    image_key: Annotated[bytes, an.num_bytes(32)]
    offset: int
    num_tokens: int
    grid_thw: Annotated[tuple[int, int, int], an.grid()]
    reduction: Reduction | None = None

    @property
    def end(self) -> int:
        return self.offset + self.num_tokens


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """A request to the engine.

    `token_ids` is the prompt with expanded image placeholders, then the tokens of the answer that
    earlier attempts delivered; the first `num_prompt_tokens` are the prompt. `cache_salt` (32
    bytes) separates tenants in the prefix cache. `adapter` (a digest, empty for the base model)
    identifies the weights that made the KV; nothing loads adapters yet. A larger `priority` runs
    first. The first `num_history_tokens` precede the last user turn; 0 if that is unknown, and the
    sequence is not pruned. With `weighted_seconds`, it awaits the turn of its `cache_salt`.
    """

    key: Annotated[RequestKey, an.Flat()]
    token_ids: Annotated[tuple[int, ...], an.token_ids(1, an.MAX_TOKENS)]
    num_prompt_tokens: Annotated[int, Between(1, an.MAX_TOKENS)]
    sampling: SamplingParams
    items: Annotated[tuple[ImageItem, ...], an.count(0, an.MAX_ITEMS)] = ()
    cache_salt: Annotated[bytes, an.num_bytes(0, 32)] = b""
    adapter: Annotated[bytes, an.NotSent()] = b""
    priority: Annotated[int, Between(-an.MAX_PRIORITY, an.MAX_PRIORITY)] = 0
    num_history_tokens: Annotated[int, Between(0, an.MAX_TOKENS)] = 0
    weighted_seconds: Annotated[float, Between(0.0, an.MAX_WEIGHTED_SECONDS)] = 0.0

    @property
    def num_delivered_tokens(self) -> int:
        """Tokens of the answer that the client has; also the index of the next one."""
        return len(self.token_ids) - self.num_prompt_tokens


class Narrow(enum.StrEnum):
    """What is stored in few bits, beside the other modality in the wide type.

    `VISION` and `TEXT` are the modality in int8, and `VISION_KIVI4` is vision in 4 bits.
    """

    VISION = "vision"
    TEXT = "text"
    VISION_KIVI4 = "vision-kivi4"

    @property
    def is_grouped(self) -> bool:
        """Whether a narrow block is written when all its tokens are computed."""
        return self is Narrow.VISION_KIVI4


@dataclasses.dataclass(frozen=True, slots=True)
class KVLayout:
    """The memory layout of one KV block.

    The buffer is block-major `[num_blocks, layers, 2, kv_heads, block_size * head_dim]`, so that a
    block is contiguous. `inner` names the order inside the last axis (`slot-major`:
    `[block_size, head_dim]`; for int8 and float8, one float32 scale per slot follows). It never
    names a device, because prefill and decode may run on different kinds.

    With `narrow`, tokens of this modality are stored in int8 or 4 bits, in blocks with the same
    bytes as the wide ones of `block_size` tokens (`core.block_kinds`, `vlm_kernels.mixed_blocks`).
    `attends` is the mask that an unlisted family was found to have; None in listed ones.
    """

    model_revision: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    inner: str = "slot-major"
    narrow: Narrow | None = None
    attends: Attends | None = None

    @property
    def num_parts(self) -> int:
        """The tokens of a narrow block, divided by those of a wide one."""
        if not self.narrow:
            return 1
        return ITEMSIZE[self.dtype] * (2 if self.narrow.is_grouped else 1)

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's key, or value, of one head, including its scale.

        With `narrow`, those of a wide block's token: all blocks have the same bytes.
        """
        if self.narrow and self.narrow.is_grouped:
            # of 32 tokens in 4 bits, with two numbers of 16 bits for each 32 values
            num_ranges = -(-self.head_dim // KIVI_GROUP)
            return (self.head_dim + 8 * num_ranges) * ITEMSIZE[self.dtype]
        if self.narrow:
            return (self.head_dim + SCALE_BYTES["int8"]) * self.num_parts
        return self.head_dim * ITEMSIZE[self.dtype] + SCALE_BYTES.get(self.dtype, 0)

    @property
    def block_bytes(self) -> int:
        return self.token_bytes * self.block_size

    @property
    def token_bytes(self) -> int:
        """KV bytes of one token, all layers; with `narrow`, of a token in a wide block."""
        return 2 * self.num_layers * self.num_kv_heads * self.row_bytes

    @property
    def fingerprint(self) -> bytes:
        """16 bytes; two workers exchange blocks only if they are equal."""
        return _fingerprint("kv/1", self)


@dataclasses.dataclass(frozen=True, slots=True)
class EmbedLayout:
    """One row per visual token: `hidden_size` elements for the main embedding and each level."""

    model_revision: Annotated[str, an.text(an.MAX_TEXT)]
    hidden_size: Annotated[int, Between(1, an.MAX_TOKENS)]
    num_levels: Annotated[int, Between(0, an.MAX_ITEMS)]
    dtype: Annotated[str, an.text(an.MAX_LABEL)]

    @property
    def row_elements(self) -> int:
        """Elements of one visual token's row, all levels."""
        return self.hidden_size * (1 + self.num_levels)

    @property
    def row_bytes(self) -> int:
        """Bytes of one visual token's row."""
        return self.row_elements * ITEMSIZE[self.dtype]

    def row_bytes_of(self, reduction: Reduction | None) -> int:
        """Bytes of one row in a transfer: that of a reduced image is followed by its place."""
        return self.row_bytes + (PLACE_BYTES if reduction is not None else 0)

    @property
    def fingerprint(self) -> bytes:
        """16 bytes; equal on an encoder and its consumer."""
        return _fingerprint("embed/1", self)


PLACE_BYTES = 4
"""Row and column of a kept visual token, in cells: two int16, little-endian."""
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3fn": 1}
KIVI_GROUP = 32
"""Tokens of a block in 4 bits (KIVI, arXiv 2402.02750)."""
SCALE_BYTES = {"int8": 4, "float8_e4m3fn": 4}  # after the elements of a row of KV


def _fingerprint(tag: str, layout: KVLayout | EmbedLayout) -> bytes:
    values = {k: v for k, v in dataclasses.asdict(layout).items() if v is not None}
    fields = [tag, *(f"{k}={v}" for k, v in values.items())]
    framed = b"".join(len(f.encode()).to_bytes(4, "little") + f.encode() for f in fields)
    return hashlib.sha256(framed).digest()[:16]


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """Where a consumer fetches from; the gateway takes the address from its own pod watch."""

    address: Annotated[str, an.address()]
    boot_id: Annotated[bytes, an.num_bytes(16)]
    transfer_id: Annotated[str, an.identifier()]
    fingerprint: Annotated[bytes, an.num_bytes(0, 16)]


# The stages of TTFT (docs/glossary.md). At each instant one stage owns the time.
STAGES = (
    "gateway", "media", "encoder_queue", "encode", "embed_transfer", "decode_reserve",
    "prefill_queue", "prefill", "other",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class StageSpan:
    """A part of a request's time, in seconds from the arrival of the call."""

    stage: str
    start: Annotated[float, an.Ticks("start_us", 1_000_000), Between(0.0, an.MAX_SECONDS)]
    end: Annotated[float, an.Ticks("end_us", 1_000_000), Between(0.0, an.MAX_SECONDS)]
    item: Annotated[int, Between(0, an.MAX_ITEMS)] = 0


# ---- events from the engine to the caller ----


@dataclasses.dataclass(frozen=True, slots=True)
class BlocksReady:
    """KV of the first `num_blocks` blocks of the sequence is written and may be read."""

    num_blocks: int


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log-probabilities at one position of the answer: the chosen token and the best ones.

    They include biases and penalties, but not temperature and truncation. `top` holds
    (token id, log-probability), the best first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of a prompt's tokens from `first_index` on; its first token has none.

    They are of the model's own distribution. `ranks` are 1 if no token is likelier. `top_ids` and
    `top_logprobs` have the `num_top` likeliest of each token, the best first. float32 and uint32.
    """

    first_index: int
    logprobs: array[float]
    ranks: array[int]
    num_top: int
    top_ids: array[int]
    top_logprobs: array[float]


@dataclasses.dataclass(frozen=True, slots=True)
class TokenEvent:
    """Token number `index` of the answer; `logprobs` is set if the request asked for them."""

    index: int
    token_id: int
    num_cached_tokens: int = 0
    logprobs: TokenLogprobs | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class FinishedEvent:
    """The last event of an answer on this worker; `num_tokens` counts the whole answer."""

    reason: FinishReason
    num_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class FailedEvent:
    """The last event of a request that failed."""

    error: Exception


@dataclasses.dataclass(frozen=True, slots=True)
class ScheduledEvent:
    """The sequence left the queue and is computed for the first time.

    `at` is the time, in seconds on the engine's clock; the event arrives after that step.
    """

    at: float = 0.0


EngineEvent = (
    BlocksReady | PromptLogprobs | TokenEvent | FinishedEvent | FailedEvent | ScheduledEvent
)
NO_ROWS: Final = memoryview(b"")


@dataclasses.dataclass(frozen=True, slots=True)
class PreparedImage:
    """One decoded and preprocessed image, as input of the encoder.

    `patches` is float32 `[t*h*w, patch_dim]`, C-contiguous, in the order of the model's processor;
    an opaque buffer here. `image_key` and `num_tokens` are those of the whole image. A prompt gets
    its `kept_tokens`, as `reduction` says, under `kept_key`. `relevance` is uint16 `[R, C]` of its
    `cells`, in native order, if the method needs it and the pixels are known; else empty. `salt`
    separates tenants, as in `image_key`. If a client gave the embedding, `rows` has it as bytes,
    `[num_tokens, row_bytes]`, and there are no patches.
    """

    image_key: bytes
    grid_thw: tuple[int, int, int]
    num_tokens: int
    patches: memoryview
    reduction: Reduction | None = None
    relevance: bytes = b""
    salt: bytes = b""
    rows: memoryview = NO_ROWS

    @property
    def kept_key(self) -> bytes:
        """The content key of the embedding that a prompt gets."""
        return self.reduction.key(self.image_key) if self.reduction else self.image_key

    @property
    def kept_tokens(self) -> int:
        """Visual tokens that a prompt gets. Raises InvalidRequestError as `num_kept` does."""
        return num_kept(self.reduction, self.grid_thw, self.num_tokens)

    @property
    def is_approximate(self) -> bool:
        """Whether the encoder makes the kept embedding itself, without that of the whole image."""
        return self.reduction is not None and self.reduction.method.is_approximate

    @property
    def is_reduced_after(self) -> bool:
        """Whether its kept rows are chosen from the embedding of the whole image."""
        return self.reduction is not None and not self.is_approximate

    @property
    def encoded_tokens(self) -> int:
        """Visual tokens of which the encoder computes the patches, within 15.

        The tokens of the last window of an approximate reduction may be joined.
        """
        return self.kept_tokens if self.is_approximate else self.num_tokens

    @property
    def cells(self) -> Cells:
        """Rows and columns of the whole image's visual tokens."""
        return cells_of(self.grid_thw, self.num_tokens)
