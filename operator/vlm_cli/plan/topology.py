"""Chooses topology, node classes and replicas for a load, with the reason of each verdict. Pure.

for each topology    for each node class per pool    fewest replicas that meet the goals
                                                     └─▶ cheapest candidate of a topology
the fewest pools that meet the goals; more pools only if they cost a third less
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from vlm_cli.plan import capacity
from vlm_cli.plan.facts import ModelFacts
from vlm_cli.plan.load import Load
from vlm_cli.plan.nodes import Node
from vlm_cli.plan.pool import Numbers, PoolPlan, PoolState, Traffic
from vlm_cli.plan.speed import Speed
from vlm_operator.api.enums import Topology
from vlm_operator.names import Role

E, P, D = Role.ENCODER, Role.PREFILL, Role.DECODE
STAGES: Final[Mapping[Topology, Mapping[Role, tuple[Role, ...]]]] = {
    Topology.DECODE: {D: (E, P, D)},
    Topology.ENCODER_DECODE: {E: (E,), D: (P, D)},
    Topology.PREFILL_DECODE: {P: (E, P), D: (D,)},
    Topology.ENCODER_PREFILL_DECODE: {E: (E,), P: (P,), D: (D,)},
}
"""Stages of the pods of each pool; a test compares them with `vlm_operator.api.pool.stages`."""

MIN_SAVING: Final = 1 / 3
"""More pools pay for their operation from this share of the cost on: "where a third of inference
spend is on the table" (One GPU, Two Bottlenecks)."""
_TOLERANCE: Final = 1e-9
_MAX_STEPS: Final = 500


