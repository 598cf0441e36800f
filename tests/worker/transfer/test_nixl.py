"""NIXL with an agent of memory that this process can see: no wait on the loop, nothing kept."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from typing import Any

import pytest

from vlm_worker.transfer.consumer import checked_units
from vlm_worker.transfer.nixl import Nixl
from vlm_worker.wire.buffers import HostRegions


class Agent:
    """Reads memory of this process, as UCX does of another; it knows who it was told of."""

    def __init__(self, name: str, config: Any) -> None:
        self.name = name
        self.remote: list[str] = []
        self.registered = 0

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> bytes:
        if metadata.decode() not in self.remote:
            self.remote.append(metadata.decode())
        return metadata

    def remove_remote_agent(self, name: str) -> None:
        self.remote.remove(name)

    def register_memory(self, parts: Any, kind: str) -> Any:
        self.registered += 1
        return parts

    def deregister_memory(self, memory: Any) -> None:
        self.registered -= 1

    def get_xfer_descs(self, parts: Any, kind: str) -> Any:
        return parts

    def initialize_xfer(self, what: str, ours: Any, theirs: Any, peer: str) -> Any:
        assert peer in self.remote, "the agent is not known"
        return ours[0], theirs[0]

    def transfer(self, handle: Any) -> str:
        (to, size, _), (start, _, _) = handle
        ctypes.memmove(to, start, size)
        return "DONE"

    def check_xfer_state(self, handle: Any) -> str:
        return "DONE"

    def release_xfer_handle(self, handle: Any) -> None:
        return


class Api:
    """NIXL's Python interface."""

    @staticmethod
    def nixl_agent_config(backends: list[str]) -> Any:
        return backends

    nixl_agent = Agent


def test_a_producers_agent_is_forgotten_with_its_last_view() -> None:
    producer = Nixl(capacity_bytes=1 << 20, api=Api)
    consumer = Nixl(capacity_bytes=1 << 20, api=Api)
    exposures = [producer.expose(consumer.invitation(), 64) for _ in range(2)]
    views = []
    for number, exposure in enumerate(exposures):
        assert exposure is not None
        exposure.write(0, HostRegions([memoryview(bytes([number]) * 64)]))
        views.append(consumer.view(exposure.opening, 64))
    assert len(consumer._agent.remote) == 1
    views[0].close()
    views[0].close()
    into = bytearray(64)
    views[1].read(0, HostRegions([memoryview(into)]), head=b"")
    assert into == b"\1" * 64, "the other view still reads"
    views[1].close()
    assert consumer._agent.remote == []
    assert consumer._agent.registered == 0
    for exposure in exposures:
        assert exposure is not None
        exposure.close()
    assert producer.account.used == 0


@pytest.mark.parametrize("may_block", [True, False])
async def test_frames_that_may_wait_are_not_read_on_the_loop(may_block: bool) -> None:
    threads = []

    class Reader:
        def __init__(self) -> None:
            self.may_block = may_block

        def read(self, frame: bytes) -> None:
            threads.append(threading.current_thread())

        def close(self) -> None:
            return

    async def frames() -> Any:
        yield b"frame"

    reader: Any = Reader()
    async for _ in checked_units(frames(), reader, peer="p", no_progress_seconds=60.0):
        pass
    assert [thread is threading.main_thread() for thread in threads] == [not may_block]
    await asyncio.sleep(0)
