"""Times of encoding, prefill and decode steps, from peak speeds and an efficiency. Pure.

    seconds = 1 ms per call
            + max(operations / (peak · compute share), bytes / (bandwidth · bandwidth share))

Nobody measured these times: they are a roofline with assumed shares, and the report says so.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Final

from vlm_cli.plan import capacity
from vlm_cli.plan.facts import ModelFacts, Vision
from vlm_cli.plan.fields import PlanError
from vlm_cli.plan.images import ImageCount
from vlm_operator.api import quantity

# Dense bfloat16 TFLOP/s and GB/s of the vendors' data sheets; SXM where there are several.
DEVICES: Final = {
    "b200": (2250.0, 8000.0),
    "h200": (989.0, 4800.0),
    "h100": (989.0, 3350.0),
    "a100": (312.0, 2039.0),
    "l40s": (362.0, 864.0),
    "a10": (125.0, 600.0),
    "a10g": (70.0, 600.0),
    "l4": (121.0, 300.0),
    "rtx4090": (165.0, 1008.0),
}
COMPUTE_SHARE: Final = 0.45
BANDWIDTH_SHARE: Final = 0.65
CALL_SECONDS: Final = 0.001
"""Assumed: launches and scheduling of one step or one encoder call."""
_CUSTOM = re.compile(r"([0-9.]+):([0-9.]+)(?::(\w+))?")


@dataclasses.dataclass(frozen=True)
class Device:
    """Peak speeds of one device.

    Attributes:
        teraflops: dense operations in bfloat16, 10¹² per second.
        gigabytes: memory bandwidth, 10⁹ bytes per second.
        memory: bytes, if the user gave them here; else None.
    """

    name: str
    teraflops: float
    gigabytes: float
    memory: int | None = None


def parse_device(text: str) -> Device:
    """Return the device of `NAME`, or of `TFLOPS:GBPS[:MEMORY]`.

    Raises:
        PlanError: the name is unknown, or a number is not above 0.
    """
    if text in DEVICES:
        return Device(text, *DEVICES[text])
    found = _CUSTOM.fullmatch(text)
    try:
        if found is not None:
            memory = None if found[3] is None else int(quantity.parse(found[3]))
            device = Device(text, float(found[1]), float(found[2]), memory)
            if device.teraflops > 0 and device.gigabytes > 0:
                return device
    except ValueError:
        pass
    raise PlanError(
        f"--device: {text!r} is unknown; write TFLOPS:GBPS[:MEMORY], as 362:864:48Gi, "
        f"or one of {', '.join(DEVICES)}"
    )


def guess_device(words: Iterable[str]) -> Device | None:
    """Return the known device whose name is a part of one of `words`, such as `nvidia-l40s`."""
    parts = {part for word in words for part in re.split(r"[^a-z0-9]+", word.lower())}
    return next((Device(name, *DEVICES[name]) for name in DEVICES if name in parts), None)


@dataclasses.dataclass(frozen=True)
class Speed:
    """A device with the shares of its peaks that are reached."""

    device: Device
    compute_share: float = COMPUTE_SHARE
    bandwidth_share: float = BANDWIDTH_SHARE

    def seconds(self, *, operations: float, num_bytes: float, num_calls: int = 1) -> float:
        """Return the time of `num_calls` steps or encoder calls, bound by compute or bandwidth."""
        return num_calls * CALL_SECONDS + max(
            operations / (self.device.teraflops * 1e12 * self.compute_share),
            num_bytes / (self.device.gigabytes * 1e9 * self.bandwidth_share),
        )


def encode_seconds(
    facts: ModelFacts, images: Sequence[ImageCount], speed: Speed, *, weights: str = "auto"
) -> float:
    """Return the time to encode the images of one request."""
    if not images:
        return 0.0
    operations = sum(encode_operations(facts, image) for image in images)
    loaded = capacity.encoder_weights_bytes(facts, weights)
    return speed.seconds(operations=operations, num_bytes=loaded * len(images))


def encode_operations(facts: ModelFacts, image: ImageCount) -> float:
    """Return the operations of tower and projector: 2 per weight and row, and the attention."""
    rows = image.num_patches + facts.vision.num_extra
    per_row = facts.encoder.num_weights + facts.vision.patch_weights
    projected = 2 * facts.projector.num_weights * image.num_tokens
    return 2 * per_row * rows + _vision_attention(facts.vision, rows) + projected


def prefill_seconds(
    facts: ModelFacts, num_tokens: int, speed: Speed, *, weights: str = "auto"
) -> float:
    """Return the time to compute a prompt of `num_tokens` tokens."""
    if num_tokens < 1:
        return 0.0
    num_chunks = -(-num_tokens // capacity.STEP_TOKENS)
    return speed.seconds(
        operations=prefill_operations(facts, num_tokens),
        num_bytes=num_chunks * capacity.step_weights_bytes(facts, weights),
        num_calls=num_chunks,
    )


def prefill_operations(facts: ModelFacts, num_tokens: int) -> float:
    """Return the operations of a prompt: 2 per weight and token, attention, one row of logits."""
    width = facts.num_heads * facts.head_dim
    window = min(num_tokens, facts.sliding_window)
    num_full = facts.num_layers - facts.num_sliding_layers
    # each token sees half of the prompt in the mean; in a sliding layer at most the window
    pairs: float = num_full * num_tokens**2 / 2
    pairs += facts.num_sliding_layers * (num_tokens * window - window**2 / 2)
    return 2 * facts.layers.num_weights * num_tokens + 4 * width * pairs + _logits(facts)


@dataclasses.dataclass(frozen=True)
class StepCost:
    """What a decode step reads and computes: weights once, the rest for each sequence."""

    weights_bytes: float
    kv_bytes: float
    operations: float

    def seconds(self, num_running: float, speed: Speed) -> float:
        """Return the time of a step of `num_running` sequences."""
        return speed.seconds(
            operations=num_running * self.operations,
            num_bytes=self.weights_bytes + num_running * self.kv_bytes,
        )


def step_cost(
    facts: ModelFacts, *, context: float, weights: str, kv_dtype: str, visual_share: float = 0.0
) -> StepCost:
    """Return the cost of a decode step of sequences of `context` tokens."""
    attention = 4 * facts.num_heads * facts.head_dim * facts.num_layers * context
    return StepCost(
        weights_bytes=capacity.step_weights_bytes(facts, weights),
        kv_bytes=capacity.kv_read_bytes(facts, kv_dtype, context, visual_share),
        operations=2 * facts.layers.num_weights + _logits(facts) + attention,
    )


def _logits(facts: ModelFacts) -> float:
    return 2 * facts.head.num_weights


def _vision_attention(vision: Vision, rows: int) -> float:
    windowed = vision.num_layers - vision.num_full_layers
    pairs = vision.num_full_layers * rows**2 + windowed * rows * min(rows, vision.window_patches)
    return 4 * vision.width * pairs
