"""The pods of one role: `spec.pools.encoder`, `.prefill`, `.decode`."""

from __future__ import annotations

from typing import ClassVar

from vlm_operator.api.base import (
    Bytes,
    CountOrPercent,
    ImageName,
    Model,
    Restarts,
    Rule,
    field,
    not_built,
)
from vlm_operator.api.engine import Engine
from vlm_operator.api.enums import DisruptionPolicy, Topology
from vlm_operator.api.placement import Variant
from vlm_operator.api.pod_template import PodTemplate
from vlm_operator.api.scaling import Scaling
from vlm_operator.names import POOL_ROLES, Role


class Parallelism(Model):
    """The distribution of one replica over devices."""

    tensor: int = field(1, "Devices that share each layer.", example=1, ge=1, le=16)

    rules: ClassVar[tuple[Rule, ...]] = (
        not_built(
            "tensor-parallel",
            "!has(self.tensor) || self.tensor == 1",
            "tensor parallelism",
            at=".tensor",
            instead="set 1 or leave it out",
        ),
    )


class KvCache(Model):
    """The KV cache and its prefix cache."""

    memory_percent: int | None = field(
        None,
        "Share of the device's memory (CPU: of the limit), in percent.",
        example=80,
        unset="the worker's own measure",
        ge=1,
        le=95,
    )
    memory: Bytes | None = field(None, "Bytes of KV cache, instead of a share.", example="8Gi")
    reserve_percent: int | None = field(
        None,
        "KV blocks that new requests must leave free, in percent.",
        example=5,
        unset="the worker's own",
        ge=0,
        le=50,
    )
    visual_percent: int | None = field(
        None,
        "Share of the cached KV blocks that images may have, in percent. "
        "Beyond it, their oldest block is evicted first.",
        example=50,
        unset="100: by last use alone",
        ge=0,
        le=100,
    )
    prune_text: int | None = field(
        None,
        "Share of the text of earlier turns that keeps its KV, in permille. Decode pool only.",
        example=700,
        unset="nothing is pruned",
        ge=1,
        le=1000,
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            name="kv-memory",
            holds="!(has(self.memoryPercent) && has(self.memory))",
            message="set memoryPercent or memory, not both",
            at=".memory",
        ),
        Rule(
            name="kv-memory-some",
            holds="!has(self.memory) || !isQuantity(string(self.memory)) || "
            "!quantity(string(self.memory)).isLessThan(quantity('1'))",
            message="must be at least 1 byte: write a size, as 8Gi, or remove it",
            at=".memory",
        ),
    )


class EmbeddingDisk(Model):
    """A disk for embeddings that leave memory: an emptyDir, which ends with the pod."""

    size: Bytes = field(
        ...,
        "Size of the emptyDir, and the request for ephemeral storage. Files take 90 % of it.",
        example="10Gi",
    )
    max_age_seconds: int = field(
        86400,
        "Age at which a file is deleted, in seconds since it was written.",
        example=3600,
        ge=60,
        le=2592000,
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            name="disk-size-some",
            holds="!isQuantity(string(self.size)) || "
            "!quantity(string(self.size)).isLessThan(quantity('1Gi'))",
            message="must be at least 1Gi, which is some hundred images: write a size, as 10Gi",
            at=".size",
        ),
    )


class EncoderCache(Model):
    """The cache of embeddings in a pool that encodes."""

    disk: EmbeddingDisk | None = field(
        None, "Keeps the embeddings that leave memory.", unset="none is kept"
    )
    session_pin_seconds: int | None = field(
        None,
        "Time after its last use for which an image of a chat with prompt_cache_key is evicted "
        "after others.",
        example=300,
        unset="0: never",
        ge=0,
        le=600,
    )


class Drain(Model):
    """The drain of a pool's pods."""

    timeout_seconds: int = field(
        600, "Seconds that a pod has to finish its requests.", example=120, ge=1, le=86400
    )
    max_concurrent: int = field(1, "Pods that drain at once.", example=2, ge=1, le=100)


