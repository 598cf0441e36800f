"""The simulated hardware: cost curves, KV memory, node types and their start times."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from vlm_operator.names import Role


@dataclasses.dataclass(frozen=True)
class Curve:
    """Seconds = fixed + linear·units + square·squares, at speed 1; units: state.WorkCounters."""

    fixed: float
    linear: float
    square: float = 0.0

    def seconds(self, units: float, squares: float) -> float:
        """Return the duration of one call."""
        return self.fixed + self.linear * units + self.square * squares


@dataclasses.dataclass(frozen=True)
class NodeType:
    """Real properties of one variant of one role; the policy does not know them.

    Attributes:
        nodes: number of replicas that nodes exist for; if 0, pods stay pending.
        schedule_seconds: time from creation to scheduling.
        startup_seconds: median time from scheduling to ready.
        startup_spread: sigma of its logarithm; starts take half to twice the median.
        kv_share: share of the hardware's `kv_tokens`.
        gone_from, gone_until: seconds of the trace between which no pod is scheduled; scheduled
            pods are not affected.
    """

    nodes: int = 1000
    schedule_seconds: float = 2.0
    startup_seconds: float = 60.0
    startup_spread: float = 0.35
    kv_share: float = 1.0
    gone_from: float = 0.0
    gone_until: float = 0.0


@dataclasses.dataclass(frozen=True)
class Hardware:
    """Hardware at speed 1. The defaults are for a model of about 30 B on one device.

    Attributes:
        encode: cost of one batch of images; units are patches.
        encode_items: limit of images per batch.
        prefill: cost of one chunk; units are tokens.
        chunk_tokens, prompts_per_step: limits of tokens and prompts per prefill step.
        itl_base, itl_per_token: ITL in seconds without KV, and its increase per KV token in use.
        kv_tokens: KV capacity of one decode replica.
        kv_margin: share of KV that new requests leave free.
        tokens_per_patch: visual tokens per patch.
        gateway_seconds: time to parse and route one request.
        media_seconds: time until the images of a request are decoded.
        transfer_seconds: time to transfer the embeddings of a request.
        node_types: node types by role and variant; a missing one is `NodeType()`.
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
        """Return the node type of a variant."""
        return self.node_types.get(role, {}).get(variant, NodeType())

    def visual_tokens(self, patches: tuple[int, ...]) -> int:
        """Return the visual tokens of images, given the patches of each; at least 1 per image."""
        return sum(max(1, round(count * self.tokens_per_patch)) for count in patches)


@dataclasses.dataclass(frozen=True)
class Noise:
    """Noise of a run. All runs use the defaults; `QUIET` is for tests that compare with theory.

    Attributes:
        loss: share of reports that are lost.
        jitter: relative sigma of errors in reported queued work and KV in use.
        service: sigma of the logarithm of the duration of a batch or step.
        prediction: sigma of the logarithm of predicted over real work, common to a role. Each pod
            deviates from its role with half of this sigma.
        bias: additional factor of predicted over real work, for all pods.
    """

    loss: float = 0.05
    jitter: float = 0.05
    service: float = 0.1
    prediction: float = 0.2
    bias: float = 1.0


QUIET = Noise(loss=0.0, jitter=0.0, service=0.0, prediction=0.0)
