"""The engine's settings, and the statistics that it reports."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any, Final, TypeVar

from vlm_worker.core.admission_policy import AdmissionReason
from vlm_worker.core.limits import QueueLimit
from vlm_worker.core.measurements import Buckets, BusyTime, WorkKind
from vlm_worker.core.sequence import Lane
from vlm_worker.core.step_time import LimitReason
from vlm_worker.metrics import Value
from vlm_worker.settings import EncoderCacheSettings, QueueSettings
from vlm_worker.types import Modality

MAX_ENCODE_TOKENS: Final = 2048
"""Default visual tokens of one encoder call."""


@dataclasses.dataclass(frozen=True, slots=True)
class EngineSettings(QueueSettings, EncoderCacheSettings):
    """Settings and limits of the engine.

    Attributes:
        max_model_len: tokens of the longest sequence, prompt and answer.
        max_num_batched_tokens: tokens of one step; at least `max_num_seqs`.
        max_encode_tokens: visual tokens of one encoder call; one larger image still runs, alone.
        max_encode_tokens_decoding: the same while sequences decode, because tokens wait for it.
        max_copy_bytes: bytes received from peers that are written between two steps; one larger
            message is still written, alone. One transfer has as many bytes in flight, so that the
            limit does not slow it down.
        max_image_tokens: visual tokens of the largest possible image, which must fit into the
            encoder cache; None is `max_model_len`.
        max_unread_percent: share of the KV blocks for prompts that peers have not read yet. Beyond
            it, such prompts wait; if computed prompts alone fill it, new ones are refused.
        watermark_percent: share of the KV blocks that admission leaves free for growth.
        kv_visual_percent: share of the cached KV blocks that visual ones may have before the oldest
            visual one is evicted first (law K9 of `core.kv_cache`).
        kv_prune_text: share of the history's text, in permille, that keeps its KV after the prompt;
            0 prunes nothing (`core.pruning`).
        images_first: steps wait for images (`docs/decisions/0038`). Statistics of the queued work
            then count images alone.
        whole_images: attention inside an image is bidirectional in this family, so that a chunk of
            prefill never cuts an image.
        whole_prompts: the tokens of a prompt see each other both ways in this family, so that a
            step computes all of them.
        stuck_step_seconds: a step that takes longer makes the engine unhealthy.
        max_step_failures: this number of failed steps in a row makes the engine unhealthy.
        strict: a broken invariant stops the engine (tests) instead of being counted and logged.
    """

    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 1024
    max_encode_tokens: int = MAX_ENCODE_TOKENS
    max_encode_tokens_decoding: int = 512
    max_copy_bytes: int = 32 << 20
    max_image_tokens: int | None = None
    max_unread_percent: int = 50
    watermark_percent: int = 2
    kv_visual_percent: int = 100
    kv_prune_text: int = 0
    images_first: bool = False
    whole_images: bool = False
    whole_prompts: bool = False
    stuck_step_seconds: float = 60.0
    max_step_failures: int = 3
    strict: bool = False

    def __post_init__(self) -> None:
        """Reject settings under which a request could wait forever, or a pin outlast its entry."""
        EncoderCacheSettings.__post_init__(self)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}): every running sequence decodes each step"
            )
        if self.whole_images and (self.max_image_tokens or 0) > self.min_prompt_tokens:
            raise ValueError(
                f"an image of {self.max_image_tokens} tokens never fits into a step that may not "
                f"cut it: max_num_batched_tokens ({self.max_num_batched_tokens}) less max_num_seqs "
                f"({self.max_num_seqs}) is {self.min_prompt_tokens}"
            )

    @property
    def min_prompt_tokens(self) -> int:
        """Prompt tokens that always fit into a step, even if all sequences decode in it."""
        return self.max_num_batched_tokens - self.max_num_seqs

    @property
    def prompt_bounds(self) -> dict[str, Any]:
        """The bounds of `validate_request`; None is no bound."""
        return {
            "max_model_len": self.max_model_len,
            "max_image_tokens": self.min_prompt_tokens if self.whole_images else None,
            "max_prompt_tokens": self.min_prompt_tokens if self.whole_prompts else None,
        }


K = TypeVar("K", bound=enum.Enum)


def _zeros(kinds: type[K]) -> Mapping[K, int]:
    return dataclasses.field(default_factory=lambda: dict.fromkeys(kinds, 0))


@dataclasses.dataclass(frozen=True, slots=True)
class QueueStats:
    """Statistics of the queue: waiting, admitted and refused sequences, and the running limit."""

    waiting: Mapping[Lane, int] = _zeros(Lane)
    waiting_tokens: int = 0
    oldest_wait_seconds: float = 0.0
    admitted: Mapping[AdmissionReason, int] = _zeros(AdmissionReason)
    refused: Mapping[QueueLimit, int] = _zeros(QueueLimit)
    running_limit: int = 0
    running_limit_reason: LimitReason = LimitReason.FIXED


@dataclasses.dataclass(frozen=True, slots=True)
class KVStats:
    """Tokens of KV by state; running + reserved + cached + free = capacity.

    `visual_cached_tokens` are in visual blocks (`core.kv_cache`) without a user, also those that a
    reservation counts. `text_evictions` and `visual_evictions` count cached blocks.
    """

    capacity_tokens: int = 0
    running_tokens: int = 0
    reserved_tokens: int = 0
    cached_tokens: int = 0
    free_tokens: int = 0
    queued_tokens: int = 0
    visual_cached_tokens: int = 0
    text_evictions: int = 0
    visual_evictions: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class TierStats:
    """One tier of the encoder cache; `evictions` counts entries that left it for lack of space."""

    entries: int = 0
    bytes: int = 0
    capacity_bytes: int = 0
    hits: int = 0
    evictions: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class DiskStats:
    """The disk tier of the encoder cache; all 0 without one.

    `dropped_writes` are embeddings that were not written, because writes were slower than
    evictions. `read_errors` are reads after which the image was encoded.
    """

    entries: int = 0
    bytes: int = 0
    capacity_bytes: int = 0
    hits: int = 0
    evictions: int = 0
    expirations: int = 0
    writes: int = 0
    dropped_writes: int = 0
    write_errors: int = 0
    read_errors: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class EncoderCacheStats:
    """Statistics of the encoder cache: both tiers of memory together, each, and the disk.

    `hits` counts all three tiers. `joins` are lookups that found an embedding that was being
    encoded or read. `demotions` and `promotions` are moves from hot to cold, and back.
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
    disk: DiskStats = DiskStats()


