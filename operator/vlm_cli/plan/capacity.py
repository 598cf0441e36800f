"""Bytes: KV per token, weights per stage, memory of a device, transfers. Pure.

    memory of a device = runtime + weights + activations + encoder cache + KV (+ what stays unused)

Overhead is counted once and never multiplies the KV: the number of KV blocks is fixed at start.
tests/contracts/test_plan.py compares these numbers with the worker's.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from typing import Final

from vlm_cli.plan.facts import ITEM_BYTES, Linear, ModelFacts, Part
from vlm_cli.plan.fields import PlanError
from vlm_cli.plan.images import largest
from vlm_operator.api.pool import LENT_KV_PERCENT
from vlm_operator.names import Role

KV_ITEM_BYTES: Final = {**ITEM_BYTES, "int8": 1, "fp8": 1}
KV_SCALE_BYTES: Final = {"int8": 4, "fp8": 4}
"""A float32 scale after each key and each value of a token and head."""
MIXED_KV: Final = ("vision=int8", "text=int8", "vision=kivi4")
"""Types of the KV of one modality; the other one has that of the activations."""

INT4_GROUPS: Final = (128, 32)
SCALE_BYTES: Final = 4

RUNTIME_BYTES: Final = 1 << 30
"""Assumed: driver context, libraries and fragmentation of one process on one device."""
ENCODER_CACHE_BYTES: Final = 256 << 20
"""The worker's default of --embedding-cache-bytes, on the device."""
KV_PERCENT: Final = 90
"""The worker's default share for KV, of the memory that is left after loading."""
STEP_TOKENS: Final = 2048
"""The worker's default of --max-batched-tokens, and the tokens of one call of the tower."""
STEP_ROWS: Final = 256
"""The worker's default of --max-requests."""
FLOAT_BYTES: Final = 4

BLOCK_TOKENS_CPU: Final = 64
BLOCK_TOKENS_ACCELERATOR: Final = 16
BLOCK_TOKENS_KIVI4: Final = 32


def kv_token_bytes(facts: ModelFacts, kv_dtype: str, visual_share: float = 0.0) -> int:
    """Return the KV bytes of one token; with types by modality, in the mean, rounded up.

    All layers count, sliding ones too: the worker keeps all tokens of every layer.

    Args:
        facts: of the model.
        kv_dtype: as the worker's --kv-dtype, without `auto`.
        visual_share: of the tokens that are visual.
    """
    if kv_dtype not in MIXED_KV:
        return facts.num_layers * _kv_layer_bytes(facts, kv_dtype)
    kinds = kivi4_token_bytes(facts) if kv_dtype == "vision=kivi4" else mixed_kv_token_bytes(facts)
    if kinds is None:
        raise PlanError(f"--kv-dtype: {kv_dtype} is not built for this model in {facts.dtype}")
    narrow, wide = kinds
    share = 1 - visual_share if kv_dtype == "text=int8" else visual_share
    return math.ceil(share * narrow + (1 - share) * wide)


def mixed_kv_token_bytes(facts: ModelFacts) -> tuple[int, int] | None:
    """Return the KV bytes of a token in int8 and of another one, if one modality is in int8.

    A block of the other type has the bytes of one in int8, scales included, and fewer tokens. None
    if the worker has no such cache beside the dtype.
    """
    if facts.dtype not in ("bfloat16", "float32"):
        return None
    narrow = kv_token_bytes(facts, "int8")
    return narrow, narrow * facts.item_bytes


