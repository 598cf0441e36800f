"""A local port that leads to whichever gateway pod is ready, by kubectl, as a user would open it.

client ─▶ 127.0.0.1:port ─▶ kubectl port-forward ─▶ the pod        one kubectl per pod
                            (a port of its own)      when the pod is ready no more: another one

Open connections stay with their pod until it is gone, so that a pod that drains ends its streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from vlm_operator import names
from vlm_operator.local.errors import LocalError
from vlm_operator.local.spawn import tied

OPEN_SECONDS = 20
LOOK_SECONDS = 0.5
CHUNK_BYTES = 1 << 16


@dataclasses.dataclass(frozen=True)
class Gateways:
    """Pods by `namespace/name`: those that are there, and those of them that are ready."""

    present: frozenset[str]
    ready: tuple[str, ...]


@contextlib.asynccontextmanager
async def forward(
    kubectl: Path,
    kubeconfig: Path,
    *,
    find: Callable[[], Awaitable[Gateways | None]],
    port: int,
    say: Callable[[str], None],
) -> AsyncIterator[str]:
    """Keep `127.0.0.1:port` leading to a ready gateway while the block runs; yield the URL.

    Args:
        kubectl: The program.
        kubeconfig: Of the cluster.
        find: Lists the gateway pods; None if the cluster does not answer.
        port: The local one.
        say: Prints a line.

    Raises:
        LocalError: No gateway is ready, kubectl ended, or it did not begin in time.
    """
    command: list[Path | str] = [kubectl, f"--kubeconfig={kubeconfig}"]
    forwarder = _Forwarder(command, find, port, say)
    await forwarder.begin()
    server = await asyncio.start_server(forwarder.accept, "127.0.0.1", port)
    following = asyncio.create_task(forwarder.follow())
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.close()
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await forwarder.close()


class _Forwarder:
    """The kubectl of each pod, and which of them new connections take."""

    def __init__(
        self,
        command: list[Path | str],
        find: Callable[[], Awaitable[Gateways | None]],
        port: int,
        say: Callable[[str], None],
    ) -> None:
        self._command = command
        self._find = find
        self._port = port
        self._say = say
        self._tunnels: dict[str, _Tunnel] = {}
        self._current: str | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def begin(self) -> None:
        """Lead to a pod that is ready."""
        found = await self._find()
        if found is None or not found.ready:
            raise LocalError("No gateway pod is ready.", "")
        await self._lead_to(found.ready[0])

    async def follow(self) -> None:
        """Look again and again whether the pod is still ready; take another if it is not."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            found = await self._find()
            if found is not None:
                with contextlib.suppress(LocalError):  # asked again at the next look
                    await self._choose(found)

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one connection to the current pod; without one, close it."""
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            tunnel = self._tunnels.get(self._current or "")
            if tunnel is not None:
                # a kubectl that has just ended refuses: the client sees a closed connection
                with contextlib.suppress(OSError):
                    await _carry(reader, writer, tunnel.port)
        finally:
            self._connections.discard(task)
            writer.close()

    async def close(self) -> None:
        """End every connection and every kubectl."""
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        for tunnel in self._tunnels.values():
            await tunnel.close()

    async def _choose(self, found: Gateways) -> None:
        for pod in [pod for pod in self._tunnels if pod not in found.present]:
            await self._tunnels.pop(pod).close()
        tunnel = self._tunnels.get(self._current or "")
        if self._current in found.ready and tunnel is not None and tunnel.open:
            return
        if not found.ready:
            if self._current is not None:
                self._say(f"no gateway pod is ready: port {self._port} waits for one")
            self._current = None
            return
        await self._lead_to(found.ready[0])
        self._say(f"port {self._port} now leads to gateway pod {found.ready[0]}")

    async def _lead_to(self, pod: str) -> None:
        if pod in self._tunnels and not self._tunnels[pod].open:
            await self._tunnels.pop(pod).close()
        if pod not in self._tunnels:
            self._tunnels[pod] = await _Tunnel.to(self._command, pod)
        self._current = pod


class _Tunnel:
    """One kubectl, and the port that it listens on."""

    def __init__(self, process: Process, port: int, reading: asyncio.Task[bytes]) -> None:
        self.port = port
        self._process = process
        self._reading = reading

    @classmethod
    async def to(cls, command: list[Path | str], pod: str) -> _Tunnel:
        """Start it, on a free port that it chooses."""
        namespace, _, name = pod.partition("/")
        words = ["-n", namespace, "port-forward", f"pod/{name}", f":{names.PORT_GATEWAY}"]
        process = await asyncio.create_subprocess_exec(
            *tied([*command, *words]),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        assert process.stdout is not None
        try:
            port = await _opened(process.stdout, pod)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            raise
        # a full pipe would stop kubectl
        return cls(process, port, asyncio.create_task(process.stdout.read()))

    @property
    def open(self) -> bool:
        """Whether kubectl runs."""
        return self._process.returncode is None

    async def close(self) -> None:
        """End it."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        await self._process.wait()
        await self._reading


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
    """Copy both ways until each side has ended."""
    far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))
    finally:
        far_writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(CHUNK_BYTES):
        writer.write(chunk)
        await writer.drain()
    with contextlib.suppress(OSError):
        writer.write_eof()


async def _opened(output: asyncio.StreamReader, pod: str) -> int:
    try:
        async with asyncio.timeout(OPEN_SECONDS):
            first = (await output.readline()).decode()
    except TimeoutError as error:
        raise LocalError(f"kubectl port-forward to pod {pod} did not begin.", "") from error
    if (match := re.match(r"Forwarding from 127\.0\.0\.1:(\d+)", first)) is None:
        said = first + (await output.read()).decode()
        raise LocalError(f"kubectl port-forward to pod {pod} failed: {said.strip()}", "")
    return int(match[1])
