"""A transport over NIXL: the consumer reads a producer's registered memory, by RDMA if possible.

    opening = address of the buffer, then the producer agent's metadata

An extra: `pip install triptych[nixl]`. A transfer is copied once into a registered buffer and read
from there. An address from a producer refers to the producer's memory. NIXL checks it against the
producer's registration; it is never used as an address of ours. The frame's digest validates the
bytes that arrive. Source: NIXL's Python interface, nixl._api.
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
from vlm_worker.transfer.transport import HOST_ONLY, ExposureAccount
from vlm_worker.wire.buffers import PLAIN, Regions, host_views
from vlm_worker.wire.frames import MAX_OPENING_BYTES, MAX_OUT_OF_BAND_BYTES, OUT_OF_BAND_VERSION

logger = logging.getLogger(__name__)

NAME: Final = "nixl"
_MODULES: Final = ("nixl._api", "nixl_cu13._api", "nixl_cu12._api")
_ADDRESS: Final = struct.Struct("<Q")
READ_SECONDS: Final = 1.0
"""Time limit of one read, of at most `MAX_OUT_OF_BAND_BYTES`; after it, the read has failed."""


def nixl_api() -> Any:
    """NIXL's Python interface.

    Raises:
        ImportError: NIXL is not installed; the text gives the fix.
    """
    for module in _MODULES:
        try:
            return importlib.import_module(module)
        except ImportError:
            continue
    raise ImportError("--transport=nixl needs NIXL, which is not installed: triptych[nixl]")


class Nixl:
    """One agent over UCX; `capacity_bytes` limits the exposed bytes.

    Raises:
        ImportError: NIXL is not installed.
    """

    name = f"{NAME}/{OUT_OF_BAND_VERSION}"
    accepts = HOST_ONLY

    def __init__(self, *, capacity_bytes: int, api: Any = None) -> None:
        api = api or nixl_api()
        self.account = ExposureAccount(capacity_bytes)
        config = api.nixl_agent_config(backends=["UCX"])
        self._agent = api.nixl_agent(f"triptych-{secrets.token_hex(8)}", config)
        self._peers = _Peers(self._agent)

    def invitation(self) -> bytes:
        """The same for all consumers with NIXL; UCX finds out whether they can reach the buffer."""
        return NAME.encode()

    def expose(self, invitation: bytes, num_bytes: int) -> _NixlExposure | None:
        """A registered buffer; None without capacity, or for a consumer without NIXL."""
        if invitation != NAME.encode() or num_bytes == 0 or not self.account.take(num_bytes):
            return None
        try:
            exposure = _NixlExposure(self._agent, num_bytes, account=self.account)
        except Exception:  # each backend of NIXL raises its own types
            self.account.release(num_bytes)
            logger.warning("memory not registered: bytes travel in the frames", exc_info=True)
            return None
        if len(exposure.opening) + 1 + len(self.name) > MAX_OPENING_BYTES:
            exposure.close()
            return None
        return exposure

    def view(self, opening: bytes, num_bytes: int) -> _NixlView:
        """Open a producer's buffer.

        Raises:
            CorruptTransferError: the producer's agent cannot be reached.
        """
        return _NixlView(self._agent, self._peers, opening, num_bytes)

    def close(self) -> None: ...  # each exposure and each view has its own buffer


class _Peers:
    """Remote agents of producers, each kept while a view of it is open. Thread-safe.

    Otherwise their number would grow with every producer's restart, and a reused address could
    match an old registration.
    """

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self._num_views: Counter[str] = Counter()

    def add_view(self, metadata: bytes) -> str:
        """Add an agent, or a view of a known one; returns its name. Raises what NIXL raises."""
        with self._lock:
            name = self._agent.add_remote_agent(metadata)
            peer: str = name.decode() if isinstance(name, bytes) else name
            self._num_views[peer] += 1
            return peer

    def remove_view(self, peer: str) -> None:
        """Remove one view; the last one removes the agent."""
        with self._lock:
            self._num_views[peer] -= 1
            if self._num_views[peer]:
                return
            del self._num_views[peer]
            try:
                self._agent.remove_remote_agent(peer)
            except Exception:  # each backend of NIXL raises its own types
                logger.warning("a producer's agent was not removed", exc_info=True)


class _Registered:
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

    def __init__(self, agent: Any, num_bytes: int, *, account: ExposureAccount) -> None:
        self.num_bytes = num_bytes
        self._account = account
        self._buffer: _Registered | None = _Registered(agent, num_bytes)
        self.opening = _ADDRESS.pack(self._buffer.address) + bytes(agent.get_agent_metadata())

    def buffer(self, position: int, num_bytes: int) -> None:
        """None: units are copied into the registered buffer."""

    def write(self, position: int, source: Regions) -> memoryview:
        """Copy into the registered buffer; the frame needs no bytes."""
        if self._buffer is None:
            raise GoneError("the transfer was abandoned")
        target = self._buffer.data[position : position + source.num_bytes]
        PLAIN.copy(host_views(source), [target.data], head=b"")
        return memoryview(b"")

    def close(self) -> None:
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None
            self._account.release(self.num_bytes)

    def abandon(self) -> None:
        """Keep the buffer registered for good: a consumer may still read it."""
        if self._buffer is not None:
            _ABANDONED.append(self._buffer)
            self._buffer = None
            self._account.abandon(self.num_bytes)


_ABANDONED: Final[list[_Registered]] = []


class _NixlView:
    """The consumer side of a producer's buffer."""

    accepts = HOST_ONLY

    def __init__(self, agent: Any, peers: _Peers, opening: bytes, num_bytes: int) -> None:
        if len(opening) <= _ADDRESS.size:
            raise _failed("its opening is too short")
        (self._address,) = _ADDRESS.unpack_from(opening)
        if self._address + num_bytes >= 1 << 64:
            raise _failed("its address is beyond all memory")
        self._agent = agent
        self._peers = peers
        self._peer: str | None = None
        self._buffer: _Registered | None = None
        try:
            self._peer = peers.add_view(opening[_ADDRESS.size :])
            self._buffer = _Registered(agent, min(num_bytes, MAX_OUT_OF_BAND_BYTES))
        except Exception as error:  # each backend of NIXL raises its own types
            self.close()
            raise _failed(type(error).__name__) from error

    def read(self, position: int, destination: Regions, *, head: bytes) -> bytes:
        """Read into a registered buffer, and copy from there to the destination."""
        buffer, num_bytes = self._buffer, destination.num_bytes
        if buffer is None:
            raise _failed("a read failed before")
        try:
            self._read(self._address + position, num_bytes, into=buffer)
        except Exception as error:  # as above
            # the read may still write into the buffer, so it is never reused
            _ABANDONED.append(buffer)
            self._buffer = None
            if isinstance(error, CorruptTransferError):
                raise
            raise _failed(type(error).__name__) from error
        return PLAIN.copy([buffer.data[:num_bytes].data], host_views(destination), head=head)

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
        """Deregister the local buffer, and remove the producer's agent with its last view."""
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None
        if self._peer is not None:
            self._peers.remove_view(self._peer)
            self._peer = None


def _failed(what: str) -> CorruptTransferError:
    return CorruptTransferError(f"the producer's memory by NIXL: {what}", refusal=Refusal.MEMORY)
