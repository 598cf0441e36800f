"""The simulated service: a gateway, its pools, and the view that an autoscaler gets."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence

from vlm_cli.simulator.computer import Computer, TurnNoise
from vlm_cli.simulator.decoder import Decoder
from vlm_cli.simulator.gateway import Gateway
from vlm_cli.simulator.hardware import Hardware, Noise
from vlm_cli.simulator.job import Clock
from vlm_cli.simulator.meters import UID as GATEWAY_UID
from vlm_cli.simulator.pods import Life
from vlm_cli.simulator.pool import Drains, Pool, Predictions, Surroundings
from vlm_operator.autoscale.policy import ServicePolicy
from vlm_operator.autoscale.view import View
from vlm_operator.names import POOL_ROLES, Role
from vlm_operator.state import Sample


class Cluster:
    """The simulated service; pools and gateway share one clock.

    Args:
        epoch: time of the clock's zero, in seconds since the epoch.
    """

    def __init__(
        self,
        policy: ServicePolicy,
        hardware: Hardware,
        *,
        seed: int,
        epoch: float,
        noise: Noise,
        drains: Drains,
    ) -> None:
        self.policy, self.epoch, self._hardware = policy, epoch, hardware
        self.clock = Clock()
        self._noise, self._rng = noise, random.Random(f"noise/{seed}")
        self._service = random.Random(f"service/{seed}")
        self._compute: dict[Role, Pool[Computer]] = {}
        self.gateway = Gateway(
            policy,
            hardware,
            self.clock,
            encoders=lambda: self._taking(Role.ENCODER),
            prefills=lambda: self._taking(Role.PREFILL),
            decoders=lambda: self._decode.taking,
        )
        around = Surroundings(
            hardware=hardware,
            clock=self.clock,
            rng=random.Random(f"starts/{seed}"),
            drains=drains,
            fits=self._fits,
            predictions=Predictions(noise, seed),
            moved=self.gateway.moved,
            changed=self.gateway.changed,
        )
        for role in (Role.ENCODER, Role.PREFILL):
            if role in policy.pools:
                self._compute[role] = Pool(policy.pools[role], around, make=self._computer)
        self._decode = Pool(policy.pools[Role.DECODE], around, make=self._decoder)
        self.pools: dict[Role, Pool[Computer] | Pool[Decoder]] = {
            **self._compute,
            Role.DECODE: self._decode,
        }

    @property
    def accelerators(self) -> int:
        """Devices that scheduled pods hold now."""
        return sum(pool.accelerators for pool in self.pools.values())

    @property
    def cost_per_hour(self) -> float:
        """Cost of the pods that are scheduled now."""
        return sum(pool.cost_per_hour for pool in self.pools.values())

    def update_pods(self) -> None:
        """Schedule, drain and remove pods of every pool."""
        for role in reversed(POOL_ROLES):
            if role in self.pools:
                self.pools[role].update_pods()

    def view(self) -> View:
        """Return the view of an autoscaler now, with noise."""
        samples: dict[str, Sample] = {}
        for pool in self.pools.values():
            for pod in pool.pods:
                if pod.life.ready_since is not None:
                    samples[pod.life.uid] = self._blurred(pod.sample(self.clock.now))
        inflight = sum(pool_pod.inflight for pool in self.pools.values() for pool_pod in pool.pods)
        samples[GATEWAY_UID] = self.gateway.meters.sample(held=self.gateway.held, inflight=inflight)
        if self._noise.loss:
            samples = {
                uid: item for uid, item in samples.items() if self._rng.random() >= self._noise.loss
            }
        return View(
            now=self.epoch + self.clock.now,
            pools={role: pool.view(self.epoch) for role, pool in self.pools.items()},
            samples=samples,
        )

    def latencies(self) -> Mapping[str, float]:
        """Return each pod's p95 latency of the last minute, in seconds, by uid."""
        found = {
            pod.life.uid: pod.p95(self.clock.now)
            for pool in self.pools.values()
            for pod in pool.pods
            if pod.life.accepting
        }
        return {uid: seconds for uid, seconds in found.items() if seconds is not None}

    def _computer(self, life: Life) -> Computer:
        encoded, prefilled = self.gateway.encoded, self.gateway.prefilled
        return Computer(
            life,
            self._hardware,
            self.clock,
            encoded=encoded,
            prefilled=prefilled,
            pace=TurnNoise(self._noise.service, self._service),
        )

    def _decoder(self, life: Life) -> Decoder:
        gateway = self.gateway
        return Decoder(
            life,
            self._hardware,
            self.clock,
            ended=gateway.ended,
            preempted=gateway.again,
            freed=gateway.freed,
            gaps=gateway.meters.gaps,
        )

    def _taking(self, role: Role) -> Sequence[Computer]:
        pool = self._compute.get(role)
        return () if pool is None else pool.taking

    def _fits(self, accelerators: int, cost: float) -> bool:
        """Whether one more pod stays within the budget, which is enforced like a quota."""
        budget = self.policy.budget
        enough = (
            budget.accelerators is None or self.accelerators + accelerators <= budget.accelerators
        )
        return enough and (
            budget.cost_per_hour is None or self.cost_per_hour + cost <= budget.cost_per_hour + 1e-9
        )

    def _blurred(self, sample: Sample) -> Sample:
        sigma = self._noise.jitter
        if not sigma:
            return sample
        factor = max(0.0, self._rng.gauss(1.0, sigma))
        kv = sample.kv
        if kv is not None:
            kv = dataclasses.replace(kv, running=min(kv.capacity, int(kv.running * factor)))
        return dataclasses.replace(
            sample, queued_work_seconds=sample.queued_work_seconds * factor, kv=kv
        )
