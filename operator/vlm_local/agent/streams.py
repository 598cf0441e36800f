"""Port-forward and exec over multiplexed streams of SPDY or WebSocket.

port-forward   an error and a data stream per connection          ─TCP▶ pod IP:port
exec           error, stdin, stdout, stderr; a Status on error    ─▶ a program in the container
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol

from .process import Process

CHUNK_BYTES = 32 << 10


class Channel(Protocol):
    """One stream of a connection to a client."""

    def received(self) -> AsyncIterator[bytes]:
        """Yield what the client sends, until it closes its half."""

    async def send(self, data: bytes) -> None:
        """Send data."""

    async def close(self) -> None:
        """Close our half."""


async def forward(data: Channel, error: Channel, *, host: str, port: int) -> None:
    """Forward one connection to a pod's port; write a failure to `error`."""
    try:
        reader, writer = await asyncio.open_connection(host, port)
    except OSError as problem:
        await error.send(f"nothing listens on port {port} of {host}: {problem}".encode())
    else:
        up = asyncio.create_task(_up(data, writer))
        try:
            await _down(reader, data)
        finally:
            up.cancel()
            await asyncio.gather(up, return_exceptions=True)
            writer.close()
    await data.close()
    await error.close()


async def execute(process: Process, argv: Sequence[str], channels: Mapping[str, Channel]) -> None:
    """Run argv in a container, with standard streams on `channels` and its Status on `error`."""
    pipe, none = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    inside = await process.enter(
        argv, **{name: pipe if name in channels else none for name in ("stdin", "stdout", "stderr")}
    )
    feeding = None
    if inside.stdin is not None:
        feeding = asyncio.create_task(_up(channels["stdin"], inside.stdin))
    try:
        outputs = [
            _down(reader, channels[name])
            for name, reader in (("stdout", inside.stdout), ("stderr", inside.stderr))
            if reader is not None
        ]
        await asyncio.gather(*outputs)
        code = await inside.wait()
        await channels["error"].send(json.dumps(exec_status(code)).encode())
    finally:
        if feeding is not None:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)
        if inside.returncode is None:
            inside.kill()
            await inside.wait()
    for channel in channels.values():
        await channel.close()


def exec_status(code: int) -> dict[str, object]:
    """Return the Status that ends an exec; kubectl reads the exit code from it."""
    if code == 0:
        return {"metadata": {}, "status": "Success"}
    return {
        "metadata": {},
        "status": "Failure",
        "reason": "NonZeroExitCode",
        "message": f"command terminated with non-zero exit code: exit status {code}",
        "details": {"causes": [{"reason": "ExitCode", "message": str(code)}]},
    }


async def _up(channel: Channel, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        async for piece in channel.received():
            writer.write(piece)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()


async def _down(reader: asyncio.StreamReader, channel: Channel) -> None:
    with contextlib.suppress(ConnectionError):
        while piece := await reader.read(CHUNK_BYTES):
            await channel.send(piece)