@dataclasses.dataclass(frozen=True)
class Network:
    """Bytes per second between two pods."""

    bytes_per_second: float


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A topology with its best node classes.

    Attributes:
        pools: plan and state by role, in the order of a request.
        cost: per hour, of all pools; the number of pods if a class has no price.
        ttft, itl: seconds at the 95th percentile, of a request with images.
        transfers: seconds of E→P, which are a part of TTFT.
        problem: why it does not meet the goals; None if it does.
    """

    topology: Topology
    pools: Mapping[Role, tuple[PoolPlan, PoolState]]
    cost: float
    ttft: float
    itl: float
    transfers: float
    problem: str | None

    @property
    def num_pods(self) -> int:
        return sum(state.replicas for _, state in self.pools.values())


@dataclasses.dataclass(frozen=True)
class Choice:
    """The recommended candidate, why, and all candidates, one per topology.

    `refused` has what no node class can run, by topology.
    """

    recommended: Candidate | None
    reasons: tuple[str, ...]
    candidates: tuple[Candidate, ...]
    refused: Mapping[Topology, str]
    has_prices: bool


def choose(
    facts: ModelFacts,
    load: Load,
    nodes: Sequence[Node],
    *,
    numbers: Numbers,
    shares: tuple[float, float],
    network: Network,
) -> Choice:
    """Size each topology on the best node classes, and recommend one.

    Args:
        facts: of the model.
        load: of the service.
        nodes: classes that pools may use.
        numbers: types of KV and weights.
        shares: of peak compute and of bandwidth that are reached.
        network: between pods.
    """
    has_prices = all(node.price is not None for node in nodes)
    candidates: list[Candidate] = []
    refused: dict[Topology, str] = {}
    for topology, roles in STAGES.items():
        if E in roles and not load.share:
            refused[topology] = "no request has an image"
            continue
        options: list[list[PoolPlan]] = []
        problems: list[str] = []
        for role, stages in roles.items():
            usable = []
            for node in nodes:
                problem = numbers.refusal(node, facts, stages, role)
                if problem is None:
                    assert node.device is not None
                    speed = Speed(node.device, *shares)
                    traffic = _traffic(role, roles, facts, load, numbers, network)
                    usable.append(
                        PoolPlan(role, stages, node, speed, facts, load, numbers, 0, traffic)
                    )
                else:
                    problems.append(f"{role} on {node.name}: {problem}")
            options.append(usable)
        if not all(options):
            refused[topology] = "; ".join(problems)
            continue
        found = [
            _sized(topology, pools, load, network, has_prices=has_prices)
            for pools in itertools.product(*options)
        ]
        candidates.append(min(found, key=_preference))
    recommended, reasons = _recommend(candidates)
    return Choice(recommended, reasons, tuple(candidates), refused, has_prices)


def _traffic(
    role: Role,
    roles: Collection[Role],
    facts: ModelFacts,
    load: Load,
    numbers: Numbers,
    network: Network,
) -> Traffic:
    """Return the bytes that a request moves into and out of the pod of `role`."""
    visual = load.share * load.visual_tokens(facts)
    embeddings = visual * capacity.embedding_bytes(facts, 1) if E in roles else 0.0
    token_bytes = numbers.kv_token_bytes(facts)
    handoff = (load.prompt_tokens + visual) * token_bytes if P in roles else 0.0
    flows = {
        E: (0.0, embeddings),
        P: (embeddings, handoff),
        D: (handoff if P in roles else embeddings, 0.0),
    }
    return Traffic(*flows[role], network.bytes_per_second)


def _preference(one: Candidate) -> tuple[bool, float]:
    """Order candidates of a topology: by cost; those with a problem are last, by TTFT."""
    return (False, one.cost) if one.problem is None else (True, one.ttft)


def _sized(
    topology: Topology,
    pools: Sequence[PoolPlan],
    load: Load,
    network: Network,
    *,
    has_prices: bool,
) -> Candidate:
    """Give each pool its fewest replicas, then add replicas until the TTFT meets its goal."""
    on_accelerator = any(pool.node.has_accelerator for pool in pools if pool.role is not E)
    block_size = capacity.block_size_of(
        has_accelerator=on_accelerator, kv_dtype=pools[0].numbers.kv_dtype
    )
    by_role = {pool.role: dataclasses.replace(pool, block_size=block_size) for pool in pools}
    states = {role: pool.fewest() for role, pool in by_role.items()}
    transfers = _embedding_seconds(by_role, load, network)
    problem = next(
        (f"{role}: {state.problem}" for role, state in states.items() if state.problem), None
    )
    if problem is None and load.ttft_ms is not None:
        problem = _add_replicas(by_role, states, load.ttft_ms / 1000, transfers)
    return Candidate(
        topology=topology,
        pools={role: (pool, states[role]) for role, pool in by_role.items()},
        cost=sum(
            states[role].replicas * ((pool.node.price or 0.0) if has_prices else 1.0)
            for role, pool in by_role.items()
        ),
        ttft=_ttft(states, transfers),
        itl=states[D].itl_p95,
        transfers=transfers,
        problem=problem,
    )


def _add_replicas(
    pools: Mapping[Role, PoolPlan], states: dict[Role, PoolState], goal: float, transfers: float
) -> str | None:
    """Add replicas where a wait shrinks most per cost; return why the goal stays out of reach."""
    least = transfers + sum(pool.state(1000).service for role, pool in pools.items())
    if least > goal:
        return f"TTFT is {least * 1000:.0f} ms without any wait, goal {goal * 1000:.0f} ms"
    for _ in range(_MAX_STEPS):
        if _ttft(states, transfers) <= goal:
            return None
        more = {role: pools[role].state(states[role].replicas + 1) for role in states}

        def gain(role: Role, more: Mapping[Role, PoolState] = more) -> float:
            before = states[role].wait + states[role].service
            saved = before - more[role].wait - more[role].service
            return saved / (pools[role].node.price or 1.0)

        role = max(states, key=gain)
        states[role] = more[role]
    return f"TTFT is {_ttft(states, transfers) * 1000:.0f} ms, goal {goal * 1000:.0f} ms"


def _ttft(states: Mapping[Role, PoolState], transfers: float) -> float:
    return transfers + sum(state.wait + state.service for state in states.values())


def _embedding_seconds(pools: Mapping[Role, PoolPlan], load: Load, network: Network) -> float:
    if E not in pools:
        return 0.0
    facts = pools[E].facts
    num_bytes = capacity.embedding_bytes(facts, load.visual_tokens(facts))
    return num_bytes / network.bytes_per_second


def _limits(candidate: Candidate) -> list[str]:
    """Return why each pool of a candidate needs its number of pods."""
    return [
        f"{candidate.topology} needs {state.replicas} {role} pods: with one fewer, {limit}."
        for role, (pool, state) in candidate.pools.items()
        if (limit := pool.limit(state.replicas))
    ]


_MONOLITHIC = (
    "Monolithic serving is enough: pods that run all stages meet every goal, and no separate pools "
    "save enough."
)


def _recommend(candidates: Sequence[Candidate]) -> tuple[Candidate | None, tuple[str, ...]]:
    """Return the choice and its reasons, in sentences."""
    good = sorted(
        (one for one in candidates if one.problem is None),
        key=lambda one: (len(one.pools), one.cost),
    )
    if not good:
        return None, tuple(f"{one.topology} does not suffice: {one.problem}." for one in candidates)
    best, reasons = good[0], []
    reasons += [
        f"{one.topology} has fewer pools but does not suffice: {one.problem}."
        for one in candidates
        if one.problem is not None and len(one.pools) < len(best.pools)
    ]
    for other in good[1:]:
        saving = 1 - other.cost / best.cost if best.cost else 0.0
        if saving >= MIN_SAVING - _TOLERANCE:
            reasons.append(f"{other.topology} costs {saving:.0%} less than {best.topology}.")
            reasons += _limits(best)
            best = other
        else:
            reasons.append(
                f"{other.topology} costs {abs(saving):.0%} {'less' if saving > 0 else 'more'} than "
                f"{best.topology}; separate pools pay from {MIN_SAVING:.0%} less."
            )
    if best.topology is Topology.DECODE:
        reasons.insert(0, _MONOLITHIC)
    return best, tuple(reasons)