class Disruption(Model):
    """The limits of voluntary disruptions, such as node drains."""

    policy: DisruptionPolicy = field(
        DisruptionPolicy.AUTO,
        "Auto keeps a PodDisruptionBudget from two replicas on.",
        example="None",
    )
    max_unavailable: CountOrPercent | None = field(
        None,
        "Maximum number or percentage of pods that are evicted at once.",
        example="20%",
        unset="a fifth of the ready pods, at least 1",
    )


class PoolRollout(Model):
    """The limits of a rollout in one pool."""

    max_surge: CountOrPercent | None = field(
        None, "Maximum number of pods above the desired number.", example="1", unset="1"
    )
    max_unavailable: CountOrPercent | None = field(
        None, "Maximum number of pods below the desired number.", example="0", unset="0"
    )
    min_ready_seconds: int = field(
        0, "Seconds a pod must stay ready before it counts.", example=10, ge=0, le=3600
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            name="rollout-moves",
            holds="!has(self.maxSurge) || !has(self.maxUnavailable) || "
            "!(string(self.maxSurge) in ['0', '0%'] && "
            "string(self.maxUnavailable) in ['0', '0%'])",
            message="nothing can be replaced: maxSurge or maxUnavailable must be above 0",
            at=".maxSurge",
        ),
    )


_VARIANTS_HOLD = "self.variants.map(v, v.maxReplicas).sum()"
_LEAST = (
    "(has(self.scaling.replicas) ? self.scaling.replicas : "
    "has(self.scaling.minReplicas) ? self.scaling.minReplicas : 0)"
)


class Pool(Model):
    """The pods of one role."""

    image: ImageName | None = field(
        None,
        "Worker image of this pool.",
        example="ghcr.io/me/vlm-worker:1.0",
        unset="spec.image",
        restarts=Restarts.PODS,
    )
    parallelism: Parallelism = field(
        Parallelism(), "Devices of one replica.", restarts=Restarts.PODS
    )
    variants: list[Variant] = field(
        [],
        "The node types of this pool. Default: one, named `default`, on any node.",
        restarts=Restarts.PODS,
        keys="name",
        min_length=1,
        max_length=4,
        validate_default=False,
    )
    scaling: Scaling = field(
        ..., "The number of replicas, and how it is decided.", restarts=Restarts.NONE
    )
    kv: KvCache | None = field(
        None,
        "The KV cache; for an encoder, see maxLentRequests.",
        restarts=Restarts.PODS,
    )
    encoder_cache: EncoderCache | None = field(
        None, "The cache of embeddings; in pools that encode only.", restarts=Restarts.PODS
    )
    drain: Drain = field(Drain(), "How pods end.", restarts=Restarts.NONE)
    disruption: Disruption = field(
        Disruption(), "Limits for evictions, such as by a node drain.", restarts=Restarts.NONE
    )
    rollout: PoolRollout = field(PoolRollout(), "How pods are replaced.", restarts=Restarts.NONE)
    encode_inline: bool = field(
        False,
        "Whether this pool encodes images too, in addition to the encoder pool.",
        example=True,
        restarts=Restarts.PODS,
    )
    max_lent_requests: int = field(
        0,
        "Text-only requests that an encoder pod without images answers at once.",
        example=8,
        restarts=Restarts.PODS,
        ge=0,
        le=64,
    )
    engine: Engine = field(
        Engine(),
        "Additions to the command line and environment of the workers.",
        restarts=Restarts.PODS,
    )
    pod_template: PodTemplate = field(
        PodTemplate(), "Changes to the pod template.", restarts=Restarts.PODS
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            name="variants-hold-min",
            holds="!has(self.variants) || self.variants.exists(v, !has(v.maxReplicas)) || "
            f"{_VARIANTS_HOLD} >= {_LEAST}",
            message="the variants' maxReplicas add up to less than scaling asks for at least",
            says="'maxReplicas of all variants (%d) is less than scaling asks for at least'"
            f".format([{_VARIANTS_HOLD}])",
            at=".variants",
        ),
    )


