"""What the simulated hardware can do: cost curves, KV memory, node types and their start-up."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from vlm_operator.names import Role


@dataclasses.dataclass(frozen=True)
class Curve:
    """Seconds = fixed + linear·units + square·squares, at speed 1 (state.Busy has the units)."""

    fixed: float
    linear: float
    square: float = 0.0

    def seconds(self, units: float, squares: float) -> float:
        """Of one call."""
        return self.fixed + self.linear * units + self.square * squares


@dataclasses.dataclass(frozen=True)
class NodeType:
    """The truth about one variant of one role, which the policy does not know.

    Attributes:
        nodes: replicas that there are nodes for; 0: its pods stay pending.
        schedule_seconds: from creation until a node is there.
        startup_seconds: median from the node to ready.
        startup_spread: sigma of the logarithm of that; beyond half and twice the median it is cut.
        kv_share: of the plant's `kv_tokens`.
    """

    nodes: int = 1000
    schedule_seconds: float = 2.0
    startup_seconds: float = 60.0
    startup_spread: float = 0.35
    kv_share: float = 1.0


@dataclasses.dataclass(frozen=True)
class Plant:
    """Everything physical, at speed 1. The defaults are a model of about 30 B on one device.

    Attributes:
        encode: of one batch of pictures; units are patches.
        encode_items: pictures of one batch at most.
        prefill: of one chunk; units are tokens.
        chunk_tokens, prompts_per_step: of one step of prefill at most.
        itl_base, itl_per_token: seconds between two tokens, and per KV token in use.
        kv_tokens: of one decode replica.
        kv_margin: share of KV that new requests leave free.
        tokens_per_patch: visual tokens.
        gateway_seconds: parsing and routing of one request.
        media_seconds: decoding of one picture.
        transfer_seconds: of one picture's embeddings.
        node_types: by role and variant; one that is missing is `NodeType()`.
    """

    encode: Curve = Curve(0.03, 1.1e-4, 6e-9)
    encode_items: int = 8
    prefill: Curve = Curve(0.010, 3.4e-4, 2e-8)
    chunk_tokens: int = 2048
    prompts_per_step: int = 256
    itl_base: float = 0.018
    itl_per_token: float = 8e-7
    kv_tokens: int = 24_000
    kv_margin: float = 0.05
    tokens_per_patch: float = 0.25
    gateway_seconds: float = 0.004
    media_seconds: float = 0.03
    transfer_seconds: float = 0.02
    node_types: Mapping[Role, Mapping[str, NodeType]] = dataclasses.field(default_factory=dict)

    def node_type(self, role: Role, variant: str) -> NodeType:
        """Return the truth about a variant."""
        return self.node_types.get(role, {}).get(variant, NodeType())

    def visual_tokens(self, patches: tuple[int, ...]) -> int:
        """Places that pictures take in a prompt."""
        return sum(max(1, round(count * self.tokens_per_patch)) for count in patches)
