"""One process under test: started, told what to hold, listened to, and ended."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from pathlib import Path
from typing import Any

from worker.faults.proxy import Proxy

from vlm_local.subprocesses import tied

ROOT = Path(__file__).parents[3]
START_SECONDS = 60.0
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
        await self.stop()
        self._ready = asyncio.get_running_loop().create_future()
        self.said.clear()
        self.process = await asyncio.create_subprocess_exec(
            *tied([sys.executable, "-m", "worker.faults.pod", self.role, *self._flags]),
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
            self._proxy.grpc.target_port = self.ready["ready"]
            self._proxy.data.target_port = self.ready["data"]
            self._proxy.mend()

    async def stop(self) -> None:
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
            while (line := self.find(**fields)) is None:
                self.news.clear()
                await self.news.wait()
            return line

    def find(self, **fields: str) -> dict[str, Any] | None:
        """The first line with these fields that it said in this life; `heard` is when."""
        return next((line for line in self.said if fields.items() <= line.items()), None)

    def drains(self, since: int) -> bool:
        """Whether it has logged so, from this line of its log on."""
        return any(line.get("message") == "draining" for line in self.log[since:])

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
            self.said.append(line | {"heard": time.monotonic()})
            self.on_line(line)
            self.news.set()


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