def _encodes(role: str) -> str:
    """Return CEL that is true if the pool of `role` also encodes images."""
    return f"(has(self.{role}.encodeInline) && self.{role}.encodeInline)"


def _lends(role: str) -> str:
    """Return CEL that is true if pods of `role` answer text-only requests."""
    return f"(has(self.{role}.maxLentRequests) && self.{role}.maxLentRequests > 0)"


def _prunes(role: str) -> str:
    """Return CEL that is true if the pool of `role` prunes KV."""
    return f"(has(self.{role}.kv) && has(self.{role}.kv.pruneText))"


LENT_KV_PERCENT = 30
"""Maximum share for the KV of an encoder that lends: images keep the rest."""
_LENT_KV = "self.encoder.kv.memoryPercent"


class Pools(Model):
    """One pool per role. If a stage has no pool, the pool of the next role runs it."""

    encoder: Pool | None = field(
        None,
        "Computes embeddings of images. Compute-bound; inexpensive nodes suffice.",
        unset="the next role encodes",
        restarts=Restarts.PODS,
    )
    prefill: Pool | None = field(
        None,
        "Computes the KV blocks of a prompt and the first token. Compute-bound.",
        unset="decode prefills",
        restarts=Restarts.PODS,
    )
    decode: Pool = field(
        ..., "Computes the further tokens. Bound by memory bandwidth.", restarts=Restarts.PODS
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            name="encoder-kv",
            holds=f"!has(self.encoder) || !has(self.encoder.kv) || {_lends('encoder')}",
            message="an encoder pool has no KV cache: remove kv or set maxLentRequests",
            at=".encoder.kv",
        ),
        Rule(
            name="lent-kv",
            holds=f"!has(self.encoder) || !{_lends('encoder')} || (has(self.encoder.kv) && "
            f"has({_LENT_KV}) && {_LENT_KV} <= {LENT_KV_PERCENT})",
            message=f"set encoder.kv.memoryPercent to 1 to {LENT_KV_PERCENT}, "
            "or remove maxLentRequests",
            at=".encoder.maxLentRequests",
        ),
        Rule(
            name="prune-encoder",
            holds=f"!has(self.encoder) || !{_prunes('encoder')}",
            message="only a decode pool prunes: move pruneText there",
            at=".encoder.kv.pruneText",
        ),
        Rule(
            name="prune-handoff",
            holds=f"!has(self.prefill) || !({_prunes('prefill')} || {_prunes('decode')})",
            message="pruned KV is not handed over: remove pruneText or the prefill pool",
            at=".decode.kv.pruneText",
        ),
        Rule(
            name="prune-lent",
            holds=f"!has(self.encoder) || !{_lends('encoder')} || !{_prunes('decode')}",
            message="lent requests are not pruned: remove pruneText or encoder.maxLentRequests",
            at=".decode.kv.pruneText",
        ),
        Rule(
            name="lent-prefill",
            holds=f"!has(self.prefill) || !{_lends('prefill')}",
            message="only encoder pods lend: remove maxLentRequests",
            at=".prefill.maxLentRequests",
        ),
        Rule(
            name="lent-decode",
            holds=f"!{_lends('decode')}",
            message="only encoder pods lend: remove maxLentRequests",
            at=".decode.maxLentRequests",
        ),
        Rule(
            name="encoder-encodes",
            holds=f"!has(self.encoder) || !{_encodes('encoder')}",
            message="an encoder pool always encodes: remove encodeInline",
            at=".encoder.encodeInline",
        ),
        Rule(
            name="decode-encodes",
            holds=f"!has(self.prefill) || !{_encodes('decode')}",
            message="images go to the prefill pool first: "
            "set encodeInline on prefill, or remove the prefill pool",
            at=".decode.encodeInline",
        ),
        Rule(
            name="prefill-encoder-cache",
            holds="!has(self.prefill) || !has(self.prefill.encoderCache) || !has(self.encoder) || "
            f"{_encodes('prefill')}",
            message="this pool encodes no image: set encodeInline, or remove encoderCache",
            at=".prefill.encoderCache",
        ),
        Rule(
            name="decode-encoder-cache",
            holds="!has(self.decode.encoderCache) || (!has(self.prefill) && "
            f"(!has(self.encoder) || {_encodes('decode')}))",
            message="this pool encodes no image: move encoderCache to the pool that does",
            at=".decode.encoderCache",
        ),
        Rule(
            name="zero-prefill",
            holds="!has(self.prefill) || !has(self.prefill.scaling.minReplicas) || "
            "self.prefill.scaling.minReplicas > 0",
            message="only an encoder pool may go to 0: set 1 or more, or remove the prefill pool",
            at=".prefill.scaling.minReplicas",
        ),
        Rule(
            name="zero-decode",
            holds="!has(self.decode.scaling.minReplicas) || self.decode.scaling.minReplicas > 0",
            message="only an encoder pool may go to 0: set 1 or more, or spec.stopped",
            at=".decode.scaling.minReplicas",
        ),
        Rule(
            name="inline-needs-lender",
            holds="!has(self.encoder) || !has(self.encoder.scaling.scaleToZero) || "
            "(has(self.encoder.scaling.scaleToZero.whileAtZero) && "
            "self.encoder.scaling.scaleToZero.whileAtZero != 'InlineAtPrefill') || "
            f"(has(self.prefill) ? {_encodes('prefill')} : {_encodes('decode')})",
            message="InlineAtPrefill needs a pool that encodes: "
            "set encodeInline on prefill (on decode, if there is no prefill pool)",
            at=".encoder.scaling.scaleToZero",
        ),
    )

    def of(self, role: Role) -> Pool | None:
        """Return the pool of a role; None if the service has none."""
        return {Role.ENCODER: self.encoder, Role.PREFILL: self.prefill, Role.DECODE: self.decode}[
            role
        ]

    @property
    def present(self) -> dict[Role, Pool]:
        """The pools of the service, in the order in which a request passes them."""
        pools = {role: self.of(role) for role in POOL_ROLES}
        return {role: pool for role, pool in pools.items() if pool is not None}


