"""Bytes by NIXL: the consumer reads a producer's registered memory, by RDMA where there is any.

    opening = address of the buffer, then the producer agent's metadata

An extra: `pip install triptych[nixl]`. A transfer is gathered once into a registered buffer and
read from there. An address that a producer names is one of its own memory, held to its own
registration, and never used against ours. What arrives is held to the frame's digest as ever.
Source: NIXL's Python interface, nixl._api.
"""

from __future__ import annotations

import importlib
import logging
import secrets
import struct
import threading
import time
from collections import Counter
from typing import Any, Final

import numpy as np

from vlm_worker.errors import CorruptTransferError, GoneError, Refusal
from vlm_worker.transfer.transport import Ledger
from vlm_worker.wire.copying import PLAIN, Memory
from vlm_worker.wire.frames import MAX_OPENING_BYTES, MAX_PLACED_BYTES, PLACED_VERSION

logger = logging.getLogger(__name__)

NAME: Final = "nixl"
_MODULES: Final = ("nixl._api", "nixl_cu13._api", "nixl_cu12._api")
_ADDRESS: Final = struct.Struct("<Q")
READ_SECONDS: Final = 1.0
"""One read is of 4 MiB at most; without an end for so long it counts as failed."""


def nixl_api() -> Any:
    """NIXL's Python interface.

    Raises:
        ImportError: it is not installed, with the fix.
    """
    for module in _MODULES:
        try:
            return importlib.import_module(module)
        except ImportError:
            continue
    raise ImportError("--transport=nixl needs NIXL, which is not installed: triptych[nixl]")


class Nixl:
    """One agent over UCX; `capacity_bytes` bounds what is exposed.

    Raises:
        ImportError: NIXL is not installed.
    """

    name = f"{NAME}/{PLACED_VERSION}"

    def __init__(self, *, capacity_bytes: int, api: Any = None) -> None:
        api = api or nixl_api()
        self.ledger = Ledger(capacity_bytes)
        config = api.nixl_agent_config(backends=["UCX"])
        self._agent = api.nixl_agent(f"triptych-{secrets.token_hex(8)}", config)
        self._peers = _Peers(self._agent)

    def invitation(self) -> bytes:
        """Any consumer with NIXL may read; whether it reaches us, UCX finds out."""
        return NAME.encode()

    def expose(self, invitation: bytes, num_bytes: int) -> _NixlExposure | None:
        """A registered buffer; None without room, or for a consumer without NIXL."""
        if invitation != NAME.encode() or num_bytes == 0 or not self.ledger.take(num_bytes):
            return None
        try:
            exposure = _NixlExposure(self._agent, num_bytes, ledger=self.ledger)
        except Exception:  # NIXL raises types of its own, by backend
            self.ledger.give_back(num_bytes)
            logger.warning("memory not registered: bytes travel in the frames", exc_info=True)
            return None
        if len(exposure.opening) + 1 + len(self.name) > MAX_OPENING_BYTES:
            exposure.close()
            return None
        return exposure

    def view(self, opening: bytes, num_bytes: int) -> _NixlView:
        """A producer's buffer.

        Raises:
            CorruptTransferError: the producer's agent cannot be reached.
        """
        return _NixlView(self._agent, self._peers, opening, num_bytes)

    def close(self) -> None:
        """Nothing to give back: each exposure and each view has its own buffer."""


class _Peers:
    """The producers' agents that ours knows, for as long as a view of theirs is open. Thread-safe.

    Without an end their number grows with every producer's life, and an address that is used again
    could meet a registration of before.
    """

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self._num_views: Counter[str] = Counter()

    def add(self, metadata: bytes) -> str:
        """The name of an agent that can be read from; raises what NIXL raises."""
        with self._lock:
            name = self._agent.add_remote_agent(metadata)
            peer: str = name.decode() if isinstance(name, bytes) else name
            self._num_views[peer] += 1
            return peer

    def leave(self, peer: str) -> None:
        """One view less; with the last one the agent is forgotten."""
        with self._lock:
            self._num_views[peer] -= 1
            if self._num_views[peer]:
                return
            del self._num_views[peer]
            try:
                self._agent.remove_remote_agent(peer)
            except Exception:  # NIXL raises types of its own, by backend
                logger.warning("a producer's agent was not removed", exc_info=True)


