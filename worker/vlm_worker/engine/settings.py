"""What the engine is told once, and what it tells whenever asked."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping

from vlm_worker.core.adaptive import LimitReason
from vlm_worker.core.busy import Busy, Kind
from vlm_worker.core.histogram import Buckets
from vlm_worker.core.sequence import Lane
from vlm_worker.core.waves import AdmissionReason, AdmissionRules
from vlm_worker.types import Modality


class Bound(enum.StrEnum):
    """What was full when somebody was answered OverloadedError."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    IMAGES = "images"
    PIXELS = "pixels"
    UNREAD = "unread"
    EMBEDDINGS = "embeddings"
    UPLOADS = "uploads"
    IMAGE_MEMORY = "image_memory"


@dataclasses.dataclass(frozen=True, slots=True)
class EngineSettings:
    """Bounds of the engine.

    Attributes:
        max_model_len: tokens of the longest sequence, prompt and answer.
        eos_token_ids: tokens that end an answer unless the request ignores them.
        max_num_seqs: sequences that compute at the same time.
        max_num_batched_tokens: tokens of one step; at least `max_num_seqs`.
        max_encode_tokens: visual tokens of one encoder call; one larger picture still runs, alone.
        max_encode_tokens_decoding: the same while sequences decode: what a token may wait for.
        max_copy_bytes: what is written between two steps of what peers sent; one larger message is
            still written, alone. One transfer has as much under way, and is not slowed down by it.
        max_image_tokens: visual tokens of the largest picture that may come, which the embedding
            cache must have room for; None is `max_model_len`.
        max_waiting: sequences in the queue; beyond it a request is answered OverloadedError.
        max_waiting_tokens: tokens of all of them, those of pictures included; likewise.
        max_waiting_images: pictures in the encoder queue; likewise.
        max_waiting_pixels: pixels of all of them, as the encoder sees them; likewise. A queue that
            is empty takes in any one request, and any one call's pictures.
        admission: who of those that wait enters first.
        long_prefill_tokens: tokens of one prompt in a step while others can use the rest.
        target_step_seconds: how many sequences run at once follows from this; None: as many as
            there are rows.
        max_unread_percent: share of the KV blocks that prompts for peers may have until these have
            read them; beyond it they wait, and where so much is computed already, they are refused.
        watermark_percent: share of the KV blocks that admission leaves free for growth.
        whole_images: the family attends in both directions inside an image, so that a chunk of
            prefill never cuts one.
        embedding_cache_bytes: budget of the embedding cache's hot tier, on the runner's device;
            the embeddings that are queued or held for peers have no more than this, beyond it a
            call is answered OverloadedError.
        embedding_cold_cache_bytes: budget of its cold tier, in host memory; 0 is none, which is
            right where the device is a CPU: there the hot tier is host memory already.
        embedding_ttl_seconds: an embedding unused for so long is not served again.
        stuck_step_seconds: a step that takes longer makes the engine unhealthy.
        max_step_failures: so many failed steps in a row make the engine unhealthy.
        strict: a broken invariant stops the engine (tests) instead of being counted and logged.
    """

    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 1024
    max_encode_tokens: int = 2048
    max_encode_tokens_decoding: int = 512
    max_copy_bytes: int = 32 << 20
    max_image_tokens: int | None = None
    max_waiting: int = 256
    max_waiting_tokens: int = 1 << 20
    max_waiting_images: int = 256
    max_waiting_pixels: int = 1 << 26
    admission: AdmissionRules = dataclasses.field(default_factory=AdmissionRules)
    long_prefill_tokens: int | None = None
    target_step_seconds: float | None = None
    max_unread_percent: int = 50
    watermark_percent: int = 2
    whole_images: bool = False
    embedding_cache_bytes: int = 256 << 20
    embedding_cold_cache_bytes: int = 0
    embedding_ttl_seconds: float = 600.0
    stuck_step_seconds: float = 60.0
    max_step_failures: int = 3
    strict: bool = False

    def __post_init__(self) -> None:
        """Refuse bounds under which a request could wait for ever."""
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}): every running sequence decodes each step"
            )
        if self.whole_images and (self.max_image_tokens or 0) > self.min_prompt_tokens:
            raise ValueError(
                f"a picture of {self.max_image_tokens} tokens never fits into a step that may not "
                f"cut it: max_num_batched_tokens ({self.max_num_batched_tokens}) less max_num_seqs "
                f"({self.max_num_seqs}) is {self.min_prompt_tokens}"
            )

    @property
    def min_prompt_tokens(self) -> int:
        """Tokens of prompts that a step has room for, however many sequences decode in it."""
        return self.max_num_batched_tokens - self.max_num_seqs


