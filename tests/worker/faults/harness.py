"""A service of real processes for fault tests: two pods a role behind proxies, and a gateway.

    async with cluster(scale=0.1) as served:
        await served.pod("decode-0").hold("token", nth=5)
        asking = asyncio.create_task(served.ask("why?"))
        await served.pod("decode-0").until_at("token")

Pods run with arithmetic for a model and are respawned only where a fault ended them. A pod's
address is its proxy's, so that it stays the same over its lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
from worker.faults.asking import Outcome, Question, ask
from worker.faults.proxy import Proxy, proxy

ROOT = Path(__file__).parents[3]
MODEL = ROOT / "examples" / "shapes" / "model"
ROLES = ("encoder", "prefill", "decode")
LEASES = ("held", "reserved", "quarantined")
SLACK = 3  # bounds are awaited at three times the promise
START_SECONDS = 30.0
ORDER_SECONDS = 30.0
SAY_SECONDS = 20.0


class Pod:
    """One process, its proxy, and what it said."""

    def __init__(self, name: str, proxy: Proxy | None, flags: tuple[str, ...]) -> None:
        self.name = name
        self.role = name.partition("-")[0]
        self._proxy = proxy
        self._flags = flags
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._readers: list[asyncio.Task[None]] = []
        self.news = asyncio.Event()
        self._ready: asyncio.Future[dict[str, Any]] | None = None
        self.process: Process | None = None
        self.ready: dict[str, Any] = {}
        self.said: list[dict[str, Any]] = []
        self.log: list[dict[str, Any]] = []
        self.on_line: Callable[[dict[str, Any]], None] = lambda _: None

    # ---- its life ------------------------------------------------------------------------------

    async def start(self) -> None:
        """A new process, ready."""
        await self.bury()
        self._ready = asyncio.get_running_loop().create_future()
        self.said.clear()
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "worker.faults.pod", self.role, *self._flags,
            stdin=PIPE, stdout=PIPE, stderr=PIPE, limit=1 << 20, process_group=0,
            env={
                "PYTHONPATH": f"{ROOT / 'worker'}:{ROOT / 'tests'}",
                "OMP_NUM_THREADS": "1",
            },
        )  # fmt: skip
        assert self.process.stdout
        assert self.process.stderr
        self._readers = [
            asyncio.create_task(self._read(self.process.stdout, self._take)),
            asyncio.create_task(self._read(self.process.stderr, self.log.append)),
        ]
        try:
            async with asyncio.timeout(START_SECONDS):
                self.ready = await self._ready
        except TimeoutError:
            raise AssertionError(f"{self.name} does not start: {self.log[-5:]}") from None
        if self._proxy is not None:
            self._proxy.target_port = self.ready["ready"]
            self._proxy.silent = False

    async def bury(self) -> None:
        """End what is left of its process."""
        process, self.process = self.process, None
        if process is None:
            return
        if process.returncode is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
        await process.wait()
        for future in self._answers.values():
            future.cancel()
        self._answers.clear()
        await asyncio.gather(*self._readers, return_exceptions=True)
        assert process.stdin is not None
        process.stdin.close()
        process._transport.close()  # type: ignore[attr-defined]

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.returncode is None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def proxy(self) -> Proxy:
        assert self._proxy is not None
        return self._proxy

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    # ---- what it is told -----------------------------------------------------------------------

    def tell(self, **order: Any) -> asyncio.Future[Any]:
        """Send an order; the future is its result."""
        assert self.process is not None
        assert self.process.stdin is not None
        number = next(self._numbers)
        future = self._answers[number] = asyncio.get_running_loop().create_future()
        self.process.stdin.write(json.dumps({**order, "order": number}).encode() + b"\n")
        return future

    async def do(self, **order: Any) -> Any:
        """Send an order and await its result."""
        async with asyncio.timeout(ORDER_SECONDS):
            return await self.tell(**order)

    async def hold(self, stage: str, nth: int = 1, *, request: str = "") -> None:
        """Keep this request, or the next that comes there for its nth time."""
        await self.do(hold=stage, nth=nth, request=request)

    async def report(self, kind: str = "settled") -> dict[str, Any]:
        report: dict[str, Any] = await self.do(report=kind)
        return report

    async def until_said(self, **fields: str) -> dict[str, Any]:
        """Wait until it has said a line with these fields."""
        async with asyncio.timeout(SAY_SECONDS):
            while True:
                for line in self.said:
                    if fields.items() <= line.items():
                        return line
                self.news.clear()
                await self.news.wait()

    def num_said(self, key: str, value: str) -> int:
        """How many such lines there were in this life."""
        return sum(line.get(key) == value for line in self.said)

    async def until_num_said(self, key: str, value: str, num: int) -> None:
        """Wait until there were so many of them."""
        async with asyncio.timeout(SAY_SECONDS):
            while self.num_said(key, value) < num:
                self.news.clear()
                await self.news.wait()

    # ---- what it says --------------------------------------------------------------------------

    async def _read(
        self, stream: asyncio.StreamReader, take: Callable[[dict[str, Any]], None]
    ) -> None:
        async for raw in stream:
            line = raw.decode(errors="replace")
            try:
                fields = json.loads(line)
            except ValueError:
                fields = {"level": "raw", "message": line.rstrip()}  # of gRPC itself
            take(fields)

    def _take(self, line: dict[str, Any]) -> None:
        if "done" in line:
            future = self._answers.pop(line["order"], None)
            if future is not None and not future.done():
                future.set_result(line["done"])
        elif "ready" in line:
            assert self._ready is not None
            self._ready.set_result(line)
        else:
            self.said.append(line)
            self.on_line(line)
            self.news.set()


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
    if "Traceback" in str(line) or line.get("message") == "something did not come back":
        return True
    return line.get("level") == "error" and line.get("message") not in _EXPECTED


@contextlib.asynccontextmanager
async def cluster(
    *,
    scale: float = 0.1,
    counts: dict[str, int] | None = None,
    gateway_flags: tuple[str, ...] = (),
    **flags: tuple[str, ...],
) -> AsyncIterator[Cluster]:
    """A service, found by its gateway; killed at the end. `flags` are for pods, by role."""
    common = (
        f"--model={MODEL}", "--served-name=shapes", "--bind=127.0.0.1", "--block-size=4",
        "--max-model-len=1024", f"--timer-scale={scale:g}",
    )  # fmt: skip
    worker = (
        *common, "--grpc-port=0", "--http-port=0", "--runner=checksum",
        "--max-requests=48", "--max-batched-tokens=48",
    )  # fmt: skip
    names = [f"{r}-{i}" for r in ROLES for i in range((counts or {}).get(r, 2))]
    async with AsyncExitStack() as stack:
        pods = {}
        for name in names:
            role = name.partition("-")[0]
            front = await stack.enter_async_context(proxy())
            pods[name] = Pod(name, front, (*worker, *flags.get(role, ())))
            stack.push_async_callback(pods[name].bury)
        gateway = Pod(
            "gateway",
            None,
            (*common, "--http-port=0", "--admin-port=0", "--worker=127.0.0.1:1", *gateway_flags),
        )
        stack.push_async_callback(gateway.bury)
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


def state_of(pid: int) -> str:
    """As in /proc: R, S, T (stopped), Z; empty where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


async def until(holds: Callable[[], bool], *, seconds: float, what: str) -> float:
    """Wait for something that has no event; how long it took."""
    begun = time.monotonic()
    while not holds():
        assert time.monotonic() - begun < seconds, f"not within {seconds:g} s: {what}"
        await asyncio.sleep(0.005)
    return time.monotonic() - begun
