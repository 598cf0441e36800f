"""A data connection with mutual TLS 1.3: the calls of a blocking socket, over an `ssl.SSLObject`.

    source ─▶ SSLObject ─▶ 64 KiB of records ─▶ socket
    socket ─▶ 256 KiB of records ─▶ SSLObject ─▶ destination

`SSLSocket` would make two system calls per record of 16 KiB, and a timeout per call. Here the
socket stays a plain one: its timeouts, `MSG_DONTWAIT` and the end of the peer are as without TLS.
One thread at a time may encrypt or decrypt; the loop may receive from `raw` meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Iterable
from typing import Any, Final

from vlm_worker.wire.identity import Certificate, IdentityError, ServiceIdentity
from vlm_worker.wire.identity_store import DATA_PROTOCOL, Credentials

SENT_BYTES: Final = 1 << 16
"""Bytes per system call; a connection that sends holds them twice."""
RECEIVED_BYTES: Final = 1 << 18
"""Bytes per system call. A thread that receives holds them, and each connection of a consumer."""
HANDSHAKE_BYTES: Final = 1 << 14
"""Bytes per system call during the handshake, and of one record."""
MAX_REPLY_BYTES: Final = 1024
"""Bytes that a peer may make this process send without asking for data, as KeyUpdate does."""
MAX_AGE_SECONDS: Final = 3600.0
MAX_BYTES: Final = 1 << 37
"""Bytes under one key: a third of what AES-GCM allows, since nothing here replaces the key."""

_threads = threading.local()


class SecureConnection:
    """One connection after its handshake, with the identity that the peer's certificate proves.

    `raw` carries TLS records. The peer's end is that of `raw`: each fetch ends with a commit, so a
    connection that is cut off is noticed without a close_notify.
    """

    def __init__(
        self,
        raw: socket.socket,
        tls: ssl.SSLObject,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        *,
        peer: ServiceIdentity,
        generation: int,
    ) -> None:
        self.raw = raw
        self.peer = peer
        self._tls = tls
        self._incoming = incoming
        self._outgoing = outgoing
        self._generation = generation
        self._opened = time.monotonic()
        self._num_bytes = 0
        self._ahead = bytearray()

    def may_serve_another(self, generation: int) -> bool:
        """Whether it may be used for one more fetch: the pair is the newest, and it is not old."""
        return (
            generation == self._generation
            and time.monotonic() - self._opened < MAX_AGE_SECONDS
            and self._num_bytes < MAX_BYTES
        )

    def fileno(self) -> int:
        return self.raw.fileno()

    def shutdown(self, how: int) -> None:
        self.raw.shutdown(how)

    def close(self) -> None:
        self.raw.close()

    def encrypt(self, data: bytes | memoryview) -> bytes:
        """The records of all `data`, for `raw`."""
        view = memoryview(data)
        while view:
            num_written = self._tls.write(view)
            self._num_bytes += num_written
            view = view[num_written:]
        return self._outgoing.read()

    def decrypt(self, data: bytes | bytearray) -> bytes:
        """All plaintext up to the end of `data`, which was received from `raw`. Raises OSError."""
        self._incoming.write(data)
        plain = bytearray()
        with contextlib.suppress(ssl.SSLWantReadError, ssl.SSLZeroReturnError):
            while part := self._tls.read(HANDSHAKE_BYTES):
                plain += part
        self._check_replies()
        return bytes(plain)

    def sendmsg(self, parts: Iterable[bytes | memoryview]) -> int:
        """Send all parts; returns how many bytes. Raises OSError as `sendall` of a socket."""
        num_bytes = 0
        for part in parts:
            self.sendall(part)
            num_bytes += len(part)
        return num_bytes

    def sendall(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        for start in range(0, view.nbytes, SENT_BYTES):
            self.raw.sendall(self.encrypt(view[start : start + SENT_BYTES]))

    def recv(self, num_bytes: int, flags: int) -> bytes:
        """Up to `num_bytes` without consuming them; both MSG_PEEK and MSG_DONTWAIT must be set.

        Raises BlockingIOError if there are none.
        """
        assert flags == socket.MSG_PEEK | socket.MSG_DONTWAIT
        with contextlib.suppress(BlockingIOError):
            while len(self._ahead) < num_bytes and self._look_ahead(num_bytes, flags):
                pass
            if not self._ahead:
                return b""
        if not self._ahead:
            raise BlockingIOError("no bytes have arrived")
        return bytes(self._ahead[:num_bytes])

    def recv_into(self, buffer: memoryview, num_bytes: int, flags: int = 0) -> int:
        """As that of a socket, with MSG_WAITALL and MSG_PEEK; 0 at the end of the peer."""
        if flags & socket.MSG_PEEK:
            while len(self._ahead) < num_bytes and self._look_ahead(num_bytes, 0):
                pass
            num_peeked = min(num_bytes, len(self._ahead))
            buffer[:num_peeked] = self._ahead[:num_peeked]
            return num_peeked
        num_received = min(num_bytes, len(self._ahead))
        buffer[:num_received] = self._ahead[:num_received]
        del self._ahead[:num_received]
        wanted = num_bytes if flags & socket.MSG_WAITALL else min(1, num_bytes)
        while num_received < wanted:
            num_read = self._read_into(buffer[num_received:num_bytes], 0)
            if not num_read:
                break
            num_received += num_read
        return num_received

    def _look_ahead(self, num_bytes: int, flags: int) -> bool:
        """Decrypt some more into `_ahead`; False at the end of the peer."""
        part = memoryview(bytearray(num_bytes - len(self._ahead)))
        num_read = self._read_into(part, flags & socket.MSG_DONTWAIT)
        self._ahead += part[:num_read]
        return bool(num_read)

    def _read_into(self, buffer: memoryview, flags: int) -> int:
        """Decrypt at least one byte, at most one record; 0 at the end of the peer."""
        while True:
            try:
                num_read: Any = self._tls.read(buffer.nbytes, buffer)
            except ssl.SSLWantReadError:
                self._check_replies()
                encrypted = _encrypted()
                num_received = self.raw.recv_into(encrypted, RECEIVED_BYTES, flags)
                if not num_received:
                    return 0
                self._incoming.write(encrypted[:num_received])
            except ssl.SSLZeroReturnError:
                return 0
            else:
                self._num_bytes += num_read
                return int(num_read)

    def _check_replies(self) -> None:
        if self._outgoing.pending > MAX_REPLY_BYTES:
            raise ConnectionResetError("the peer asks for new keys again and again")


DataConnection = socket.socket | SecureConnection


async def secure(
    raw: socket.socket, credentials: Credentials, *, server_side: bool
) -> SecureConnection:
    """Do the handshake on a non-blocking socket. The caller limits the time.

    Raises:
        OSError: the peer is gone, its certificate is not accepted, or it does not accept ours.
        PermissionError: its certificate names no identity of a service, or it speaks another
            protocol.
    """
    loop = asyncio.get_running_loop()
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = credentials.data_server if server_side else credentials.data_client
    tls = context.wrap_bio(incoming, outgoing, server_side=server_side)
    while True:
        try:
            has_ended = await asyncio.to_thread(_do_handshake, tls)  # 1 to 2 ms of computation
        except ssl.SSLError:
            with contextlib.suppress(OSError):  # the alert tells the peer why
                raw.send(outgoing.read(), socket.MSG_DONTWAIT)
            raise
        if outgoing.pending:
            await loop.sock_sendall(raw, outgoing.read())
        if has_ended:
            break
        data = await loop.sock_recv(raw, HANDSHAKE_BYTES)
        if not data:
            raise ConnectionResetError("the connection was closed during the handshake")
        incoming.write(data)
    if tls.selected_alpn_protocol() != DATA_PROTOCOL:
        raise PermissionError("the peer speaks another protocol than that of data connections")
    try:
        peer = Certificate.of_peer(tls.getpeercert()).identity
    except IdentityError as error:
        raise PermissionError(str(error)) from None
    return SecureConnection(
        raw, tls, incoming, outgoing, peer=peer, generation=credentials.generation
    )


def _do_handshake(tls: ssl.SSLObject) -> bool:
    """Go on as far as what arrived allows; whether the handshake has ended. Raises SSLError."""
    try:
        tls.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True


def raw_of(connection: DataConnection) -> socket.socket:
    """The socket itself, which carries records if the connection is secure."""
    return connection.raw if isinstance(connection, SecureConnection) else connection


def _encrypted() -> memoryview:
    """A buffer of this thread for received records, which are copied before it is used again."""
    buffer: memoryview | None = getattr(_threads, "buffer", None)
    if buffer is None:
        buffer = _threads.buffer = memoryview(bytearray(RECEIVED_BYTES))
    return buffer
