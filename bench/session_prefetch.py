"""TTFT of follow-ups with and without session prefetch, at several loads.

    python bench/session_prefetch.py        one JSON object on stdout, in two minutes

Simulated time, with the conversations, pods and route selection of `routing.py`. Decoding takes
time here. It is on other pods (`E-P-D`) or on the pod of the prompt (`E-PD`), where it delays no
prompt but leaves no time without a request. Answers have the tokens that the template writes, or,
as `retokenized`, others. A prefetch starts 0.2 s after an answer if the pod has no request, and
ends when one arrives: that request waits for the end of the running chunk. Blocks of complete
chunks stay and evict others. Each row has mean and p95 of TTFT of first turns and of follow-ups in
seconds, and the share of the prefetched tokens that a request hit. Near capacity, one changed route
changes all later ones: there a difference of some percent is no effect of prefetches.
"""

from __future__ import annotations

import heapq
import itertools
import json
import random
import statistics
from collections.abc import Hashable
from typing import Any

import routing
from routing import (
    ANSWER,
    BLOCK_SIZE,
    CACHED_BLOCKS,
    CACHED_IMAGES,
    ENCODE_SECONDS,
    IMAGE_TOKENS,
    PREFILL_SECONDS,
    SALT,
    TOPOLOGIES,
    Pod,
    Turn,
)

from vlm_worker.engine.prefetches import CHUNK_TOKENS
from vlm_worker.gateway.pod_caches import PodCaches, RequestDigests
from vlm_worker.gateway.prompts import Prompt
from vlm_worker.route import Route, choose
from vlm_worker.types import Role, Stage

RATES = (0.1, 0.5, 1.0, 1.5)
"""New conversations per second: from idle to near the capacity of the encoders."""
DECODE_SECONDS = 0.02
"""Per token of an answer."""
SETTLE_SECONDS = 0.2
CHUNK_SECONDS = CHUNK_TOKENS * PREFILL_SECONDS


class Prefetched:
    """The running prefetch of one pod, and the blocks that no request has hit."""

    def __init__(self, pod: Pod) -> None:
        self.pod = pod
        self.unused: set[Hashable] = set()
        self.num_computed = self.num_used = 0
        self.answers_until = 0.0  # on a pod that decodes
        self._missing: list[Hashable] = []
        self._started = 0.0

    def start(self, now: float, blocks: list[Hashable]) -> bool:
        """Start computing the blocks that the pod lacks; False if it is busy or lacks none."""
        self.pod.ends = [end for end in self.pod.ends if end > now]
        if self.pod.ends or now < self.answers_until or self._running_until(now) is not None:
            return False
        self.finish(now)
        held = itertools.takewhile(lambda block: block in self.pod.cache, blocks)
        self._missing, self._started = blocks[sum(1 for _ in held) :], now
        self._chain = blocks
        return bool(self._missing)

    def finish(self, now: float) -> float:
        """End it because a request came; return when the chunk that runs ends."""
        running_until = self._running_until(now)
        until = now if running_until is None else running_until
        per_chunk = CHUNK_TOKENS // BLOCK_SIZE
        num_chunks = int((until - self._started) / CHUNK_SECONDS + 1e-6)
        done = self._missing[: num_chunks * per_chunk]
        if running_until is None:
            done = self._missing
        if done:
            end = self._chain.index(done[-1]) + 1
            self.pod.use(self._chain[:end], chain=True)
            self.unused |= set(done)
            self.num_computed += len(done)
        self._missing = []
        return until

    def count_used(self, blocks: list[Hashable], num_hits: int) -> None:
        used = self.unused.intersection(blocks[:num_hits])
        self.num_used += len(used)
        self.unused -= used

    def _running_until(self, now: float) -> float | None:
        """The end of the chunk that runs at `now`; None if no prefetch does."""
        seconds = len(self._missing) * BLOCK_SIZE * PREFILL_SECONDS
        if not self._missing or now >= self._started + seconds:
            return None
        num_begun = int((now - self._started) / CHUNK_SECONDS) + 1
        return min(self._started + num_begun * CHUNK_SECONDS, self._started + seconds)


