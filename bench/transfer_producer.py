"""The producer of `transfer.py`, and what both processes share."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, aclosing
from pathlib import Path
from typing import Any

import grpc
import numpy as np

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "worker"), str(ROOT / "kernels")]

from vlm_kernels.cpu import native  # noqa: E402
from vlm_worker.serve.process import set_malloc_thresholds  # noqa: E402
from vlm_worker.server.data_port import DataPort  # noqa: E402
from vlm_worker.settings.timers import PRODUCTION  # noqa: E402
from vlm_worker.transfer.producer import Producer  # noqa: E402
from vlm_worker.transfer.shared_memory import SharedMemory  # noqa: E402
from vlm_worker.transfer.transport import ByteStream, Transport  # noqa: E402
from vlm_worker.types import RequestKey, Role  # noqa: E402
from vlm_worker.wire.buffers import Copier, HostRegions, LiveRegions  # noqa: E402
from vlm_worker.wire.frames import Commit, FrameBatches, TransferId, join_frames  # noqa: E402
from vlm_worker.wire.identity_store import IdentityStore  # noqa: E402
from vlm_worker.wire.messages import FETCH_CALL, FetchCall  # noqa: E402
from vlm_worker.wire.rpc import METHODS, server_options  # noqa: E402
from vlm_worker.wire.sockets import add_port  # noqa: E402

SHARED = Path("/dev/shm")
CAPACITY = 1 << 30
BUFFER_BYTES = 8 << 20
KEY = RequestKey("bench", 1)
BOOT, FINGERPRINT = bytes(16), bytes(16)


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """The data of a transfer."""

    num_units: int
    unit_bytes: int
    repeats: int
    is_scattered: bool

    @property
    def num_bytes(self) -> int:
        """Bytes of all units."""
        return self.num_units * self.unit_bytes


LOADS = {
    "embedding": Load(576, 8192, 10, is_scattered=False),
    "kv": Load(175, 2 << 20, 1, is_scattered=True),
}


def filled(load: Load) -> np.ndarray:
    """A pool with data, `[num_units, unit_bytes]`."""
    pool = np.empty((load.num_units, load.unit_bytes), np.uint8)
    pool[:] = np.arange(load.num_units, dtype=np.uint8)[:, None]
    return pool


def shared_memory() -> SharedMemory:
    """The shared-memory transport of one of the two processes."""
    return SharedMemory(
        SHARED, capacity_bytes=CAPACITY, leftover_seconds=60, native_library=native.path()
    )


async def produce(directory: Path) -> None:
    """Serve data connections and raw TCP until standard input ends; first print the ports.

    `directory` has the identity for those with mutual TLS.
    """
    identity = IdentityStore(directory, Role.PREFILL)
    pools = {name: filled(load) for name, load in LOADS.items()}
    shared = shared_memory()
    copier = Copier(native.path())
    released = ExitStack()  # their segments hold memory until they are closed
    transports: dict[str, Transport] = {way.name: way for way in (shared, ByteStream())}

    makers = ThreadPoolExecutor(1)
    ahead: dict[str, Producer] = {}  # prebuilt, by name

    def offer(name: str) -> Producer:
        pool, load = pools[name], LOADS[name]
        released.close()  # its consumer has read the previous offer

        def export(first: int, count: int, _: memoryview) -> memoryview | LiveRegions:
            if not load.is_scattered:
                rows: memoryview = pool[first : first + count].reshape(-1).data
                return rows
            blocks = pool[first : first + count]
            return LiveRegions(HostRegions([block.data for block in blocks]), lambda: None)

        outgoing = Producer(
            TransferId(KEY, name, BOOT, FINGERPRINT, pod_uid="pod"),
            unit_bytes=load.unit_bytes,
            max_units=load.num_units,
            export=export,
            copier=copier,
        )
        outgoing.finish(Commit(load.num_units, load.num_units))
        released.callback(outgoing.close)
        return outgoing

    async def prebuild_frames(name: str, way: str) -> None:
        ahead[name] = offer(name)
        await ahead[name].prebuild_frames(makers, transports[way])

    def offered(call: FetchCall, *, large: bool) -> FrameBatches:
        outgoing = ahead.pop(call.transfer_id, None) or offer(call.transfer_id)
        return outgoing.frame_batches(
            KEY,
            first_unit=call.first_unit,
            transport=transports[call.transport],
            invitation=call.invitation,
            large=large,
        )

    data = DataPort(lambda _, call: offered(call, large=True), PRODUCTION)
    port = data.open("127.0.0.1", 0)
    secure_data = DataPort(lambda _, call: offered(call, large=True), PRODUCTION, identity=identity)
    secure_port = secure_data.open("127.0.0.1", 0)
    server = grpc.aio.server(options=server_options(PRODUCTION))
    server.add_generic_rpc_handlers((over_grpc(lambda call: offered(call, large=False)),))
    grpc_port = server.add_insecure_port("127.0.0.1:0")
    secure_grpc_port = add_port(server, "127.0.0.1", 0, identity=identity)
    await server.start()
    listener = socket.create_server(("127.0.0.1", 0))
    loop = asyncio.get_running_loop()

    def make_now(name: str, way: str) -> None:
        asyncio.run_coroutine_threadsafe(prebuild_frames(name, way), loop).result()

    threading.Thread(target=send_raw, args=(listener, pools, make_now), daemon=True).start()
    ports = grpc_port, port, listener.getsockname()[1], secure_grpc_port, secure_port
    print(json.dumps(ports), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    released.close()
    makers.shutdown()
    shared.close()
    await data.close()
    await secure_data.close()
    await server.stop(None)


def over_grpc(offered: Callable[[FetchCall], FrameBatches]) -> Any:
    """The handler of FetchKV."""

    async def fetch(request: Any, context: Any) -> None:
        async with aclosing(join_frames(offered(FETCH_CALL.decode(request)))) as frames:
            async for frame in frames:
                await context.write(frame)

    method = METHODS["FetchKV"]
    handler = grpc.unary_stream_rpc_method_handler(
        fetch, method.request_from_bytes, method.response_to_bytes
    )
    service = method.path.split("/")[1]
    return grpc.method_handlers_generic_handler(service, {"FetchKV": handler})


def send_raw(
    listener: socket.socket, pools: dict[str, np.ndarray], make: Callable[[str, str], None]
) -> None:
    """Each input line names a pool to send; with a transport, its frames are prebuilt."""
    connection, _ = listener.accept()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    for line in connection.makefile("r"):
        name, _, way = line.strip().partition(" ")
        if way:
            make(name, way)
            connection.sendall(b"1")
        else:
            connection.sendall(pools[name].reshape(-1).data)


if __name__ == "__main__":
    set_malloc_thresholds({})  # as vlm-worker does
    asyncio.run(produce(Path(sys.argv[1])))