@dataclasses.dataclass(frozen=True, slots=True)
class SessionPinStats:
    """Session pins of memory and disk, by tier (`memory`, `disk`); dropped ones by reason."""

    entries: Mapping[str, int]
    bytes: Mapping[str, int]
    dropped: Mapping[str, int]


@dataclasses.dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot by the engine thread: what decisions read, and `counters` for all others.

    `inflight` counts all unfinished work: sequences in any state, reservations, images in the
    encoder queue, pinned embeddings. An engine with 0 is empty. `held_embedding_bytes` counts the
    embeddings that are queued or held for peers; its limit is `max_held_embedding_bytes`. `busy` is
    the computed work and its duration. `kv_request_bytes` are histograms of the KV bytes of ended
    answers, by modality. `num_unencoded_images` counts the queued images and those of the current
    batch. `lent_queued_seconds` is the queued work of prompts if images go first, else 0.
    `session_pins` is None if the settings allow none.
    """

    inflight: int = 0
    num_running: int = 0
    num_waiting: int = 0
    queue: QueueStats = QueueStats()
    num_waiting_images: int = 0
    num_unencoded_images: int = 0
    num_held: int = 0
    num_pinned_embeddings: int = 0
    held_embedding_bytes: int = 0
    max_held_embedding_bytes: int = 0
    work_queued_seconds: float = 0.0
    lent_queued_seconds: float = 0.0
    work_admitted_seconds_total: float = 0.0
    kv: KVStats | None = None
    encoder_cache: EncoderCacheStats = EncoderCacheStats()
    session_pins: SessionPinStats | None = None
    requests: int = 0
    kv_request_bytes: tuple[tuple[Modality, Buckets], ...] = ()
    busy: Mapping[WorkKind, BusyTime] = dataclasses.field(default_factory=dict)
    invariant_violations: int = 0
    counters: Mapping[str, Value] = dataclasses.field(default_factory=dict)

    def count(self, key: str) -> float:
        """A counter by its key in `/stats` or its name: the sum over its label, 0 if unknown."""
        value = self.counters.get(key) or 0
        return sum(value.values()) if isinstance(value, Mapping) else value
