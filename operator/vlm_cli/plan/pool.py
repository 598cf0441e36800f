"""The queueing model of one pool: utilization, waiting, running answers, ITL by replicas. Pure.

    work per second and replica ─▶ utilization ─▶ wait before encoding and prefill
    answers per second · time of an answer = running answers ─▶ KV in use, time of a step

A pod that encodes or prefills beside decode has less time for steps; its steps are longer.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection
from typing import Final

from vlm_cli.plan import capacity, speed
from vlm_cli.plan.facts import ModelFacts
from vlm_cli.plan.load import Load
from vlm_cli.plan.nodes import Node
from vlm_cli.plan.speed import Speed, StepCost
from vlm_operator.api.scaling import Targets
from vlm_operator.names import Role

MAX_UTILIZATION: Final = Targets().utilization_percent / 100
MAX_KV_OCCUPANCY: Final = Targets().kv_occupancy_percent / 100
"""The autoscaler's default targets, so that a planned pool is not resized at once."""
MAX_REPLICAS: Final = 1000
TAIL: Final = 3.0
"""95th percentile of a wait over its mean, for an exponential tail: ln 20."""
RARE: Final = 0.05
"""Steps that are rarer do not change the 95th percentile."""
ENCODE_STRETCH: Final = 2.0
"""Assumed: decode steps take twice as long while an image is encoded on the same device."""
_MAX_ITERATIONS: Final = 200


