"""The simulated service: a gateway, its pools, and the `View` that an autoscaler decides from."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence

from vlm_cli.simulator.compute_pod import ComputePod, StepNoise
from vlm_cli.simulator.decode_pod import DecodePod
from vlm_cli.simulator.gateway import Gateway
from vlm_cli.simulator.gateway_metrics import UID as GATEWAY_UID
from vlm_cli.simulator.hardware import Hardware, Noise
from vlm_cli.simulator.job import Clock
from vlm_cli.simulator.pod import Lifecycle
from vlm_cli.simulator.pool import Drains, Pool, PoolContext, Predictions
from vlm_operator.autoscale.policy import ServicePolicy
from vlm_operator.autoscale.view import View
from vlm_operator.names import POOL_ROLES, Role
from vlm_operator.state import Sample


class Cluster:
    """The simulated service; pools and gateway share one clock.

    Args:
        epoch: Unix time of the clock's zero, in seconds.
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
        self._step_rng = random.Random(f"service/{seed}")
        self._compute: dict[Role, Pool[ComputePod]] = {}
        self.gateway = Gateway(
            policy,
            hardware,
            self.clock,
            encoders=lambda: self._accepting(Role.ENCODER),
            prefills=lambda: self._accepting(Role.PREFILL),
            decoders=lambda: self._decode.accepting,
        )
        context = PoolContext(
            hardware=hardware,
            clock=self.clock,
            rng=random.Random(f"starts/{seed}"),
            drains=drains,
            fits=self._fits,
            predictions=Predictions(noise, seed),
            reroute=self.gateway.reroute,
            accepting_changed=self.gateway.accepting_changed,
        )
        for role in (Role.ENCODER, Role.PREFILL):
            if role in policy.pools:
                self._compute[role] = Pool(policy.pools[role], context, make=self._compute_pod)
        self._decode = Pool(policy.pools[Role.DECODE], context, make=self._decode_pod)
        self.pools: dict[Role, Pool[ComputePod] | Pool[DecodePod]] = {
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
        """Return the autoscaler's view now, with lost samples and jitter."""
        samples: dict[str, Sample] = {}
        for pool in self.pools.values():
            for pod in pool.pods:
                if pod.lifecycle.ready_since is not None:
                    samples[pod.lifecycle.uid] = self._with_jitter(pod.sample())
        inflight = sum(pod.inflight for pool in self.pools.values() for pod in pool.pods)
        samples[GATEWAY_UID] = self.gateway.metrics.sample(
            held=self.gateway.held,
            inflight=inflight,
            asleep=self.gateway.asleep,
            idle_seconds=self.gateway.idle_seconds,
        )
        if self._noise.loss:
            samples = {
                uid: item for uid, item in samples.items() if self._rng.random() >= self._noise.loss
            }
        return View(
            now=self.epoch + self.clock.now,
            pools={role: pool.view(self.epoch) for role, pool in self.pools.items()},
            samples=samples,
            gateways=(GATEWAY_UID,),
        )

    def latencies(self) -> Mapping[str, float]:
        """Return each pod's p95 latency of the last minute, in seconds, by uid."""
        found = {
            pod.lifecycle.uid: pod.p95(self.clock.now)
            for pool in self.pools.values()
            for pod in pool.pods
            if pod.lifecycle.accepting
        }
        return {uid: seconds for uid, seconds in found.items() if seconds is not None}

    def _compute_pod(self, lifecycle: Lifecycle) -> ComputePod:
        encoded, prefilled = self.gateway.encoded, self.gateway.prefilled
        return ComputePod(
            lifecycle,
            self._hardware,
            self.clock,
            encoded=encoded,
            prefilled=prefilled,
            noise=StepNoise(self._noise.service, self._step_rng),
        )

    def _decode_pod(self, lifecycle: Lifecycle) -> DecodePod:
        gateway = self.gateway
        return DecodePod(
            lifecycle,
            self._hardware,
            self.clock,
            ended=gateway.ended,
            preempted=gateway.recompute,
            freed=gateway.freed,
            itl_counts=gateway.metrics.itl_counts,
        )

    def _accepting(self, role: Role) -> Sequence[ComputePod]:
        pool = self._compute.get(role)
        return () if pool is None else pool.accepting

    def _fits(self, accelerators: int, cost: float) -> bool:
        """Whether the budget allows one more scheduled pod; it acts like a ResourceQuota."""
        budget = self.policy.budget
        within_accelerators = (
            budget.accelerators is None or self.accelerators + accelerators <= budget.accelerators
        )
        return within_accelerators and (
            budget.cost_per_hour is None or self.cost_per_hour + cost <= budget.cost_per_hour + 1e-9
        )

    def _with_jitter(self, sample: Sample) -> Sample:
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