def simulate(
    pools: str, rate: float, *, prefetches: bool, retokenized: bool = False
) -> dict[str, Any]:
    """One run."""
    role, stages = TOPOLOGIES[pools]
    encoders = routing.pods_of(Role.ENCODER, frozenset({Stage.ENCODER}), CACHED_IMAGES)
    prefills = routing.pods_of(role, stages, CACHED_BLOCKS)
    ahead = {name: Prefetched(pod) for name, pod in prefills.items()}
    needs_decode = Stage.DECODE in stages
    caches = PodCaches()
    ttft: dict[bool, list[float]] = {False: [], True: []}
    numbers = itertools.count()
    coming: list[tuple[float, int, Any]] = [
        (now, next(numbers), (turn, False)) for now, turn in routing.conversations(rate)
    ]
    heapq.heapify(coming)
    while coming:
        now, _, event = heapq.heappop(coming)
        if isinstance(event[0], Prefetched):
            pod, begun, digests = event
            if pod.start(now, routing.blocks_of(begun)):
                marks = [mark.digest for mark in reversed(digests.marks)]
                caches.record(pod.pod.name.encode(), marks)
            continue
        turn, follows = event
        images = [routing.image_of(number) for number in turn.images]
        prompt = Prompt(tuple(turn.token_ids), tuple(turn.offsets))
        digests = RequestDigests.of(prompt, images, salt=SALT, block_size=BLOCK_SIZE)
        pods = [pod.candidate(now) for pod in (*encoders.values(), *prefills.values())]
        demand = routing.demand_of(turn, digests, caches, needs_decode=needs_decode)
        route = choose(pods, demand)
        assert isinstance(route, Route)
        assert route.encoder is not None
        encoder, prefill = encoders[route.encoder.pod.name], prefills[route.prefill.pod.name]
        prefetched = ahead[prefill.name]
        free_at = prefetched.finish(now)
        keys: list[Hashable] = list(dict.fromkeys(turn.images))
        blocks = routing.blocks_of(turn)
        num_images = encoder.use(keys, chain=False)
        num_blocks = prefill.use(blocks, chain=True)
        prefetched.count_used(blocks, num_blocks)
        encoded = encoder.serve(now, (len(keys) - num_images) * IMAGE_TOKENS * ENCODE_SECONDS)
        num_tokens = len(turn.token_ids) - num_blocks * BLOCK_SIZE
        ended = max(encoded, prefill.serve(free_at, num_tokens * PREFILL_SECONDS))
        caches.record(route.encoder.pod.boot_id, digests.images)
        marks = [mark.digest for mark in reversed(digests.marks)]
        caches.record(route.prefill.pod.boot_id, marks)
        ttft[follows].append(ended - now)
        answered = ended + ANSWER * DECODE_SECONDS
        if needs_decode:
            prefetched.answers_until = max(prefetched.answers_until, answered)
        if not turn.num_left:
            continue
        following, at = routing.next_turn(turn, answered)
        begun = beginning(turn, following)
        if needs_decode and not retokenized:  # the pod wrote the KV of the answer itself
            prefill.use(routing.blocks_of(begun), chain=True)
        if prefetches:
            shown = [routing.image_of(number) for number in begun.images]
            begins = Prompt(tuple(begun.token_ids), tuple(begun.offsets))
            next_digests = RequestDigests.of(begins, shown, salt=SALT, block_size=BLOCK_SIZE)
            job = (prefetched, begun, next_digests)
            heapq.heappush(coming, (answered + SETTLE_SECONDS, next(numbers), job))
        heapq.heappush(coming, (at, next(numbers), (following, True)))
    num_computed = sum(one.num_computed for one in ahead.values())
    num_used = sum(one.num_used for one in ahead.values())
    return {
        "first_ttft_mean": round(statistics.mean(ttft[False]), 4),
        "first_ttft_p95": round(statistics.quantiles(ttft[False], n=20)[-1], 4),
        "next_ttft_mean": round(statistics.mean(ttft[True]), 4),
        "next_ttft_p95": round(statistics.quantiles(ttft[True], n=20)[-1], 4),
        "prefetched_tokens": num_computed * BLOCK_SIZE,
        "used": round(num_used / num_computed, 3) if num_computed else None,
    }


def beginning(turn: Turn, following: Turn) -> Turn:
    """What is known of the following turn when the answer has ended."""
    end = len(turn.token_ids) + ANSWER
    return Turn(following.token_ids[:end], list(turn.offsets), list(turn.images), turn.seed, 0)


def main() -> None:
    """Simulate and print."""
    random.seed(0)
    cases = [("E-P-D", False), ("E-PD", False), ("E-PD", True)]
    results = [
        {
            "pools": pools,
            "retokenized": retokenized,
            "rate": rate,
            "prefetch": prefetches,
            **simulate(pools, rate, prefetches=prefetches, retokenized=retokenized),
        }
        for pools, retokenized in cases
        for rate in RATES
        for prefetches in (False, True)
    ]
    print(json.dumps({"bench": "session_prefetch", "results": results}))


if __name__ == "__main__":
    main()
