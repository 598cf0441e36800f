"""A hundred services on nodes that only play status: how soon, how quietly, how small.

    RunningServices: control plane ─ status-only nodes ─ operator process, all of its own
    measure: create ─▶ settle ─▶ idle ─▶ events one by one ─▶ events all at once ─▶ Figures

The operator is timed from outside, by the audit log: from the moment that a user's write arrives to
the moment that the operator's first write about that service does.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import math
import os
import pathlib
import tempfile
import time
from collections.abc import AsyncIterator
from typing import Any

from support.audit import Audit, Process, about, moment
from support.live import Live, install
from support.world import body, pool
from vlm_local.agent.nodes import NodeType
from vlm_local.client import Client
from vlm_local.cluster import NodeAgent
from vlm_local.controlplane import ControlPlane
from vlm_local.waiting import until

NAMESPACE = "scale"
SERVICES = f"/apis/triptych.dev/v1alpha1/namespaces/{NAMESPACE}/vlmservices"
NODES = NodeType("played", cpu="100k", memory="100Ti", status_only=True)
EVENT_SECONDS = 0.1  # between two events of the row
SETTLE_SECONDS = 3.0  # without a write before anything is measured
AT_ONCE = 16  # requests of ours
CREATE_SECONDS = 6.0  # per service at most, on a machine that does other work


@dataclasses.dataclass(frozen=True)
class Load:
    """What is measured: `services` with `pods_each` pods, gateway included (4 at least)."""

    services: int
    pods_each: int
    idle_seconds: float
    resync_seconds: float = 60.0


@dataclasses.dataclass(frozen=True)
class Figures:
    """What came out.

    Attributes:
        created_seconds: until all pods served and every status said so.
        first_write_seconds: from an event to the first write that answers it, events in a row.
        burst_seconds: the same where all services change at the same moment.
        idle_writes: verb, resource, name of what was written while nothing happened, the Lease
            apart.
        idle_cpu: processor seconds per second while nothing happened.
        rss_bytes: resident memory, the highest that was ever seen.
        reads_per_turn: lists and gets, while events came one by one.
        turns_per_event: turns until all was quiet again, while events came one by one.
        lag_p99_seconds: how late the event loop came round meanwhile; a bucket's bound.
        burst_lag_p99_seconds: the same while all services changed at once.
        lapses: how often the Lease was not renewed in time.
        transitions: how often it went to another process.
        load_average: of the machine, at the end.
    """

    created_seconds: float
    first_write_seconds: list[float]
    burst_seconds: list[float]
    idle_writes: list[tuple[str, str, str]]
    idle_cpu: float
    rss_bytes: int
    reads_per_turn: float
    turns_per_event: float
    lag_p99_seconds: float
    burst_lag_p99_seconds: float
    lapses: int
    transitions: int
    load_average: float


class RunningServices:
    """A control plane, its nodes and the operator, with a client of the administrator's."""

    def __init__(self, plane: ControlPlane, live: Live, api: Client, load: Load) -> None:
        self.live = live
        self._plane = plane
        self._audit = Audit(plane)
        self._process = Process(live)
        self._api = api
        self._load = load
        self._names = [f"svc-{number:03}" for number in range(load.services)]

    async def measure(self) -> Figures:
        """Take all figures, one after another."""
        created = await self._create()
        await self._settled()
        idle_writes, idle_cpu = await self._idle()
        began, reads = self._process.meters(), self._audit.reads
        one_by_one = await self._events(0, pause=EVENT_SECONDS)
        await self._settled()
        row = self._process.meters().since(began)
        row_reads = self._audit.reads - reads
        began = self._process.meters()
        at_once = await self._events(1, pause=0.0)
        burst = self._process.meters().since(began)
        return Figures(
            created_seconds=created,
            first_write_seconds=one_by_one,
            burst_seconds=at_once,
            idle_writes=idle_writes,
            idle_cpu=idle_cpu,
            rss_bytes=self._process.peak_bytes,
            reads_per_turn=row_reads / max(1, row.turns),
            turns_per_event=row.turns / self._load.services,
            lag_p99_seconds=row.lag_quantile(0.99),
            burst_lag_p99_seconds=burst.lag_quantile(0.99),
            lapses=self._process.lapses(),
            transitions=self._transitions(),
            load_average=os.getloadavg()[0],
        )

    def _transitions(self) -> int:
        text = self._plane.kubectl(
            "-n", "triptych-system", "get", "lease", "triptych-operator",
            "-o", "jsonpath={.spec.leaseTransitions}",
        ).stdout  # fmt: skip
        return int(text)

    async def _create(self) -> float:
        began = time.monotonic()
        await self._at_once(
            [self._api.create(SERVICES, self._manifest(name)) for name in self._names]
        )

        async def all_ready() -> bool:
            found = (await self._api.get(SERVICES))["items"]
            return sum(_is_ready(item) for item in found) == self._load.services

        seconds = max(600.0, CREATE_SECONDS * self._load.services)
        await until(all_ready, seconds=seconds, awaited="every service to be Ready", every=2.0)
        return time.monotonic() - began

    async def _settled(self) -> None:
        """Wait until nobody has written about our services for a while."""
        last, since = -1, time.monotonic()
        while time.monotonic() - since < SETTLE_SECONDS:
            count = len(self._audit.writes())
            if count != last:
                last, since = count, time.monotonic()
            await asyncio.sleep(0.2)

    async def _idle(self) -> tuple[list[tuple[str, str, str]], float]:
        before, cpu = len(self._audit.writes()), self._process.cpu_seconds
        await asyncio.sleep(self._load.idle_seconds)
        used = self._process.cpu_seconds - cpu
        found = [about(entry) for entry in self._audit.writes()[before:]]
        return found, used / self._load.idle_seconds

    async def _events(self, turn: int, *, pause: float) -> list[float]:
        """One event per service, by turns a change of its spec and of a child; how long each took.

        Raises:
            TimeoutError: one was not answered.
        """
        patches = [
            self._change(name) if (index + turn) % 2 else self._disturb(name, turn)
            for index, name in enumerate(self._names)
        ]
        row = []
        for patch in patches:
            row.append(asyncio.create_task(patch))
            await asyncio.sleep(pause)
        marks = dict(zip(self._names, await asyncio.gather(*row), strict=True))
        took: dict[str, float] = {}

        async def silent() -> list[str]:
            took.update(self._answers(marks))
            return [mark for name, mark in marks.items() if name not in took]

        async def all_answered() -> bool:
            return not await silent()

        try:
            await until(all_answered, seconds=120, awaited="an answer to every event", every=0.5)
        except TimeoutError as error:
            raise TimeoutError(f"no write answers {await silent()}") from error
        return sorted(took.values())

    async def _change(self, name: str) -> str:
        """Ask for one decode pod more; no service is asked twice."""
        number = self._decodes + 1
        patch = {"spec": {"pools": {"decode": {"scaling": {"replicas": number}}}}}
        return await self._patch(f"{SERVICES}/{name}", patch)

    async def _disturb(self, name: str, turn: int) -> str:
        """Change a child without the operator."""
        path = f"/api/v1/namespaces/{NAMESPACE}/services/{name}-gateway"
        patch = {"spec": {"ports": [{"name": "http", "port": 81 + turn}]}}
        return await self._patch(path, patch)

    async def _patch(self, path: str, patch: dict[str, Any]) -> str:
        """Patch as the manager `event`; returns the path, by which the audit log is read."""
        await self._api.patch(path, patch, fieldManager="event")
        return path

    def _answers(self, marks: dict[str, str]) -> dict[str, float]:
        """Seconds from the latest event of each service to the operator's first write after it."""
        began: dict[str, float] = {}
        found: dict[str, float] = {}
        by_path = {path: name for name, path in marks.items()}
        for entry in self._audit.entries():
            path, _, query = entry["requestURI"].partition("?")
            at = moment(entry["requestReceivedTimestamp"])
            if query == "fieldManager=event" and path in by_path:
                began[by_path[path]] = at
        for entry in self._audit.writes():
            name = _service(about(entry)[2])
            late = moment(entry["requestReceivedTimestamp"]) - began.get(name, float("inf"))
            if late >= 0 and (name not in found or late < found[name]):
                found[name] = late
        return found

    async def _at_once(self, requests: list[Any]) -> None:
        gate = asyncio.Semaphore(AT_ONCE)

        async def send(request: Any) -> None:
            async with gate:
                await request

        await asyncio.gather(*(send(request) for request in requests))

    @property
    def _decodes(self) -> int:
        return self._load.pods_each - 3

    def _manifest(self, name: str) -> dict[str, Any]:
        """A gateway, an encoder, a prefill and the rest in decode; one pool is the autoscaler's."""
        auto = {"mode": "Auto", "minReplicas": 1, "maxReplicas": 4}
        found = body(
            {
                "model": {"uri": "hf://org/name", "revision": "abc"},  # no volume to be bound first
                "slo": {"ttftP95Milliseconds": 1000},
            },
            name=name,
            encoder={"scaling": auto},
            prefill=pool(1),
            decode=pool(self._decodes),
        )
        found["metadata"] = {"name": name, "namespace": NAMESPACE}
        return found


@contextlib.asynccontextmanager
async def running_services(load: Load) -> AsyncIterator[RunningServices]:
    """Start everything that a measurement needs; all of it ends with it."""
    with tempfile.TemporaryDirectory(prefix="triptych-scale-") as name:
        folder = pathlib.Path(name)
        async with ControlPlane() as plane, NodeAgent(plane, node_types=(NODES,)):
            install(plane, folder)
            plane.kubectl("create", "namespace", NAMESPACE)
            resync = f"--resync-seconds={load.resync_seconds}"
            # a comparison of a Secret is a patch that changes nothing; it would count as a write
            check = "--identity-check-seconds=86400"
            live = Live(plane, folder, resync, check, "--lease-seconds=15")
            live.start()
            try:
                async with plane.client() as api:
                    yield RunningServices(plane, live, api, load)
            finally:
                live.stop()


def quantile(values: list[float], share: float) -> float:
    """The smallest of the values that at least that share of them does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * share) - 1)]


def _is_ready(item: dict[str, Any]) -> bool:
    conditions = item.get("status", {}).get("conditions", [])
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def _service(name: str) -> str:
    """svc-007 of svc-007-decode-5d8f."""
    return "-".join(itertools.islice(name.split("-"), 2))
