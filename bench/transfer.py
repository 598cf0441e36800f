"""KV and embeddings between the memory of two processes, against TCP and memcpy.

    python bench/run.py transfer         python bench/transfer.py [--rounds 7]

One process offers units from a pool (`Producer`). Another fetches them over a data connection or
gRPC, writes them into its pool and checks every digest. As in engines, the threads of the transfer
gather and write blocks and notify another thread. Rows are contiguous. The frames of the embedding
are built before the fetch (`Producer.prebuild_frames`) and not timed, unless `built on request`.
`TLS` ways use mutual TLS 1.3, on connections that are open; `handshake` is what opening one takes.
In the same rounds, a raw TCP connection of the two processes does `recv_into` into that pool, and
one thread copies the same bytes with memcpy. A ratio compares speeds within a round.

    embedding   576 rows of 8 KiB                       stream          / TCP       goal 0.7
    KV          175 blocks of 2 MiB, 350 MB             shared memory   / memcpy    goal 0.4
                                                        stream, TLS     / stream    goal 0.9
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
from identities import Authority
from transfer_producer import (
    BOOT,
    BUFFER_BYTES,
    FINGERPRINT,
    KEY,
    LOADS,
    filled,
    shared_memory,
)

from vlm_worker.client import WorkerClient
from vlm_worker.serve.process import set_malloc_thresholds
from vlm_worker.settings.timers import PRODUCTION
from vlm_worker.transfer.consumer import Pull, WriteWindow, checked_units
from vlm_worker.transfer.data_connections import DataConnectionPool, FetchThreads
from vlm_worker.transfer.transport import ByteStream, Transport
from vlm_worker.types import Role
from vlm_worker.wire.buffers import DestinationBuffers
from vlm_worker.wire.data_protocol import Fetch
from vlm_worker.wire.frame_reader import FrameReader
from vlm_worker.wire.frames import TransferId, Units
from vlm_worker.wire.identity_store import IdentityStore
from vlm_worker.wire.messages import FetchCall
from vlm_worker.wire.sockets import open_data_connection

PRODUCER = Path(__file__).with_name("transfer_producer.py")
Received = AsyncGenerator[Units]
AHEAD = ("stream", "shared-memory", "stream, TLS")
BOTH = (*AHEAD, "memcpy", "tcp", "grpc", "grpc, TLS")
"""The ways of both loads."""
GOALS = {
    "stream": ("tcp", 0.7),
    "shared-memory": ("memcpy", 0.4),
    "stream, TLS": ("stream", 0.9),
    "grpc, TLS": ("stream", 0.9),
}
NUM_HANDSHAKES = 20
TICKS = os.sysconf("SC_CLK_TCK")


class Consumer:
    """All ways to fill `pool`."""

    def __init__(self, directory: Path, ports: tuple[int, int, int, int, int]) -> None:
        grpc_port, data_port, raw_port, secure_grpc_port, self._secure_port = ports
        self._identity = IdentityStore(directory, Role.DECODE)
        self._client = WorkerClient(f"127.0.0.1:{grpc_port}")
        self._secure_client = WorkerClient(f"127.0.0.1:{secure_grpc_port}", identity=self._identity)
        self._threads = FetchThreads()
        self._link = DataConnectionPool("127.0.0.1:0", self._threads, PRODUCTION)
        self._link.learn(data_port)
        self._secure_link = DataConnectionPool(
            "127.0.0.1:0", self._threads, PRODUCTION, identity=self._identity
        )
        own = self._identity.now.identity
        self._peer = dataclasses.replace(own, role=Role.PREFILL)
        self._secure_link.learn(self._secure_port, self._peer)
        self._raw = socket.socket()
        self._raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        self._raw.connect(("127.0.0.1", raw_port))
        self._shared = shared_memory()
        self._sources = {name: filled(load) for name, load in LOADS.items()}
        self._pools = {name: np.zeros_like(pool) for name, pool in self._sources.items()}
        self.ways: dict[str, Callable[[str], Awaitable[None]]] = {
            "memcpy": self._memcpy,
            "tcp": self._tcp,
            "stream": lambda name: self._pull(name, ByteStream(), self._link.units),
            "stream, TLS": lambda name: self._pull(name, ByteStream(), self._secure_link.units),
            "grpc": lambda name: self._pull(name, ByteStream(), self._over(self._client)),
            "grpc, TLS": lambda name: self._pull(
                name, ByteStream(), self._over(self._secure_client)
            ),
            "shared-memory": lambda name: self._pull(name, self._shared, self._link.units),
        }
        for way in AHEAD:
            self.ways[f"{way}, built on request"] = self.ways[way]

    def prebuild_frames(self, name: str, way: str) -> None:
        """Prebuild the frames of an embedding, as encoders do."""
        if way in AHEAD and not LOADS[name].is_scattered:
            transport = self._shared if way == "shared-memory" else ByteStream()
            self._raw.sendall(f"{name} {transport.name}\n".encode())
            assert self._raw.recv(1) == b"1"

    def check(self, name: str) -> None:
        """Check that a pool has all data of its source, and clear it."""
        assert np.array_equal(self._pools[name], self._sources[name]), name
        self._pools[name][:] = 0

    async def close(self) -> None:
        """Close all connections."""
        self._raw.close()
        self._shared.close()
        self._link.close()
        self._secure_link.close()
        self._threads.close()
        await self._client.close()
        await self._secure_client.close()

    async def handshake(self, *, is_secure: bool) -> None:
        """Open a connection to the secure port, with or without its handshake."""
        secured = (self._identity.now, self._peer) if is_secure else None
        connection = await open_data_connection("127.0.0.1", self._secure_port, PRODUCTION, secured)
        connection.close()

    async def _memcpy(self, name: str) -> None:
        np.copyto(self._pools[name], self._sources[name])

    async def _tcp(self, name: str) -> None:
        self._raw.sendall(f"{name}\n".encode())
        left = self._pools[name].reshape(-1).data
        while left:
            left = left[self._raw.recv_into(left) :]

    def _over(self, client: WorkerClient) -> Callable[[Fetch, FetchCall, FrameReader], Received]:
        def units(fetch: Fetch, call: FetchCall, reader: FrameReader) -> Received:
            frames = client.fetch(fetch, call, timeout=60)
            return checked_units(frames, reader, peer="bench", no_progress_seconds=10)

        return units

    async def _pull(
        self,
        name: str,
        transport: Transport,
        over: Callable[[Fetch, FetchCall, FrameReader], Received],
    ) -> None:
        load, pool = LOADS[name], self._pools[name]
        call = FetchCall(
            transfer_id=name,
            boot_id=BOOT,
            fingerprint=FINGERPRINT,
            key=KEY,
            first_unit=0,
            transport=transport.name,
            invitation=transport.invitation(),
        )
        reader = FrameReader(
            TransferId(KEY, name, BOOT, FINGERPRINT),
            unit_bytes=load.unit_bytes,
            first_unit=0,
            end_unit=load.num_units,
            open_memory=lambda _, opening, num_bytes: transport.view(opening, num_bytes),
            into=DestinationBuffers([row.data for row in pool], reports_progress=True)
            if load.is_scattered
            else DestinationBuffers([pool.reshape(-1).data]),
        )
        pull = Pull(over(Fetch.KV, call, reader), reader, peer="bench")

        if not load.is_scattered:  # rows are used only after the commit, as in prefill
            async with aclosing(pull.units()) as received:
                async for _ in received:
                    pass
            return
        missing = set(range(load.num_units))

        def confirm(units: Units) -> None:
            missing.difference_update(range(units.first_unit, units.first_unit + units.num_units))

        async def tell(units: Units) -> None:
            await asyncio.to_thread(confirm, units)

        async with WriteWindow(tell) as window, aclosing(pull.units()) as received:
            async for units in received:
                await window.put(units)
            await window.flush()
        assert not missing


async def consume(num_rounds: int, directory: Path) -> None:
    """Alternate between all ways, round by round; the first round is a warm-up."""
    authority = Authority(directory)
    producer = subprocess.Popen(  # noqa: ASYNC220  before anything runs
        [sys.executable, PRODUCER, authority.pair("prefill")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert producer.stdout is not None
    consumer = Consumer(authority.pair("decode"), json.loads(producer.stdout.readline()))
    seconds: dict[tuple[str, str], list[float]] = {}
    processor: dict[tuple[str, str], list[float]] = {}
    for number in range(num_rounds + 1):
        for name, load in LOADS.items():
            for way, fill in consumer.ways.items():
                if load.is_scattered and way not in BOTH:
                    continue  # KV is never prebuilt
                taken = 0.0
                busy = processor_seconds(producer.pid)
                for _ in range(load.repeats):
                    consumer.prebuild_frames(name, way)
                    began = time.perf_counter()
                    await fill(name)
                    taken += (time.perf_counter() - began) / load.repeats
                busy = processor_seconds(producer.pid) - busy
                if not number:
                    consumer.check(name)
                else:
                    seconds.setdefault((name, way), []).append(taken)
                    processor.setdefault((name, way), []).append(busy / load.repeats)
    opened: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(NUM_HANDSHAKES):
        for is_secure, taken_by in opened.items():
            began = time.perf_counter()
            await consumer.handshake(is_secure=is_secure)
            taken_by.append(time.perf_counter() - began)
    await consumer.close()
    producer.communicate()
    handshake = statistics.median(opened[True]) - statistics.median(opened[False])
    print(
        json.dumps(
            {"bench": "transfer", "what": "handshake", "opening ms": round(1e3 * handshake, 2)}
        )
    )
    for name in LOADS:
        found = {way: some for (what, way), some in seconds.items() if what == name}
        cpu = {way: statistics.median(s) for (what, way), s in processor.items() if what == name}
        cpu = {way: round(1e3 * one, 1) for way, one in cpu.items()}
        print(json.dumps({**figures(name, found), "cpu ms": cpu}))


def processor_seconds(other: int) -> float:
    """What this process and another one have used; the kernel counts in ticks."""
    fields = Path(f"/proc/{other}/stat").read_text().rpartition(")")[2].split()
    return time.process_time() + (int(fields[11]) + int(fields[12])) / TICKS


def figures(name: str, seconds: dict[str, list[float]]) -> dict[str, Any]:
    """One line of the report."""
    num_bytes = LOADS[name].num_bytes
    line: dict[str, Any] = {"bench": "transfer", "what": name, "bytes": num_bytes}
    line["ms"] = {way: round(1e3 * statistics.median(s), 2) for way, s in seconds.items()}
    line["GB/s"] = {
        way: round(num_bytes / statistics.median(s) / 1e9, 2) for way, s in seconds.items()
    }
    for way, (limit, goal) in GOALS.items():
        pairs = zip(seconds[limit], seconds[way], strict=True)
        ratio = statistics.median(least / taken for least, taken in pairs)
        line[f"{way} / {limit}"] = {"ratio": round(ratio, 3), "goal": goal, "met": ratio >= goal}
    return line


def main() -> None:
    """Print both loads."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    set_malloc_thresholds({})  # as vlm-worker does
    with tempfile.TemporaryDirectory(prefix="triptych-bench-") as made:
        asyncio.run(consume(args.rounds, Path(made) / "certificates"))


if __name__ == "__main__":
    main()
