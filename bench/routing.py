"""Cache hits and TTFT of routing by homes alone, and by what pods are known to hold.

    python bench/routing.py        one JSON object on stdout, in half a minute

Simulated time, with the real route selection and the real digests: three encoders, and three pods
that compute prompts, in a pool of their own (`E-P-D`) or where they decode (`E-PD`). All
conversations share a system prompt of 400 tokens. A conversation has 1 to 6 turns. The first has 1
to 3 images of a catalogue, a later one has one with a chance of a third; few images are asked for
often. Pods serve one request after another, and their caches evict by last use; decoding takes no
time. The output has shares of images and blocks that were in the cache, and TTFT in seconds.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import json
import random
import statistics
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence

from vlm_worker.gateway.images import RequestImage
from vlm_worker.gateway.pod_caches import PodCaches, RequestDigests
from vlm_worker.gateway.prompts import Prompt
from vlm_worker.gateway.visual import Choice
from vlm_worker.route import Candidate, Demand, Route, choose
from vlm_worker.types import Role, Stage

RATES = (0.5, 1.0, 1.5)
"""New conversations per second; the last one is near the capacity of the encoders."""
NUM_CONVERSATIONS, NUM_PODS = 600, 3
CATALOGUE, IMAGE_TOKENS, BLOCK_SIZE = 300, 256, 16
SYSTEM, QUESTION, ANSWER = 400, 40, 120
THINK_SECONDS = 8.0
ENCODE_SECONDS, PREFILL_SECONDS = 1.5e-3, 3e-4
"""Per token."""
CACHED_IMAGES, CACHED_BLOCKS = 60, 4000
"""Of one pod."""
SALT = b"tenant"
TOPOLOGIES = {
    "E-P-D": (Role.PREFILL, frozenset({Stage.PREFILL})),
    "E-PD": (Role.DECODE, frozenset({Stage.PREFILL, Stage.DECODE})),
}


@dataclasses.dataclass(slots=True)
class Turn:
    """A request, and the rest of its conversation."""

    token_ids: list[int]
    offsets: list[int]
    images: list[int]
    seed: int
    num_left: int


class Pod:
    """A pod that serves its requests in order; `cache` is in the order of the last use."""

    def __init__(self, name: str, role: Role, size: int, stages: frozenset[Stage]) -> None:
        self.name, self.role, self.size, self.stages = name, role, size, stages
        self.cache: OrderedDict[Hashable, None] = OrderedDict()
        self.ends: list[float] = []

    def candidate(self, now: float) -> Candidate:
        self.ends = [end for end in self.ends if end > now]
        return Candidate(
            name=self.name,
            address=self.name,
            role=self.role,
            stages=self.stages,
            boot_id=self.name.encode(),
            layout_fingerprint=b"" if self.role is Role.ENCODER else b"kv",
            embed_fingerprint=b"embed",
            kv_capacity_tokens=10**6,
            max_model_len_tokens=10**6,
            kv_free_tokens=10**6,
            num_inflight=len(self.ends),
            work_queued_seconds=max(0.0, self.ends[-1] - now) if self.ends else 0.0,
        )

    def use(self, keys: Sequence[Hashable], *, chain: bool) -> int:
        """Hold all keys; return how many were held before, of a `chain` only those of its head."""
        held = [key in self.cache for key in keys]
        for key in reversed(keys):  # the end of a chain goes first
            self.cache[key] = None
            self.cache.move_to_end(key)
        while len(self.cache) > self.size:
            self.cache.popitem(last=False)
        return sum(itertools.takewhile(bool, held)) if chain else sum(held)

    def serve(self, now: float, seconds: float) -> float:
        self.ends.append(max(now, *self.ends, 0.0) + seconds)
        return self.ends[-1]


def conversations(rate: float) -> Iterator[tuple[float, Turn]]:
    """The first turns, by arrival."""
    chance, now = random.Random(1), 0.0
    for number in range(NUM_CONVERSATIONS):
        now += chance.expovariate(rate)
        turn = Turn(list(range(SYSTEM)), [], [], number, chance.randint(0, 5))
        for _ in range(chance.randint(1, 3)):
            add_image(turn, chance)
        add_text(turn, QUESTION, chance)
        yield now, turn


def add_text(turn: Turn, num_tokens: int, chance: random.Random) -> None:
    turn.token_ids += [chance.randrange(1000, 9000) for _ in range(num_tokens)]


def add_image(turn: Turn, chance: random.Random) -> None:
    turn.offsets.append(len(turn.token_ids))
    turn.images.append(int(CATALOGUE * chance.random() ** 2))
    turn.token_ids += [9] * IMAGE_TOKENS


def blocks_of(turn: Turn) -> list[Hashable]:
    """The chain of the prompt's full blocks."""
    chain: list[Hashable] = []
    parent = 0
    for start in range(0, len(turn.token_ids) - BLOCK_SIZE + 1, BLOCK_SIZE):
        end = start + BLOCK_SIZE
        near = [i for i, at in zip(turn.images, turn.offsets, strict=True) if start <= at < end]
        parent = hash((parent, *turn.token_ids[start:end], *near))
        chain.append(parent)
    return chain