def topology(pools: Pools) -> Topology:
    """Return the topology of a service's pools.

    If a stage has no pool, the pool of the next role runs it.

    pools                       encoder   prefill            decode
    encoder, prefill, decode    encoder   prefill            decode
    prefill, decode             -         encoder, prefill   decode
    encoder, decode             encoder   -                  prefill, decode
    decode                      -         -                  encoder, prefill, decode
    """
    return {
        (True, True): Topology.ENCODER_PREFILL_DECODE,
        (True, False): Topology.ENCODER_DECODE,
        (False, True): Topology.PREFILL_DECODE,
        (False, False): Topology.DECODE,
    }[pools.encoder is not None, pools.prefill is not None]


def stages(pools: Pools, role: Role) -> tuple[Role, ...]:
    """Return the stages that workers of `role` load, in the order in which a request passes them.

    Raises:
        KeyError: the service has no pool of that role.
    """
    pool = pools.present[role]
    if role is Role.ENCODER:
        return POOL_ROLES if pool.max_lent_requests else (Role.ENCODER,)
    if role is Role.DECODE and pools.prefill is not None:
        return (Role.DECODE,)
    encodes = pools.encoder is None or pool.encode_inline
    own = (Role.PREFILL,) if role is Role.PREFILL else (Role.PREFILL, Role.DECODE)
    return (Role.ENCODER, *own) if encodes else own
