"""A service of real processes for fault tests: two pods a role behind proxies, and a gateway.

    async with cluster(scale=0.1) as served:
        await served.pod("decode-0").hold("token", nth=5)
        asking = asyncio.create_task(served.ask("why?"))
        await served.pod("decode-0").until_at("token")

Pods run with arithmetic for a model where not told otherwise, and are respawned only where a fault
ended them. A pod's address and data port are its proxy's, so that they stay over its lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
from worker.faults.asking import Outcome, Question, ask
from worker.faults.process import ROOT, Pod
from worker.faults.proxy import proxy

MODEL = ROOT / "examples" / "shapes" / "model"
ROLES = ("encoder", "prefill", "decode")
LEASES = ("held", "reserved", "quarantined")
SLACK = 3  # bounds are awaited at three times the promise


@dataclasses.dataclass
class Cluster:
    """All of them. `pods` are in the order of names; the gateway is apart."""

    pods: dict[str, Pod]
    gateway: Pod
    session: aiohttp.ClientSession
    accepting: dict[str, bool] = dataclasses.field(default_factory=dict)

    def pod(self, name: str) -> Pod:
        return self.pods[name]

    @property
    def url(self) -> str:
        return str(self.gateway.ready["ready"])

    async def ask(self, question: Question, *, seconds: float = 60.0, **more: Any) -> Outcome:
        """One request to its last word, or to the end of the client's patience."""
        return await ask(self.session, self.url, question, seconds=seconds, **more)

    async def accept(self, *names: str) -> None:
        """Only these pods get new requests, as far as there are others."""
        self.accepting = {name: name in names for name in self.pods}
        await self._apply()

    async def accept_all(self) -> None:
        await self.accept(*self.pods)

    async def _apply(self) -> None:
        pods = [
            {"name": name, "address": pod.proxy.address, "accepting": self.accepting[name]}
            for name, pod in self.pods.items()
        ]
        await self.gateway.do(pods=pods)

    async def respawn(self) -> None:
        """Start again what has ended, and wait until the gateway knows everybody."""
        dead = [pod for pod in self.pods.values() if not pod.alive]
        await asyncio.gather(*(pod.start() for pod in dead))
        await self.until_found()

    async def until_found(self, *, seconds: float = 20.0) -> None:
        """The gateway knows the present life of every pod that lives."""
        wanted = {name: pod.ready["boot"] for name, pod in self.pods.items() if pod.alive}
        boots: dict[str, str] = {}
        deadline = time.monotonic() + seconds
        while boots != wanted:
            assert time.monotonic() < deadline, (boots, wanted)
            await asyncio.sleep(0.02)
            boots = (await self.gateway.report("now"))["boots"]

    async def reports(self, kind: str = "settled") -> dict[str, dict[str, Any]]:
        """What every process that lives has; "now" collects no garbage first."""
        pods = [*self.pods.values(), self.gateway]
        alive = [pod for pod in pods if pod.alive]
        found = await asyncio.gather(*(pod.report(kind) for pod in alive))
        return {pod.name: report for pod, report in zip(alive, found, strict=True)}

    async def until_idle(self, *, seconds: float) -> float:
        """Nothing is owed to anybody, anywhere; how long it took."""
        begun = time.monotonic()
        while left := owing(await self.reports()):
            took = time.monotonic() - begun
            assert took < seconds, f"after {took:.1f} s there is still {left}"
            await asyncio.sleep(0.05)
        return time.monotonic() - begun

    def errors(self) -> list[str]:
        """What any process said that it should not: tracebacks and broken invariants."""
        return [
            f"{pod.name}: {line}"
            for pod in (*self.pods.values(), self.gateway)
            for line in pod.log
            if _bad(line)
        ]


def owing(reports: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Of each process, what it still holds."""
    left: dict[str, dict[str, Any]] = {}
    for name, report in reports.items():
        held: dict[str, Any] = {
            key: report[key]
            for key in ("inflight", "calls", "pinned", "held_at_peers")
            if report.get(key)
        }
        leases = report.get("leases") or {}
        held |= {key: leases[key] for key in LEASES if leases.get(key)}
        kv = report.get("kv")
        if kv and kv["free_tokens"] + kv["cached_tokens"] != kv["capacity_tokens"]:
            held["kv"] = kv
        if held:
            left[name] = held
    return left


_EXPECTED = ("request lost", "drain deadline")


def _bad(line: dict[str, Any]) -> bool:
    if line.get("logger") == "grpc._cython.cygrpc":  # a reply that found its caller gone
        return False
    if "Traceback" in str(line) or line.get("message") == "resources not freed":
        return True
    return line.get("level") == "error" and line.get("message") not in _EXPECTED


@contextlib.asynccontextmanager
async def cluster(
    *,
    scale: float = 0.1,
    counts: dict[str, int] | None = None,
    gateway_flags: tuple[str, ...] = (),
    runner: str = "checksum",
    **flags: tuple[str, ...],
) -> AsyncIterator[Cluster]:
    """A service, found by its gateway; killed at the end. `flags` are for pods, by role."""
    common = (
        f"--model={MODEL}", "--served-name=shapes", "--bind=127.0.0.1", "--block-size=4",
        "--max-model-len=1024", f"--timer-scale={scale:g}",
    )  # fmt: skip
    worker = (
        *common, "--grpc-port=0", "--http-port=0", f"--runner={runner}",
        "--max-requests=48", "--max-batched-tokens=48",
    )  # fmt: skip
    names = [f"{r}-{i}" for r in ROLES for i in range((counts or {}).get(r, 2))]
    async with AsyncExitStack() as stack:
        pods = {}
        for name in names:
            role = name.partition("-")[0]
            front = await stack.enter_async_context(proxy())
            data = f"--announced-data-port={front.data.port}"
            pods[name] = Pod(name, front, (*worker, data, *flags.get(role, ())))
            stack.push_async_callback(pods[name].stop)
        gateway = Pod(
            "gateway",
            None,
            (*common, "--http-port=0", "--admin-port=0", "--worker=127.0.0.1:1", *gateway_flags),
        )
        stack.push_async_callback(gateway.stop)
        await asyncio.gather(*(pod.start() for pod in (*pods.values(), gateway)))
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None),
        )
        await stack.enter_async_context(session)
        served = Cluster(pods, gateway, session)
        await served.accept_all()
        await served.until_found()
        yield served
        assert not served.errors(), served.errors()
