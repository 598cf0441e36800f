"""The worker's end of one decode child: start it, give it a file, learn pixels or how it died."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from typing import Self

from vlm_worker.core.geometry import Geometry
from vlm_worker.errors import EngineError
from vlm_worker.media.frames import READY, ChildConfig, Done, Job

START_SECONDS = 30.0
BUFFER_BYTES = 1 << 20

MAX_ERROR_BYTES = 4096

# Others (the kernel's OOM killer, a person) end a child with these: the picture is not to blame.
OUTSIDE_SIGNALS = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT})


class ChildDiedError(Exception):
    """The child ended in the middle of a job.

    `returncode` is the process's, negative for a signal. `blameless` is True where something
    outside ended or froze it, so that the job deserves another child.
    """

    def __init__(self, returncode: int, *, blameless: bool) -> None:
        super().__init__(f"the decode child ended with {returncode}")
        self.returncode = returncode
        self.blameless = blameless


class DecodeChild:
    """One process. Its owner runs one job at a time and closes it."""

    def __init__(self, process: subprocess.Popen[bytes], channel: socket.socket) -> None:
        self._process = process
        self._channel = channel

    @property
    def pid(self) -> int:
        """Process id, for logs and tests."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    @classmethod
    async def start(cls, config: ChildConfig) -> Self:
        """Start a process and wait until it is ready; raises EngineError where it is not."""
        ours, theirs = socket.socketpair()
        with theirs:
            for end in (ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
            ours.setblocking(False)
            process = _spawn(config, theirs)
        child = cls(process, ours)
        try:
            ready = await asyncio.wait_for(child._receive(len(READY)), START_SECONDS)
        except (TimeoutError, EOFError, OSError) as error:
            child.close()
            raise EngineError(
                f"the decode child did not start (exit status {process.returncode})"
            ) from error
        except BaseException:
            child.close()
            raise
        if bytes(ready) != READY:
            child.close()
            raise EngineError("the decode child speaks another protocol")
        return child

    async def run(
        self,
        job: Job,
        data: bytes | memoryview,
        *,
        expected: Geometry,
        timeout_seconds: float,
    ) -> tuple[Done, bytearray]:
        """Run one job; the second value is the pixels, or the error's text.

        A child may be in the hands of the file that it reads: an answer of another shape than
        `expected` ends it, before a byte is allocated on its word.

        Raises:
            ChildDiedError: the process ended before it answered, or overran the timeout.
        """
        try:
            async with asyncio.timeout(timeout_seconds):
                loop = asyncio.get_running_loop()
                await loop.sock_sendall(self._channel, job.pack())
                await loop.sock_sendall(self._channel, data)
                done = Done.unpack(bytes(await self._receive(Done.SIZE)))
                if _is_sound(done, expected):
                    return done, await self._receive(done.num_bytes)
        except TimeoutError as error:
            # its CPU limit comes first, so it was frozen, or starved by its neighbours
            self._process.kill()
            raise ChildDiedError(await self._wait(), blameless=True) from error
        except (EOFError, OSError) as error:
            returncode = await self._wait()
            blameless = -returncode in OUTSIDE_SIGNALS
            raise ChildDiedError(returncode, blameless=blameless) from error
        self._process.kill()
        raise ChildDiedError(await self._wait(), blameless=False)

    def close(self) -> None:
        """End the process at once; it holds nothing that needs saving."""
        self._channel.close()
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    async def _wait(self) -> int:
        return await asyncio.to_thread(self._process.wait)

    async def _receive(self, num_bytes: int) -> bytearray:
        loop = asyncio.get_running_loop()
        buffer = bytearray(num_bytes)
        view = memoryview(buffer)
        while view:
            count = await loop.sock_recv_into(self._channel, view)
            if not count:
                raise EOFError
            view = view[count:]
        return buffer


def _is_sound(done: Done, expected: Geometry) -> bool:
    if not done.ok:
        return done.num_bytes <= MAX_ERROR_BYTES
    return (done.grid_thw, done.num_tokens, done.num_bytes) == (
        expected.grid_thw,
        expected.num_tokens,
        3 * expected.height * expected.width,
    )


def _spawn(config: ChildConfig, channel: socket.socket) -> subprocess.Popen[bytes]:
    """Exec, never fork: nothing of the worker's memory, descriptors or environment goes along."""
    module = "vlm_worker.media.decode_child"
    return subprocess.Popen(  # noqa: S603 - our own interpreter and module
        # -W: a library's warnings about hostile bytes are no news for the worker's log
        [sys.executable, "-P", "-S", "-W", "ignore", "-m", module, config.to_json()],
        stdin=channel.fileno(),
        stdout=subprocess.DEVNULL,
        env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OPENBLAS_NUM_THREADS": "1"},
        close_fds=True,
        start_new_session=True,
    )
