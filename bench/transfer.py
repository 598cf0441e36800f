"""KV and embeddings from one process into the memory of another, over what the machine could do.

    python bench/run.py transfer         python bench/transfer.py [--rounds 7]

One process offers units out of a pool (`Outgoing`), another pulls them over a data connection or
gRPC, checks every digest and writes them into a pool of its own. Blocks are gathered and scattered
by a thread each, as engines do it; rows lie side by side. In the same rounds a raw TCP
connection of the same two processes does `recv_into` into that pool, and one thread copies so many
bytes by memcpy. A ratio is of speeds within a round.

    embedding   576 rows of 8 KiB                       stream          / TCP       goal 0.7
    KV          175 blocks of 2 MiB, 350 MB             shared memory   / memcpy    goal 0.4
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import ExitStack, aclosing
from pathlib import Path
from typing import Any

import grpc
import numpy as np

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "worker"), str(ROOT / "kernels")]

from vlm_kernels.cpu import native  # noqa: E402
from vlm_worker.client import WorkerClient  # noqa: E402
from vlm_worker.serve.memory import keep_freed_memory  # noqa: E402
from vlm_worker.server.data_port import DataPort  # noqa: E402
from vlm_worker.settings.timers import PRODUCTION  # noqa: E402
from vlm_worker.transfer.data_link import DataLink, Threads  # noqa: E402
from vlm_worker.transfer.incoming import Pull, checked  # noqa: E402
from vlm_worker.transfer.landing import Landing  # noqa: E402
from vlm_worker.transfer.outgoing import Outgoing  # noqa: E402
from vlm_worker.transfer.shared_memory import SharedMemory  # noqa: E402
from vlm_worker.transfer.transport import ByteStream, Transport  # noqa: E402
from vlm_worker.types import RequestKey  # noqa: E402
from vlm_worker.wire.calls import FetchCall  # noqa: E402
from vlm_worker.wire.data import Fetch  # noqa: E402
from vlm_worker.wire.frame_reader import FrameReader  # noqa: E402
from vlm_worker.wire.frames import Commit, Runs, TransferId, Units, joined  # noqa: E402
from vlm_worker.wire.identity import fetch_call_of  # noqa: E402
from vlm_worker.wire.methods import METHODS  # noqa: E402
from vlm_worker.wire.options import server_options  # noqa: E402

SHARED = Path("/dev/shm")
CAPACITY = 1 << 30
BUFFER_BYTES = 8 << 20
KEY = RequestKey("bench", 1)
Received = AsyncGenerator[Units]
BOOT, FINGERPRINT = bytes(16), bytes(16)
GOALS = {"stream": ("tcp", 0.7), "shared-memory": ("memcpy", 0.4)}


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """What is moved."""

    num_units: int
    unit_bytes: int
    repeats: int
    is_scattered: bool

    @property
    def num_bytes(self) -> int:
        """Of all units."""
        return self.num_units * self.unit_bytes


LOADS = {
    "embedding": Load(576, 8192, 10, is_scattered=False),
    "kv": Load(175, 2 << 20, 1, is_scattered=True),
}


def filled(load: Load) -> np.ndarray:
    """A pool with something in it, `[num_units, unit_bytes]`."""
    pool = np.empty((load.num_units, load.unit_bytes), np.uint8)
    pool[:] = np.arange(load.num_units, dtype=np.uint8)[:, None]
    return pool


def shared_memory() -> SharedMemory:
    """Of one of the two processes."""
    return SharedMemory(
        SHARED, capacity_bytes=CAPACITY, leftover_seconds=60, native_library=native.path()
    )


# ---- the producer's process ----------------------------------------------------------------------


async def produce() -> None:
    """Serve data connections and raw TCP until standard input ends; the first line says where."""
    pools = {name: filled(load) for name, load in LOADS.items()}
    shared = shared_memory()
    released = ExitStack()  # their segments hold memory until they are closed
    transports: dict[str, Transport] = {way.name: way for way in (shared, ByteStream())}

    def offered(call: FetchCall, *, large: bool) -> Runs:
        pool, load = pools[call.transfer_id], LOADS[call.transfer_id]
        released.close()

        def export(first: int, count: int, room: memoryview) -> memoryview:
            if not load.is_scattered:
                rows: memoryview = pool[first : first + count].reshape(-1).data
                return rows
            ids = np.arange(first, first + count)
            out = np.frombuffer(room, np.uint8).reshape(count, -1)
            np.take(pool, ids, axis=0, out=out, mode="clip")
            return room

        outgoing = Outgoing(
            TransferId(KEY, call.transfer_id, BOOT, FINGERPRINT, pod_uid="pod"),
            unit_bytes=load.unit_bytes,
            max_units=load.num_units,
            export=export,
        )
        outgoing.finish(Commit(load.num_units, load.num_units))
        released.callback(outgoing.close)  # its consumer asks for the next one when it has read it
        return outgoing.runs(
            KEY,
            first_unit=call.first_unit,
            transport=transports[call.transport],
            invitation=call.invitation,
            large=large and load.is_scattered,
        )

    data = DataPort(lambda _, call: offered(call, large=True), PRODUCTION)
    port = data.open("127.0.0.1", 0)
    server = grpc.aio.server(options=server_options(PRODUCTION))
    server.add_generic_rpc_handlers((over_grpc(lambda call: offered(call, large=False)),))
    grpc_port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=send_raw, args=(listener, pools), daemon=True).start()
    print(json.dumps([grpc_port, port, listener.getsockname()[1]]), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    released.close()
    shared.close()
    await data.close()
    await server.stop(None)


def over_grpc(offered: Callable[[FetchCall], Runs]) -> Any:
    """The handler of FetchKV."""

    async def fetch(request: Any, context: Any) -> None:
        async with aclosing(joined(offered(fetch_call_of(request)))) as frames:
            async for frame in frames:
                await context.write(frame)

    method = METHODS["FetchKV"]
    handler = grpc.unary_stream_rpc_method_handler(
        fetch, method.request_from_bytes, method.response_to_bytes
    )
    service = method.path.split("/")[1]
    return grpc.method_handlers_generic_handler(service, {"FetchKV": handler})


def send_raw(listener: socket.socket, pools: dict[str, np.ndarray]) -> None:
    """Each line names a pool: all its bytes go out."""
    connection, _ = listener.accept()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    for name in connection.makefile("r"):
        connection.sendall(pools[name.strip()].reshape(-1).data)


# ---- the consumer's process ----------------------------------------------------------------------


class Consumer:
    """Everything that fills `pool`, each in its own way."""

    def __init__(self, grpc_port: int, data_port: int, raw_port: int) -> None:
        self._client = WorkerClient(f"127.0.0.1:{grpc_port}")
        self._threads = Threads()
        self._link = DataLink("127.0.0.1:0", self._threads, PRODUCTION)
        self._link.learn(data_port)
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
            "grpc": lambda name: self._pull(name, ByteStream(), self._over_grpc),
            "shared-memory": lambda name: self._pull(name, self._shared, self._link.units),
        }

    def check(self, name: str) -> None:
        """All has come; forget it."""
        assert np.array_equal(self._pools[name], self._sources[name]), name
        self._pools[name][:] = 0

    async def close(self) -> None:
        """Leave."""
        self._raw.close()
        self._shared.close()
        self._link.close()
        self._threads.close()
        await self._client.close()

    async def _memcpy(self, name: str) -> None:
        np.copyto(self._pools[name], self._sources[name])

    async def _tcp(self, name: str) -> None:
        self._raw.sendall(f"{name}\n".encode())
        left = self._pools[name].reshape(-1).data
        while left:
            left = left[self._raw.recv_into(left) :]

    def _over_grpc(self, fetch: Fetch, call: FetchCall, reader: FrameReader) -> Received:
        frames = self._client.fetch(fetch, call, timeout=60)
        return checked(frames, reader, peer="bench", no_progress_seconds=10)

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
            into=None if load.is_scattered else pool.reshape(-1).data,
        )
        pull = Pull(over(Fetch.KV, call, reader), reader, peer="bench")

        def put(units: Units) -> None:
            ids = np.arange(units.first_unit, units.first_unit + units.num_units)
            pool[ids] = np.frombuffer(units.data, np.uint8).reshape(-1, load.unit_bytes)

        async def write(units: Units) -> None:
            await asyncio.to_thread(put, units)

        async with Landing(write) as landing, aclosing(pull.units()) as received:
            async for units in received:
                if load.is_scattered:
                    await landing.put(units)
            await landing.settle()


async def consume(num_rounds: int) -> None:
    """All ways in turn, round by round; the first round is not counted."""
    producer = subprocess.Popen(  # noqa: ASYNC220  before anything runs
        [sys.executable, __file__, "--produce"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert producer.stdout is not None
    consumer = Consumer(*json.loads(producer.stdout.readline()))
    seconds: dict[tuple[str, str], list[float]] = {}
    for number in range(num_rounds + 1):
        for name, load in LOADS.items():
            for way, fill in consumer.ways.items():
                began = time.perf_counter()
                for _ in range(load.repeats):
                    await fill(name)
                taken = (time.perf_counter() - began) / load.repeats
                if not number:
                    consumer.check(name)
                else:
                    seconds.setdefault((name, way), []).append(taken)
    await consumer.close()
    producer.communicate()
    for name in LOADS:
        print(json.dumps(figures(name, {way: seconds[name, way] for way in consumer.ways})))


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
    parser.add_argument("--produce", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    keep_freed_memory({})  # as vlm-worker does
    asyncio.run(produce() if args.produce else consume(args.rounds))


if __name__ == "__main__":
    main()