class _Registered:
    """A buffer that the agent knows."""

    def __init__(self, agent: Any, num_bytes: int) -> None:
        self.data = np.zeros(num_bytes, np.uint8)
        self.address = int(self.data.ctypes.data)
        self._agent = agent
        self._memory: Any = agent.register_memory([(self.address, num_bytes, 0, "")], "DRAM")

    def close(self) -> None:
        if self._memory is not None:
            self._agent.deregister_memory(self._memory)
            self._memory = None


class _NixlExposure:
    """A producer's registered buffer for one transfer."""

    def __init__(self, agent: Any, num_bytes: int, *, ledger: Ledger) -> None:
        self.num_bytes = num_bytes
        self._ledger = ledger
        self._buffer: _Registered | None = _Registered(agent, num_bytes)
        self.opening = _ADDRESS.pack(self._buffer.address) + bytes(agent.get_agent_metadata())

    def room(self, position: int, num_bytes: int) -> None:
        """None: units are copied into the registered buffer."""

    def place(self, position: int, data: memoryview) -> memoryview:
        """Copy; nothing travels."""
        if self._buffer is None:
            raise GoneError("the transfer was given up")
        self._buffer.data[position : position + data.nbytes] = np.frombuffer(data, np.uint8)
        return memoryview(b"")

    def close(self) -> None:
        """Deregister."""
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None
            self._ledger.give_back(self.num_bytes)

    def abandon(self) -> None:
        """Stay registered for good: somebody may be reading."""
        if self._buffer is not None:
            _ABANDONED.append(self._buffer)
            self._buffer = None
            self._ledger.lose(self.num_bytes)


_ABANDONED: Final[list[_Registered]] = []


class _NixlView:
    """A consumer's sight of a producer's buffer."""

    def __init__(self, agent: Any, peers: _Peers, opening: bytes, num_bytes: int) -> None:
        if len(opening) <= _ADDRESS.size:
            raise _failed("its opening is too short")
        (self._address,) = _ADDRESS.unpack_from(opening)
        if self._address + num_bytes >= 1 << 64:
            raise _failed("its address is beyond all memory")
        self._agent = agent
        self._peers = peers
        self._is_open = True
        try:
            self._peer = peers.add(opening[_ADDRESS.size :])
        except Exception as error:  # NIXL raises types of its own, by backend
            raise _failed(f"{type(error).__name__}") from error
        self._landing: _Registered | None = None
        try:
            self._landing = _Registered(agent, min(num_bytes, MAX_PLACED_BYTES))
        except Exception as error:  # as above
            self.close()
            raise _failed(f"{type(error).__name__}") from error

    def take(self, position: int, rooms: Memory, *, head: bytes) -> bytes:
        """Read into the landing buffer, and from there into memory of our own."""
        landing, num_bytes = self._landing, sum(room.nbytes for room in rooms)
        if landing is None:
            raise _failed("a read failed before")
        try:
            self._read(self._address + position, num_bytes, into=landing)
        except Exception as error:  # as above
            # what was begun may still write there
            _ABANDONED.append(landing)
            self._landing = None
            if isinstance(error, CorruptTransferError):
                raise
            raise _failed(f"{type(error).__name__}") from error
        return PLAIN.copy([landing.data[:num_bytes].data], rooms, head=head)

    def _read(self, address: int, num_bytes: int, *, into: _Registered) -> None:
        agent = self._agent
        ours = agent.get_xfer_descs([(into.address, num_bytes, 0)], "DRAM")
        theirs = agent.get_xfer_descs([(address, num_bytes, 0)], "DRAM")
        handle = agent.initialize_xfer("READ", ours, theirs, self._peer)
        try:
            state = agent.transfer(handle)
            deadline = time.monotonic() + READ_SECONDS
            while state not in ("DONE", "ERR"):
                if time.monotonic() > deadline:
                    raise _failed(f"no end after {READ_SECONDS:g} s")
                state = agent.check_xfer_state(handle)
            if state == "ERR":
                raise _failed("the read failed")
        finally:
            agent.release_xfer_handle(handle)

    def close(self) -> None:
        """Deregister the landing buffer, and forget the producer's agent with its last view."""
        if self._landing is not None:
            self._landing.close()
            self._landing = None
        if self._is_open:
            self._is_open = False
            self._peers.leave(self._peer)


def _failed(what: str) -> CorruptTransferError:
    return CorruptTransferError(f"the producer's memory by NIXL: {what}", refusal=Refusal.MEMORY)
