"""Samples of pods and gateways of a generated service: changing load, silence, invalid numbers."""

import dataclasses
import math
import random

from support.estimates import TICK, sample
from vlm_operator.autoscale.view import View
from vlm_operator.names import Role
from vlm_operator.state import ItlHistogram, KvTokens, Sample, StageSeconds, Ttft, WorkCounters

KINDS = {Role.ENCODER: "encode", Role.PREFILL: "prefill", Role.DECODE: "decode"}
STAGES = (("prefill_queue", 1.0), ("decode_reserve", 0.5), ("prefill", 0.3), ("encode", 0.2))


class Reports:
    """Counters of pods that restart, do not answer for some ticks, or contradict themselves.

    Attributes:
        strange: uids of pods that report more KV in use at this tick than they have.
    """

    def __init__(self, rng: random.Random) -> None:
        self.random = rng
        self.level = 1.0
        self.work: dict[str, float] = {}
        self.boots: dict[str, int] = {}
        self.silent: dict[str, int] = {}  # ticks that are left
        self.outage = 0
        self.gateways = {"gateway-0": [0, 0], "gateway-1": [0, 0]}  # requests, missed
        self.strange: set[str] = set()

    def on(self, view: View) -> View:
        """Return the view with other samples."""
        rng = self.random
        if rng.random() < 0.05:
            self.level = rng.choice([0.0, 0.2, 1.0, 3.0])
        self.outage = self.outage - 1 if self.outage else (rng.random() < 0.001) * 80
        self.strange = set()
        samples = {
            uid: self._worker(item) for uid, item in view.samples.items() if self._answers(uid)
        }
        samples |= {uid: self._gateway(uid) for uid in self.gateways if self._answers(uid)}
        if rng.random() < 0.05:  # a pod that is gone
            samples["ghost"] = self._worker(sample("ghost", rng.choice(list(KINDS))))
        return dataclasses.replace(view, samples=samples)

    def _answers(self, uid: str) -> bool:
        left = self.silent.get(uid, 0)
        if not left and self.random.random() < 0.005:
            left = self.random.randint(1, 12)
        self.silent[uid] = max(0, left - 1)
        return not left and not self.outage

    def _used(self, uid: str, plain: int) -> int:
        if self.random.random() >= 0.005:
            return plain
        self.strange.add(uid)
        return 1_000_000

    def _boot(self, uid: str) -> str:
        if self.random.random() < 0.005:
            self.boots[uid] = self.boots.get(uid, 0) + 1
            self.work[uid] = 0.0
        return f"{uid}-{self.boots.get(uid, 0)}"

    def _worker(self, item: Sample) -> Sample:
        rng, uid = self.random, item.pod_uid
        boot = self._boot(uid)
        if rng.random() < 0.002:
            self.work[uid] = self.work.get(uid, 0.0) / 2  # a counter that fell
        done = self.work[uid] = self.work.get(uid, 0.0) + TICK * self.level * rng.random()
        used = min(9_900, round(6_000 * self.level * rng.random()))
        busy = WorkCounters(done, round(done), round(done), round(100 * done), 7000 * done)
        return dataclasses.replace(
            item,
            boot_id=boot,
            inflight=used // 300,
            kv=KvTokens(
                10_000, self._used(uid, used), 100, 0, 9_900 - used, round(2_000 * self.level)
            ),
            queued_work_seconds=3 * self.level * rng.random(),
            started_work_seconds=done,
            busy={KINDS[item.role]: busy},
        )

    def _gateway(self, uid: str) -> Sample:
        boot, counted = self._boot(uid), self.gateways[uid]
        counted[0] += self.random.randint(0, 20)
        counted[1] = min(counted[0], counted[1] + (self.random.random() < 0.1))
        most, missed = counted
        met = most - missed
        stages = {name: StageSeconds(met * 0.1, missed * share) for name, share in STAGES}
        buckets = {0.5: met, 1.0: met, math.inf: most}
        return sample(
            uid,
            Role.GATEWAY,
            boot_id=boot,
            ttft={"text": Ttft(most, missed, 0.5 * most, buckets, stages)},
            gaps=ItlHistogram(most, {0.05: met, math.inf: most}),
            held_for={"decode": self.random.randint(0, 3)} if self.level > 1 else {},
        )