@dataclasses.dataclass(frozen=True, slots=True)
class QueueStats:
    """Who waits, who was let in and who was not.

    Attributes:
        waiting: sequences by lane.
        waiting_tokens: their tokens.
        waiting_pixels: pixels of the pictures in the encoder queue.
        oldest_wait_seconds: since the arrival of the oldest sequence that waits.
        admitted: sequences that left the queue to run, by why it was their turn.
        refused: requests answered OverloadedError, by what was full.
        running_limit: sequences that may run at once now.
        running_limit_reason: why it is what it is.
    """

    waiting: Mapping[Lane, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(Lane, 0))
    waiting_tokens: int = 0
    waiting_pixels: int = 0
    oldest_wait_seconds: float = 0.0
    admitted: Mapping[AdmissionReason, int] = dataclasses.field(
        default_factory=lambda: dict.fromkeys(AdmissionReason, 0)
    )
    refused: Mapping[Bound, int] = dataclasses.field(
        default_factory=lambda: dict.fromkeys(Bound, 0)
    )
    running_limit: int = 0
    running_limit_reason: LimitReason = LimitReason.FIXED


@dataclasses.dataclass(frozen=True, slots=True)
class KVStats:
    """Tokens of KV by state; running + reserved + cached + free = capacity."""

    capacity_tokens: int = 0
    running_tokens: int = 0
    reserved_tokens: int = 0
    cached_tokens: int = 0
    free_tokens: int = 0
    queued_tokens: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class TierStats:
    """One tier of the embedding cache; `evictions` left it for want of room."""

    entries: int = 0
    bytes: int = 0
    capacity_bytes: int = 0
    hits: int = 0
    evictions: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class EncoderCacheStats:
    """The embedding cache, both tiers together and each.

    Attributes:
        entries, bytes: filled ones.
        hits: needs that found an embedding.
        joins: needs that found one in the making, and waited for it.
        misses: needs that found none.
        evictions: embeddings that went for want of room.
        expirations: those that nobody used for the time to live.
        demotions, promotions: from hot to cold, and back.
    """

    entries: int = 0
    bytes: int = 0
    hits: int = 0
    joins: int = 0
    misses: int = 0
    evictions: int = 0
    expirations: int = 0
    demotions: int = 0
    promotions: int = 0
    hot: TierStats = TierStats()
    cold: TierStats = TierStats()


@dataclasses.dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot by the engine thread; `/stats` and `/metrics` are made of it.

    `inflight` counts everything that still owes somebody something: sequences in any state,
    reservations, pictures in the encoder queue, pinned embeddings. An engine with 0 is empty.
    `prefix_cache_queries` and `_hits` count tokens of prompts, visual ones included, which are
    also counted apart; `prefix_cache_evictions` counts blocks.
    `held_embedding_bytes` are of embeddings that are queued or held for peers, of
    `max_held_embedding_bytes`.
    `busy` is what was computed, and how long it took.
    `kv_request_bytes` tells how much KV the answers that ended here had taken, by modality.
    """

    inflight: int = 0
    num_running: int = 0
    num_waiting: int = 0
    queue: QueueStats = QueueStats()
    num_waiting_images: int = 0
    num_held: int = 0
    num_reserved: int = 0
    num_pinned_embeddings: int = 0
    held_embedding_bytes: int = 0
    max_held_embedding_bytes: int = 0
    work_queued_seconds: float = 0.0
    work_admitted_seconds_total: float = 0.0
    kv: KVStats | None = None
    encoder_cache: EncoderCacheStats = EncoderCacheStats()
    requests: int = 0
    images: int = 0
    patches: int = 0
    visual_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    out_of_memory: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    prefix_cache_visual_queries: int = 0
    prefix_cache_visual_hits: int = 0
    prefix_cache_evictions: int = 0
    kv_request_bytes: tuple[tuple[Modality, Buckets], ...] = ()
    busy: Mapping[Kind, Busy] = dataclasses.field(default_factory=dict)
    steps: int = 0
    step_failures: int = 0
    invariant_violations: int = 0