def demand_of(
    turn: Turn, digests: RequestDigests, caches: PodCaches, *, needs_decode: bool
) -> Demand:
    images = [(key, IMAGE_TOKENS) for key in digests.images]
    return Demand(
        num_tokens=len(turn.token_ids) + 1,
        image_digest=turn.images[0].to_bytes(16, "little"),
        prefix_digest=digests.head,
        needs_decode=needs_decode,
        num_image_tokens=sum(dict(images).values()),
        cached_images=caches.images(images),
        cached_prefix=caches.prefix(digests.marks),
    )


def pods_of(role: Role, stages: frozenset[Stage], size: int) -> dict[str, Pod]:
    names = [f"{role}{i}" for i in range(NUM_PODS)]
    return {name: Pod(name, role, size, stages) for name in names}


def simulate(pools: str, rate: float, *, knows: bool) -> dict[str, float]:
    """One run; a gateway that `knows` nothing records nothing."""
    role, stages = TOPOLOGIES[pools]
    encoders = pods_of(Role.ENCODER, frozenset({Stage.ENCODER}), CACHED_IMAGES)
    prefills = pods_of(role, stages, CACHED_BLOCKS)
    needs_decode = Stage.DECODE in stages
    caches, ttft = PodCaches(), []
    found = {"images": 0, "blocks": 0}
    looked_up = {"images": 0, "blocks": 0}
    coming = [(now, number, turn) for number, (now, turn) in enumerate(conversations(rate))]
    numbers = itertools.count(len(coming))
    while coming:
        now, _, turn = heapq.heappop(coming)
        images = [image_of(number) for number in turn.images]
        prompt = Prompt(tuple(turn.token_ids), tuple(turn.offsets))
        digests = RequestDigests.of(prompt, images, salt=SALT, block_size=BLOCK_SIZE)
        pods = [pod.candidate(now) for pod in (*encoders.values(), *prefills.values())]
        route = choose(pods, demand_of(turn, digests, caches, needs_decode=needs_decode))
        assert isinstance(route, Route)
        assert route.encoder is not None
        encoder, prefill = encoders[route.encoder.pod.name], prefills[route.prefill.pod.name]
        keys: list[Hashable] = list(dict.fromkeys(turn.images))
        blocks = blocks_of(turn)
        num_images = encoder.use(keys, chain=False)
        num_blocks = prefill.use(blocks, chain=True)
        encoded = encoder.serve(now, (len(keys) - num_images) * IMAGE_TOKENS * ENCODE_SECONDS)
        num_tokens = len(turn.token_ids) - num_blocks * BLOCK_SIZE
        # as prefill waits for the embeddings, its pod serves others: its queue is that of its work
        ended = max(encoded, prefill.serve(now, num_tokens * PREFILL_SECONDS))
        if knows:
            caches.record(route.encoder.pod.boot_id, digests.images)
            marks = [mark.digest for mark in reversed(digests.marks)]
            caches.record(route.prefill.pod.boot_id, marks)
        ttft.append(ended - now)
        for what, hits, all_ in (
            ("images", num_images, len(keys)),
            ("blocks", num_blocks, len(blocks)),
        ):
            found[what] += hits
            looked_up[what] += all_
        if turn.num_left:
            following, at = next_turn(turn, ended)
            heapq.heappush(coming, (at, next(numbers), following))
    return {
        "image_hits": round(found["images"] / looked_up["images"], 3),
        "prefix_hits": round(found["blocks"] / looked_up["blocks"], 3),
        "ttft_mean": round(statistics.mean(ttft), 3),
        "ttft_p95": round(statistics.quantiles(ttft, n=20)[-1], 3),
    }


def image_of(number: int) -> RequestImage:
    digest = number.to_bytes(16, "little")
    return RequestImage(b"", "PNG", 448, 448, IMAGE_TOKENS, 0, digest, "", Choice())


def next_turn(turn: Turn, ended: float) -> tuple[Turn, float]:
    """The next turn and its time; both are the same for every way of routing a request."""
    chance = random.Random(f"{turn.seed}/{turn.num_left}")
    following = Turn(
        list(turn.token_ids), list(turn.offsets), list(turn.images), turn.seed, turn.num_left - 1
    )
    add_text(following, ANSWER, chance)
    if chance.random() < 1 / 3:
        add_image(following, chance)
    add_text(following, QUESTION, chance)
    return following, ended + chance.expovariate(1 / THINK_SECONDS)


def main() -> None:
    """Simulate and print."""
    results = [
        {
            "pools": pools,
            "rate": rate,
            "routing": "known" if knows else "homes",
            **simulate(pools, rate, knows=knows),
        }
        for pools in TOPOLOGIES
        for rate in RATES
        for knows in (False, True)
    ]
    print(json.dumps({"bench": "routing", "results": results}))


if __name__ == "__main__":
    main()
