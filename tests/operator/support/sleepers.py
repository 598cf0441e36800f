"""A cluster whose gateways hold requests while no pod is there, for laws about sleep."""

from __future__ import annotations

import dataclasses
import random

from support.estimates import sample
from support.sizing import World, need, pool, service
from vlm_operator.autoscale.outcome import Decision
from vlm_operator.autoscale.policy import ServicePolicy, SleepPolicy
from vlm_operator.autoscale.view import View
from vlm_operator.names import Role

IDLE = 60.0


def sleeper(*roles: Role, idle: float = IDLE, **changes) -> ServicePolicy:
    """A service of one pool per role that sleeps after `idle` seconds."""
    pools = [pool(role) for role in roles or (Role.PREFILL, Role.DECODE)]
    return service(*pools, sleep=SleepPolicy(idle), **changes)


@dataclasses.dataclass
class Request:
    """One request: `seconds` of work, from the moment when every pool has a ready pod."""

    arrived: float
    seconds: float
    ends: float | None = None


@dataclasses.dataclass
class GatewayPod:
    """A gateway, as its own counters tell of it."""

    uid: str
    active: float  # of its present process
    requests: list[Request] = dataclasses.field(default_factory=list)
    silent: bool = False
    num_tokenizing: int = 0  # requests in flight that need no workers


class SleepWorld(World):
    """A `World` with gateways; `answered` has the wait of every request that got its answer."""

    def __init__(self, policy: ServicePolicy, *, gateways: int = 1, seed: int = 0) -> None:
        start = {role: {"a": item.minimum or 1} for role, item in policy.pools.items()}
        super().__init__(policy, start, seed)
        self.startup = 20.0
        self.gateways = [GatewayPod(f"gateway-{n}", self.now) for n in range(gateways)]
        self.answered: list[float] = []
        self.active = self.now  # the truth: when a request last existed anywhere

    @property
    def in_flight(self) -> int:
        return sum(len(item.requests) for item in self.gateways)

    @property
    def asleep(self) -> bool:
        return not any(self.numbers.values())

    def view(self) -> View:
        found = super().view()
        told = {
            item.uid: sample(
                item.uid,
                Role.GATEWAY,
                boot_id=f"{item.uid}-{item.active}",
                inflight=len(item.requests) + item.num_tokenizing,
                idle_seconds=0.0 if item.requests else max(0.0, self.now - item.active),
                waiting_for_wake=sum(one.ends is None for one in item.requests),
            )
            for item in self.gateways
            if not item.silent
        }
        uids = tuple(item.uid for item in self.gateways)
        return dataclasses.replace(found, samples={**found.samples, **told}, gateways=uids)

    def ask(self, gateway: GatewayPod, seconds: float = 3.0) -> None:
        """A request arrives now."""
        gateway.requests.append(Request(self.now, seconds))
        self._route()

    def restart(self, gateway: GatewayPod) -> None:
        """Its process ends with all its requests, and another one starts."""
        gateway.requests.clear()
        gateway.active = self.now

    def turn(self, seconds: float = 5.0) -> dict[Role, Decision]:
        """One turn of the operator; then time passes."""
        needs = [need(0.5, role) for role in self.policy.pools]
        found = self.tick(needs, seconds=0.0)
        self.pass_time(seconds)
        return found

    def pass_time(self, seconds: float) -> None:
        """Let pods start and requests end."""
        passed = 0.0
        while passed < seconds:
            step = min(1.0, seconds - passed)
            passed += step
            self.advance(step)
            self._route()

    def _route(self) -> None:
        open_roles = {item.role for item in self.pods if item.phase in ("ready", "draining")}
        for gateway in self.gateways:
            for one in gateway.requests:
                if one.ends is None and open_roles >= self.policy.pools.keys():
                    one.ends = self.now + one.seconds
            ended = [one for one in gateway.requests if (one.ends or 1e18) <= self.now]
            if gateway.requests:
                gateway.active = self.active = self.now
            for one in ended:
                gateway.requests.remove(one)
                self.answered.append(self.now - one.seconds - one.arrived)


def random_life(rng: random.Random) -> SleepWorld:
    """A made-up service that may sleep."""
    roles = rng.choice(
        [(Role.DECODE,), (Role.PREFILL, Role.DECODE), (Role.ENCODER, Role.PREFILL, Role.DECODE)]
    )
    world = SleepWorld(
        sleeper(*roles, idle=rng.choice([10.0, 60.0])),
        gateways=rng.randint(1, 3),
        seed=rng.randrange(2**32),
    )
    world.startup = rng.choice([2.0, 20.0])
    return world
