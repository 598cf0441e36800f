"""Chooses the pods of a request. Pure: candidates and a demand in, a route with its reasons out.

    decode    free KV for the whole prompt, then the least loaded
    prefill   the pod that saw this prefix before, unless busy; without a pool, the decode pod
    encoder   the pod that saw these images before, unless busy; without a pool, the prefill pod

Of the pods that are known to hold tokens of the request, the one with most gets it, unless it is
too busy for this saving. If none is known, its home gets it: all gateways have the same homes.

A stage without a pool runs on the next role that has loaded it. Pods of one route have equal
fingerprints. A draining pod is chosen only if there is no other, and the call is marked so.

An encoder that lends answers a whole text-only request if it has no images to encode and the other
pods are busy (`docs/decisions/0038`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
from collections.abc import Mapping, Sequence

from vlm_worker import abilities
from vlm_worker.types import EmbedLayout, Role, Stage

# If the home has this much more to do, the least loaded pod is chosen instead. A pod that holds a
# share of the request may have this share of it more to do.
AFFINITY_SLACK_REQUESTS = 4
AFFINITY_SLACK_SECONDS = 0.5

# An encoder answers a text-only request if that saves more than this wait. Load reports are up to a
# second old, so a small difference says little, and the decode pods may have the prefix cached.
LENDING_MARGIN_SECONDS = 0.02
LENDING_MAX_LOST_SHARE = 0.5
"""A request is not lent for a shorter wait if more of it would be computed again."""


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """A worker pod as the gateway sees it now, from its Hello and its last load report.

    Attributes:
        name: unique; the pod's name, or its address outside of a cluster.
        kv_capacity_tokens, max_model_len_tokens: 0 without KV.
        ready: its containers are ready and it is not being deleted.
        accepting: readiness gate and load report allow new requests; False while it drains.
        num_inflight: requests on it, of all gateways.
        max_lent: text-only requests that an encoder answers at once; 0 if it does not lend.
        num_lent: such requests on it, of all gateways.
        num_images: images that an encoder which lends has to encode.
        work_queued_seconds: of an encoder that lends, that of images alone.
        lent_queued_seconds: the queued work of its lent requests.
        grammars, min_tokens, prompt_logprobs, embed_layout: what it does of `abilities`.
    """

    name: str
    address: str
    role: Role
    stages: frozenset[Stage]
    boot_id: bytes
    layout_fingerprint: bytes
    embed_fingerprint: bytes
    kv_capacity_tokens: int
    max_model_len_tokens: int
    ready: bool = True
    accepting: bool = True
    num_inflight: int = 0
    num_waiting: int = 0
    work_queued_seconds: float = 0.0
    kv_free_tokens: int = 0
    max_lent: int = 0
    num_lent: int = 0
    num_images: int = 0
    lent_queued_seconds: float = 0.0
    grammars: bool = False
    min_tokens: bool = False
    prompt_logprobs: bool = False
    embed_layout: EmbedLayout | None = None

    @property
    def lends(self) -> bool:
        """Whether it is an encoder whose other stages are for lent requests alone."""
        return self.max_lent > 0 and self.role is Role.ENCODER

    def serves(self, stage: Stage) -> bool:
        """Whether it has loaded a stage, and not for lent requests alone."""
        return stage in self.stages and (stage is Stage.ENCODER or not self.lends)

    @property
    def num_requests(self) -> int:
        """Its load in requests. Lent ones do not count: images go first."""
        if self.lends:
            return max(0, self.num_inflight - self.num_lent) + self.num_images
        return self.num_inflight + self.num_waiting

    @property
    def pressure(self) -> tuple[float, int]:
        """Sort key of the load: seconds of queued work, then requests."""
        return (self.work_queued_seconds, self.num_requests)


@dataclasses.dataclass(frozen=True, slots=True)
class Demand:
    """The needs of a request.

    Attributes:
        num_tokens: prompt and delivered tokens, plus one.
        image_digest: of the images' bytes; empty without images.
        prefix_digest: of the prompt's beginning.
        needs_decode: more than one token may follow.
        constrained, has_minimum, is_scored, embed_layout: what an older pod ignores (`abilities`).
        inline: if no encoder pod exists, the pod that computes the prompt may encode images.
        num_image_tokens: visual tokens of its images, each image once.
        cached_images: of these, those that a pod is known to hold, by boot id.
        cached_prefix: tokens of the longest prefix that a pod is known to hold, by boot id.
    """

    num_tokens: int
    image_digest: bytes
    prefix_digest: bytes
    needs_decode: bool = True
    constrained: bool = False
    has_minimum: bool = False
    is_scored: bool = False
    embed_layout: EmbedLayout | None = None
    inline: bool = True
    num_image_tokens: int = 0
    cached_images: Mapping[bytes, int] = dataclasses.field(default_factory=dict)
    cached_prefix: Mapping[bytes, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """One pod for one stage. With `last_resort` it drains, and there is no other.

    `num_cached` are tokens of the stage's input that the pod is known to hold.
    """

    pod: Candidate
    reason: str
    last_resort: bool = False
    num_cached: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Route:
    """The pods of a request. `decode` is None if the first token ends the answer."""

    encoder: Choice | None
    prefill: Choice
    decode: Choice | None

    @property
    def pods(self) -> tuple[Candidate, ...]:
        choices = (self.encoder, self.prefill, self.decode)
        return tuple(choice.pod for choice in choices if choice is not None)

    @property
    def reasons(self) -> dict[str, str]:
        """The pod of each stage and why it was chosen, for logs."""
        choices = {"encoder": self.encoder, "prefill": self.prefill, "decode": self.decode}
        found = {stage: choice for stage, choice in choices.items() if choice is not None}
        return {stage: f"{choice.pod.name}: {choice.reason}" for stage, choice in found.items()}

    @property
    def lent(self) -> Choice | None:
        """The encoder that answers a text-only request; None if decode pods do."""
        return self.prefill if self.prefill.pod.lends else None

    @property
    def reserve(self) -> bool:
        """Whether to reserve KV: decode runs on another pod than prefill."""
        return self.decode is not None and self.decode.pod.boot_id != self.prefill.pod.boot_id


@dataclasses.dataclass(frozen=True, slots=True)
class NoRoute:
    """No pod for a stage, and why. With `capacity_tokens`, the prompt fits into no pod, ever."""

    stage: Stage
    reason: str
    capacity_tokens: int | None = None


def choose(
    candidates: Sequence[Candidate], demand: Demand, *, failed: frozenset[bytes] = frozenset()
) -> Route | NoRoute:
    """Choose pods for one attempt.

    `failed` has the boot ids of pods that failed this request before. They are tried again only if
    there is no other pod. A restart changes the boot id.
    """
    usable = _Usable(_able(candidates, demand), failed)
    route = _among_pools(usable, demand)
    if isinstance(route, NoRoute):
        route = dataclasses.replace(route, reason=_told(route, candidates, usable, demand))
    lender = _lender(usable, demand)
    if lender is None:
        return route
    saved = _wait(route, demand) - lender.work_queued_seconds - lender.lent_queued_seconds
    lost = _num_known(route) - demand.cached_prefix.get(lender.boot_id, 0)
    if saved <= LENDING_MARGIN_SECONDS:
        return route
    if saved < math.inf and lost > LENDING_MAX_LOST_SHARE * demand.num_tokens:
        return route
    reason = (
        "no decode pod takes it now" if saved == math.inf else f"saves {saved:.3f} s of waiting"
    )
    choice = Choice(lender, f"lent to an encoder without images: {reason}")
    return Route(None, choice, choice if demand.needs_decode else None)


def _among_pools(usable: _Usable, demand: Demand) -> Route | NoRoute:
    """Choose pods by the roles of the stages: no request is lent."""
    if not demand.needs_decode:
        return _rest_of_route(usable, demand, None)
    decode = _decode(usable, demand)
    if isinstance(decode, NoRoute):
        return decode
    return _rest_of_route(usable.agreeing(decode.pod), demand, decode)


def another_decode(
    candidates: Sequence[Candidate], demand: Demand, route: Route, refused: frozenset[bytes]
) -> Choice | None:
    """Another decode pod that is compatible with the rest of the route; None if all refused."""
    unusable = refused | {route.prefill.pod.boot_id}  # its load has changed since it was chosen
    others = tuple(c for c in _able(candidates, demand) if c.boot_id not in unusable)
    choice = _decode(_Usable(others, frozenset()).agreeing(route.prefill.pod), demand)
    return None if isinstance(choice, NoRoute) else choice


def _able(candidates: Sequence[Candidate], demand: Demand) -> tuple[Candidate, ...]:
    """The ready pods, with the stages that they have for this request.

    A pod that would ignore a sampling parameter of the request, as an older one, only encodes. One
    that would read an embedding as a file does not encode.
    """
    ready = tuple(c for c in candidates if c.ready)
    if not abilities.asks(demand):
        return ready
    return tuple(dataclasses.replace(c, stages=abilities.able_stages(c, demand)) for c in ready)


def _told(none: NoRoute, candidates: Sequence[Candidate], usable: _Usable, demand: Demand) -> str:
    """The reason of a missing stage, or that all pods of it would ignore a part of the request."""
    has_pods = any(c.ready and c.serves(none.stage) for c in candidates)
    is_ignored = has_pods and not any(c.serves(none.stage) for c in usable.pods)
    return abilities.reason_of(demand, none.stage, none.reason) if is_ignored else none.reason


def missing_stages(candidates: Sequence[Candidate], needed: frozenset[Stage]) -> list[Stage]:
    """Stages of `needed` that no ready and accepting pod has loaded, in the order of the stages."""
    pods = [c for c in candidates if c.ready and c.accepting]
    missing = [stage for stage in Stage if not any(c.serves(stage) for c in pods)]
    return [stage for stage in missing if stage in needed]


def least_queued_seconds(candidates: Sequence[Candidate], stage: Stage) -> float | None:
    """The least queued work, in seconds, of the pods that new requests get for a stage.

    None if there is no such pod.
    """
    pods, _ = _Usable(tuple(c for c in candidates if c.ready), frozenset()).pool(stage)
    return min((c.work_queued_seconds for c in pods), default=None)


def rendezvous(key: bytes, name: str) -> int:
    """The weight of a pod for a key: the pod with the largest weight is the key's home.

    Highest random weight hashing: all gateways agree without communication. If a pod joins or
    leaves, only the keys of that pod move.
    """
    digest = hashlib.blake2b(name.encode(), key=key[:64], digest_size=8).digest()
    return int.from_bytes(digest, "big")


@dataclasses.dataclass(frozen=True, slots=True)
class _Usable:
    """Ready pods, and which of them failed this request."""

    pods: tuple[Candidate, ...]
    failed: frozenset[bytes]

    def agreeing(self, pod: Candidate) -> _Usable:
        """The pods that can exchange KV with a pod; those without KV, or that lend, always can."""
        layouts = (b"", pod.layout_fingerprint)
        agreeing = tuple(c for c in self.pods if c.lends or c.layout_fingerprint in layouts)
        return dataclasses.replace(self, pods=agreeing)

    def pool(self, stage: Stage) -> tuple[list[Candidate], bool]:
        """Pods for a stage, and whether they drain.

        Pods that did not fail precede those that did, then accepting ones precede draining ones,
        then the stage's own role precedes the next roles.
        """
        loaded = [c for c in self.pods if c.serves(stage)]
        for failed, accepting in itertools.product((False, True), (True, False)):
            for role in _ROLES_FOR[stage]:
                pods = [
                    c
                    for c in loaded
                    if c.role is role
                    and c.accepting is accepting
                    and (c.boot_id in self.failed) is failed
                ]
                if pods:
                    return pods, not accepting
        return [], False


_ROLES_FOR = {
    Stage.ENCODER: (Role.ENCODER, Role.PREFILL, Role.DECODE),
    Stage.PREFILL: (Role.PREFILL, Role.DECODE, Role.ENCODER),
    Stage.DECODE: (Role.DECODE, Role.PREFILL, Role.ENCODER),
}


def _lender(usable: _Usable, demand: Demand) -> Candidate | None:
    """The encoder that may answer a whole request; None if none may.

    It is the one that holds most of the prompt, then the one with the least work.
    It has no image to encode, free KV blocks for the request, and fewer lent requests than it may.
    """
    if demand.image_digest:
        return None
    idle = (
        c
        for c in usable.pods
        if c.lends
        and c.accepting
        and c.boot_id not in usable.failed
        and {Stage.PREFILL, Stage.DECODE} <= c.stages
        and c.num_images == 0
        and c.num_lent < c.max_lent
        and c.kv_free_tokens >= demand.num_tokens
    )

    def order(pod: Candidate) -> tuple[int, float, int, str]:
        num_cached = demand.cached_prefix.get(pod.boot_id, 0)
        return (-num_cached, pod.lent_queued_seconds, pod.num_lent, pod.name)

    return min(idle, key=order, default=None)


def _num_known(route: Route | NoRoute) -> int:
    """Tokens of the prompt that the pod of its prefill is known to hold."""
    return route.prefill.num_cached if isinstance(route, Route) else 0


def _wait(route: Route | NoRoute, demand: Demand) -> float:
    """Seconds of queued work before a request on a route; without end if it can only be held.

    A decode pod without enough free KV blocks refuses the reservation until an answer ends.
    """
    if isinstance(route, NoRoute):
        return math.inf
    if route.decode is not None and route.decode.pod.kv_free_tokens < demand.num_tokens:
        return math.inf
    return sum({pod.boot_id: pod.work_queued_seconds for pod in route.pods}.values())


def _rest_of_route(usable: _Usable, demand: Demand, decode: Choice | None) -> Route | NoRoute:
    """Choose prefill and encoder for a given decode pod."""
    prefill = _prefill(usable, demand, decode)
    if isinstance(prefill, NoRoute):
        return prefill
    if not demand.image_digest:
        return Route(None, prefill, decode)
    encoder = _encoder(usable, demand, prefill)
    return encoder if isinstance(encoder, NoRoute) else Route(encoder, prefill, decode)


def _decode(usable: _Usable, demand: Demand) -> Choice | NoRoute:
    pods, last_resort = usable.pool(Stage.DECODE)
    if not pods:
        return NoRoute(Stage.DECODE, "no decode pod is ready")
    large = [c for c in pods if c.kv_capacity_tokens >= demand.num_tokens]
    if not large:
        largest = max(c.kv_capacity_tokens for c in pods)
        return NoRoute(
            Stage.DECODE,
            f"{demand.num_tokens} tokens, the largest decode pod holds {largest}",
            capacity_tokens=largest,
        )
    free = [c for c in large if c.kv_free_tokens >= demand.num_tokens]
    reason = (
        f"free KV blocks for {demand.num_tokens} tokens"
        if free
        else "no pod has enough free KV blocks, the least loaded"
    )
    prefix = _cached_prefix(demand)
    if _prefills_where_it_decodes(usable) and (warm := _warmest(free, prefix)):
        return prefix.warm(warm, last_resort)

    def order(pod: Candidate) -> tuple[int, int, float, str]:
        full = 1 - pod.kv_free_tokens / max(1, pod.kv_capacity_tokens)
        return (pod.num_requests, -prefix.on(pod), full, pod.name)

    pod = min(free or large, key=order)
    return Choice(pod, reason, last_resort, prefix.on(pod))


def _prefills_where_it_decodes(usable: _Usable) -> bool:
    pods, _ = usable.pool(Stage.PREFILL)
    return not pods or pods[0].role is not Role.PREFILL


def _prefill(usable: _Usable, demand: Demand, decode: Choice | None) -> Choice | NoRoute:
    pods, last_resort = usable.pool(Stage.PREFILL)
    if not pods:
        return NoRoute(Stage.PREFILL, "no prefill pod is ready that agrees with the decode pod")
    if pods[0].role is not Role.PREFILL and decode and Stage.PREFILL in decode.pod.stages:
        return dataclasses.replace(decode, reason="no prefill pool: where it decodes")
    return _at_home(pods, _cached_prefix(demand), last_resort)


def _encoder(usable: _Usable, demand: Demand, prefill: Choice) -> Choice | NoRoute:
    fingerprint = prefill.pod.embed_fingerprint
    agreeing = tuple(
        c
        for c in usable.pods
        if c.embed_fingerprint == fingerprint and (demand.inline or c.role is Role.ENCODER)
    )
    pods, last_resort = dataclasses.replace(usable, pods=agreeing).pool(Stage.ENCODER)
    if not pods:
        return NoRoute(Stage.ENCODER, "no pod that encodes images is ready")
    if pods[0].role is not Role.ENCODER and Stage.ENCODER in prefill.pod.stages:
        return Choice(prefill.pod, "no encoder pool: where it prefills", prefill.last_resort)
    images = _Cached(demand.image_digest, "images", demand.cached_images, demand.num_image_tokens)
    return _at_home(pods, images, last_resort)


@dataclasses.dataclass(frozen=True, slots=True)
class _Cached:
    """Where a part of a request may be cached: on its home, and on the pods known to hold it.

    `known` has tokens by boot id, of `num_tokens` in all; `key` has the home.
    """

    key: bytes
    what: str
    known: Mapping[bytes, int]
    num_tokens: int

    def on(self, pod: Candidate) -> int:
        return self.known.get(pod.boot_id, 0)

    def order(self, pod: Candidate) -> tuple[int, int, str]:
        return (self.on(pod), rendezvous(self.key, pod.name), pod.name)

    def warm(self, pod: Candidate, last_resort: bool) -> Choice:
        reason = f"has {self.on(pod)} of {self.num_tokens} tokens of the {self.what}"
        return Choice(pod, reason, last_resort, self.on(pod))


def _cached_prefix(demand: Demand) -> _Cached:
    return _Cached(demand.prefix_digest, "prefix", demand.cached_prefix, demand.num_tokens)


def _at_home(pods: Sequence[Candidate], cached: _Cached, last_resort: bool) -> Choice:
    home, idle = max(pods, key=cached.order), _least_loaded(pods)
    if not _is_busy(home, idle):
        if cached.on(home):
            return cached.warm(home, last_resort)
        return Choice(home, f"home of the {cached.what}", last_resort)
    if warm := _warmest(pods, cached):
        return cached.warm(warm, last_resort)
    return Choice(idle, f"least loaded: the home of the {cached.what} is busy", last_resort)


def _warmest(pods: Sequence[Candidate], cached: _Cached) -> Candidate | None:
    """The pod that holds most of a request, of those that are not too busy for what they save."""
    known = [pod for pod in pods if cached.on(pod) > 0]
    if not known:
        return None
    idle = _least_loaded(pods)
    fewest = min(pods, key=lambda c: (c.num_requests, c.name))

    def is_busy(pod: Candidate) -> bool:
        saved = max(0, cached.on(pod) - cached.on(idle)) / max(1, cached.num_tokens)
        return _is_busy(pod, idle, share=saved) or _is_busy(pod, fewest, share=saved)

    warm = [pod for pod in known if not is_busy(pod)]
    return max(warm, key=cached.order, default=None)


def _least_loaded(pods: Sequence[Candidate]) -> Candidate:
    return min(pods, key=lambda c: (c.pressure, c.name))


def _is_busy(pod: Candidate, idle: Candidate, *, share: float = 1.0) -> bool:
    """Whether a pod has more to do than the least loaded one, beyond a share of the slack."""
    return (
        pod.num_requests > idle.num_requests + AFFINITY_SLACK_REQUESTS * share
        or pod.work_queued_seconds > idle.work_queued_seconds + AFFINITY_SLACK_SECONDS * share
    )