@dataclasses.dataclass(frozen=True)
class Numbers:
    """The choices of number types: dtype of the KV, and rounding of the weights.

    With `has_scales`, workers read scales of int8 layers' inputs from a file. `visual_share` of the
    tokens are visual, which matters for KV types by modality.
    """

    kv_dtype: str
    weights: str
    has_scales: bool = False
    visual_share: float = 0.0

    def refusal(
        self, node: Node, facts: ModelFacts, stages: Collection[Role], role: Role
    ) -> str | None:
        """Return why pods with these types cannot run on a node class; see `Node.refusal`."""
        return node.refusal(
            facts,
            stages,
            role,
            weights=self.weights,
            has_scales=self.has_scales,
            kv_dtype=self.kv_dtype,
        )

    def kv_token_bytes(self, facts: ModelFacts) -> int:
        return capacity.kv_token_bytes(facts, self.kv_dtype, self.visual_share)


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes of a request, in the mean, into and out of a pod, and the network's bytes per second.

    A network carries `bytes_per_second` in each direction at once.
    """

    bytes_in: float
    bytes_out: float
    bytes_per_second: float

    def utilization(self, rate: float) -> float:
        """Return the share of the network for `rate` requests per second."""
        return rate * max(self.bytes_in, self.bytes_out) / self.bytes_per_second


@dataclasses.dataclass(frozen=True)
class PoolState:
    """A pool with a number of replicas under a load.

    Attributes:
        utilization: share of a pod's time for encoding and prefill.
        service: seconds of encoding and prefill of a request with images.
        wait: seconds that it waits before, at the 95th percentile.
        network: share of a pod's network for embeddings and KV, in the busier direction.
        num_running: answers that one pod decodes at once.
        kv_occupancy: share of its KV blocks in use.
        itl, itl_p95: seconds between two tokens; 0 without decode.
        problem: why this number of replicas does not suffice; None if it does.
    """

    replicas: int
    utilization: float
    service: float
    wait: float
    network: float
    num_running: float
    kv_occupancy: float
    itl: float
    itl_p95: float
    problem: str | None


@dataclasses.dataclass(frozen=True)
class PoolPlan:
    """One pool of a candidate: its stages and nodes, and the model and load that it serves."""

    role: Role
    stages: tuple[Role, ...]
    node: Node
    speed: Speed
    facts: ModelFacts
    load: Load
    numbers: Numbers
    block_size: int
    traffic: Traffic

    def state(self, replicas: int) -> PoolState:
        """Compute the state with a number of replicas."""
        rate = self.load.rate / replicas
        utilization = rate * self._mean_work
        service = self._service
        network = self.traffic.utilization(rate)
        if utilization >= 1:
            return self._overloaded(replicas, utilization, service, network)
        running, itl = self._decode(rate, utilization)
        itl_p95 = self._itl_p95(rate, running, itl)
        occupancy = self._occupancy(running)
        # prompts share their steps with the answers that run
        service += self._num_chunks * self._step(running) if running else 0.0
        return PoolState(
            replicas=replicas,
            utilization=utilization,
            service=service,
            wait=TAIL * _mean_wait(service, utilization, replicas),
            network=network,
            num_running=running,
            kv_occupancy=occupancy,
            itl=itl,
            itl_p95=itl_p95,
            problem=self._problem(utilization, network, running, occupancy, itl_p95),
        )

    def fewest(self) -> PoolState:
        """Return the state with the fewest replicas that suffice, or with a problem that stays."""
        if (last := self.state(MAX_REPLICAS)).problem is not None:
            return last
        below, enough = 0, MAX_REPLICAS
        while enough - below > 1:
            middle = (below + enough) // 2
            if self.state(middle).problem is None:
                enough = middle
            else:
                below = middle
        return self.state(enough)

    def limit(self, replicas: int) -> str:
        """Return what prevents one replica fewer; "" if nothing but the TTFT of all pools."""
        return (self.state(replicas - 1).problem or "") if replicas > 1 else ""

    @functools.cached_property
    def kv_bytes(self) -> int:
        """Bytes of the KV cache of one pod; 0 for an encoder."""
        if self.stages == (Role.ENCODER,):
            return 0
        return self.node.memory_of(self.facts, self.stages, weights=self.numbers.weights).kv

    def num_sequences(self, num_tokens: int) -> int:
        """Return how many sequences of `num_tokens` tokens fit into the KV of one pod."""
        return capacity.concurrency(
            self.kv_bytes,
            num_tokens,
            token_bytes=self.numbers.kv_token_bytes(self.facts),
            block_size=self.block_size,
        )

    @functools.cached_property
    def _prompt_tokens(self) -> int:
        """Tokens of the prompt of a request with images."""
        return self.load.prompt_tokens + self.load.visual_tokens(self.facts)

    @functools.cached_property
    def _mean_work(self) -> float:
        """Seconds of encoding and prefill per request, over all requests."""
        share = self.load.share
        return share * self._service + (1 - share) * self._work(with_images=False)

    def _work(self, *, with_images: bool) -> float:
        seconds = 0.0
        if Role.ENCODER in self.stages and with_images:
            seconds += self._encode_seconds
        if Role.PREFILL in self.stages:
            seconds += speed.prefill_seconds(
                self.facts,
                self._prompt_tokens if with_images else self.load.prompt_tokens,
                self.speed,
                weights=self.numbers.weights,
            )
        return seconds

    @functools.cached_property
    def _encode_seconds(self) -> float:
        counts = self.load.counts(self.facts)
        return speed.encode_seconds(self.facts, counts, self.speed, weights=self.numbers.weights)

    @functools.cached_property
    def _chunk_seconds(self) -> float:
        """Seconds that the largest chunk of a prompt adds to a step."""
        num_tokens = min(self._prompt_tokens, capacity.STEP_TOKENS)
        return speed.prefill_seconds(
            self.facts, num_tokens, self.speed, weights=self.numbers.weights
        )

    @functools.cached_property
    def _service(self) -> float:
        return self._work(with_images=True)

    @functools.cached_property
    def _num_chunks(self) -> int:
        """Steps of the prompt of a request with images, if this pod prefills."""
        if Role.PREFILL not in self.stages:
            return 0
        return capacity.num_blocks(self._prompt_tokens, capacity.STEP_TOKENS)

    @functools.cached_property
    def _mean_tokens(self) -> float:
        """Tokens of a prompt, over all requests."""
        visual = self._prompt_tokens - self.load.prompt_tokens
        return self.load.prompt_tokens + self.load.share * visual

    @functools.cached_property
    def _step_cost(self) -> StepCost:
        return speed.step_cost(
            self.facts,
            context=self._mean_tokens + self.load.output_tokens / 2,
            weights=self.numbers.weights,
            kv_dtype=self.numbers.kv_dtype,
            visual_share=self.numbers.visual_share,
        )

    def _step(self, running: float) -> float:
        """Return the time of a step; an answer that runs alone has a step too."""
        return self._step_cost.seconds(max(1.0, running), self.speed)

    def _decode(self, rate: float, utilization: float) -> tuple[float, float]:
        """Return running answers and mean ITL: the fixed point of Little's law; inf if none."""
        if Role.DECODE not in self.stages:
            return 0.0, 0.0

        def itl(running: float) -> float:
            return self._step(running) / (1 - utilization)

        return _fixed_point(lambda running: rate * self.load.output_tokens * itl(running), itl)

    def _itl_p95(self, rate: float, running: float, itl: float) -> float:
        """Return the mean ITL, or that of steps with a prompt's chunk or an image, if not rare."""
        if Role.DECODE not in self.stages or math.isinf(itl):
            return itl
        slowest, step = itl, self._step(running)
        if rate * self._num_chunks * itl > RARE:
            slowest = max(slowest, step + self._chunk_seconds)
        if Role.ENCODER in self.stages and rate * self.load.share * self._encode_seconds > RARE:
            slowest = max(slowest, ENCODE_STRETCH * step)
        return slowest

    def _occupancy(self, running: float) -> float:
        if Role.DECODE not in self.stages:
            return 0.0
        num_tokens = math.ceil(self._mean_tokens) + self.load.output_tokens
        fits = self.num_sequences(num_tokens)
        return running / fits if fits else math.inf

    def _problem(
        self, utilization: float, network: float, running: float, occupancy: float, itl_p95: float
    ) -> str | None:
        if utilization > MAX_UTILIZATION:
            return f"pods are busy {utilization:.0%} of the time, target {MAX_UTILIZATION:.0%}"
        if network > MAX_UTILIZATION:
            return f"transfers need {network:.0%} of the network, target {MAX_UTILIZATION:.0%}"
        longest = self._prompt_tokens
        longest += self.load.output_tokens if Role.DECODE in self.stages else 0
        if self.stages != (Role.ENCODER,) and not self.num_sequences(longest):
            return f"the KV cache holds no request of {longest} tokens"
        if math.isinf(running):
            return "answers arrive faster than the pods can decode them"
        if running > capacity.STEP_ROWS:
            return f"{running:.0f} answers run at once, a worker runs {capacity.STEP_ROWS}"
        goal = self.load.itl_ms
        if goal is not None and itl_p95 * 1000 > goal:
            return f"ITL is {itl_p95 * 1000:.0f} ms, goal {goal} ms"
        if occupancy > MAX_KV_OCCUPANCY:
            return f"KV occupancy is {occupancy:.0%}, target {MAX_KV_OCCUPANCY:.0%}"
        return None

    def _overloaded(
        self, replicas: int, utilization: float, service: float, network: float
    ) -> PoolState:
        return PoolState(
            replicas=replicas,
            utilization=utilization,
            service=service,
            wait=math.inf,
            network=network,
            num_running=math.inf if Role.DECODE in self.stages else 0.0,
            kv_occupancy=0.0,
            itl=math.inf,
            itl_p95=math.inf,
            problem=f"the work of {utilization:.1f} pods arrives per pod",
        )


def _fixed_point(
    next_running: Callable[[float], float], itl: Callable[[float], float]
) -> tuple[float, float]:
    """Iterate from no answers upwards: a growing function ends at its least fixed point."""
    running = 0.0
    for _ in range(_MAX_ITERATIONS):
        following = next_running(running)
        if following - running <= 1e-6 * max(1.0, following):
            return following, itl(following)
        running = following
    return math.inf, math.inf


def _mean_wait(service: float, utilization: float, replicas: int) -> float:
    """Return the mean wait of M/M/c, by Sakasegawa's approximation (1977)."""
    if utilization <= 0:
        return 0.0
    power = math.pow(utilization, math.sqrt(2 * (replicas + 1)) - 1)
    return service * power / (replicas * (1 - utilization))