def kivi4_token_bytes(facts: ModelFacts) -> tuple[int, int] | None:
    """Return the KV bytes of a visual token in 4 bits and of a text token beside it.

    A block has 32 visual tokens, with a scale and a minimum of 16 bits for each 32 numbers, or the
    text tokens that fit. None if the worker has no such cache.
    """
    if facts.dtype not in ("bfloat16", "float32") or facts.head_dim % 2:
        return None
    heads = 2 * facts.num_layers * facts.num_kv_heads
    narrow = heads * (facts.head_dim // 2 + 4 * -(-facts.head_dim // 32))
    return narrow, narrow * 2 * facts.item_bytes


def kv_read_bytes(
    facts: ModelFacts, kv_dtype: str, num_tokens: float, visual_share: float = 0.0
) -> float:
    """Return the KV bytes that one step reads for a sequence of `num_tokens` tokens."""
    num_full = facts.num_layers - facts.num_sliding_layers
    seen = min(num_tokens, facts.sliding_window)
    layer_bytes = kv_token_bytes(facts, kv_dtype, visual_share) / facts.num_layers
    return layer_bytes * (num_full * num_tokens + facts.num_sliding_layers * seen)


def embedding_bytes(facts: ModelFacts, num_visual_tokens: int) -> int:
    """Return the bytes from encoder to prefill: a row of the hidden size per visual token."""
    return num_visual_tokens * facts.hidden_size * facts.item_bytes


def handoff_bytes(
    facts: ModelFacts,
    kv_dtype: str,
    num_tokens: int,
    *,
    block_size: int,
    visual_share: float = 0.0,
) -> int:
    """Return the bytes from prefill to decode: the whole KV blocks of the prompt."""
    token_bytes = kv_token_bytes(facts, kv_dtype, visual_share)
    return num_blocks(num_tokens, block_size) * block_size * token_bytes


def num_blocks(num_tokens: int, block_size: int) -> int:
    return math.ceil(num_tokens / block_size)


def concurrency(kv_bytes: int, num_tokens: int, *, token_bytes: int, block_size: int) -> int:
    """Return how many sequences of `num_tokens` tokens a KV cache holds.

    One block is the worker's null block.
    """
    blocks = kv_bytes // (token_bytes * block_size) - 1
    return max(0, blocks // num_blocks(num_tokens, block_size))


def weights_bytes(facts: ModelFacts, stages: Collection[Role], weights: str) -> int:
    """Return the bytes of the weights that a pod with `stages` loads.

    Args:
        facts: of the model.
        stages: of the pod. The encoder loads tower and projector; prefill and decode load layers,
            table and head.
        weights: as the worker's --weights.
    """
    num_bytes = 0
    if Role.ENCODER in stages:
        num_bytes += encoder_weights_bytes(facts, weights)
    if Role.PREFILL in stages or Role.DECODE in stages:
        num_bytes += step_weights_bytes(facts, weights)
        if not facts.is_head_tied:
            num_bytes += facts.table.num_parameters * facts.item_bytes
    return num_bytes


def encoder_weights_bytes(facts: ModelFacts, weights: str) -> int:
    """Return the bytes of tower and projector."""
    tower = _part_bytes(facts, facts.encoder, facts.rounding("encoder", weights))
    return tower + _part_bytes(facts, facts.projector, facts.rounding("merger", weights))


def step_weights_bytes(facts: ModelFacts, weights: str) -> int:
    """Return the bytes of the weights that every decode step reads: layers and head."""
    layers = _part_bytes(facts, facts.layers, facts.rounding("layers", weights))
    return layers + _part_bytes(facts, facts.head, facts.rounding("head", weights))


def activation_bytes(facts: ModelFacts, stages: Collection[Role]) -> int:
    """Estimate the temporary bytes of one step and one call of the tower, as the worker does."""
    num_bytes = 0
    if Role.ENCODER in stages:
        most = largest(facts.sizing)
        per_token = math.ceil(most.num_patches / most.num_tokens)
        num_patches = max(most.num_patches, STEP_TOKENS * per_token)
        row = 8 * facts.vision.width + 3 * facts.vision.inner
        inputs = 2 * FLOAT_BYTES * facts.sizing.patch_values
        num_bytes += num_patches * (inputs + row * facts.item_bytes)
    if Role.PREFILL in stages or Role.DECODE in stages:
        heads = (facts.num_heads + 2 * facts.num_kv_heads) * facts.head_dim
        row = 4 * facts.hidden_size + 2 * heads + 3 * facts.inner
        logits = STEP_ROWS * facts.vocab_size * (facts.item_bytes + 2 * FLOAT_BYTES)
        num_bytes += STEP_TOKENS * row * facts.item_bytes + logits
    return num_bytes


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """The bytes of one device by use; `kv` is 0 if the rest does not fit, or no stage has KV."""

    total: int
    runtime: int
    weights: int
    activations: int
    encoder_cache: int
    kv: int

    @property
    def missing(self) -> int:
        """Bytes by which the device is too small, without any KV."""
        fixed = self.runtime + self.weights + self.activations + self.encoder_cache
        return max(0, fixed - self.total)


def device_memory(
    facts: ModelFacts, stages: Collection[Role], total: int, *, weights: str
) -> DeviceMemory:
    """Divide the memory of one device of `total` bytes.

    KV gets the worker's default share of what is left after loading, less if activations and
    encoder cache need more than the rest. It is a whole number of MiB.
    """
    has_kv = Role.PREFILL in stages or Role.DECODE in stages
    loaded = weights_bytes(facts, stages, weights)
    activations = activation_bytes(facts, stages)
    cache = 0 if set(stages) == {Role.DECODE} else ENCODER_CACHE_BYTES
    left = total - RUNTIME_BYTES - loaded
    kv = max(0, min(left * KV_PERCENT // 100, left - activations - cache)) if has_kv else 0
    return DeviceMemory(
        total=total,
        runtime=RUNTIME_BYTES,
        weights=loaded,
        activations=activations,
        encoder_cache=cache,
        kv=kv >> 20 << 20,
    )


def lent_kv_bytes(memory: DeviceMemory) -> int:
    """Return the most KV bytes of an encoder that lends, on a device divided for all stages."""
    left = memory.total - memory.runtime - memory.weights
    return max(0, min(memory.kv, left * LENT_KV_PERCENT // 100)) >> 20 << 20


def block_size_of(*, has_accelerator: bool, kv_dtype: str = "") -> int:
    """Return the operator's default of `blockSizeTokens`."""
    if kv_dtype == "vision=kivi4":
        return BLOCK_TOKENS_KIVI4
    return BLOCK_TOKENS_ACCELERATOR if has_accelerator else BLOCK_TOKENS_CPU


def _kv_layer_bytes(facts: ModelFacts, kv_dtype: str) -> int:
    """Return the bytes of one token's keys and values in one layer."""
    row = facts.head_dim * KV_ITEM_BYTES[kv_dtype] + KV_SCALE_BYTES.get(kv_dtype, 0)
    return 2 * facts.num_kv_heads * row


def _part_bytes(facts: ModelFacts, part: Part, weights: str) -> int:
    if weights == "auto":
        return part.num_parameters * facts.item_bytes
    others = part.num_others + sum(linear.num_biases for linear in part.linears)
    rounded = sum(_rounded_bytes(linear, weights) for linear in part.linears)
    return rounded + others * facts.item_bytes


def _rounded_bytes(linear: Linear, weights: str) -> int:
    """Return the bytes of rounded matrices with float32 scales.

    int8 has a scale per output. int4 has one per output and group of inputs; if no group divides
    the inputs, the matrix gets int8.
    """
    group = next((size for size in INT4_GROUPS if linear.num_inputs % size == 0), None)
    if weights == "int8" or group is None:
        return linear.num_weights + SCALE_BYTES * linear.count * linear.num_outputs
    return linear.num_weights // 2 + SCALE_BYTES * linear.num_weights // group
