"""What a gRPC server of ours does with a peer that stood still and is read all at once."""

from __future__ import annotations

import asyncio
import struct

import grpc

from vlm_worker.settings.timers import PRODUCTION
from vlm_worker.wire.rpc import Options, server_options

STRIKES = "grpc.http2.max_ping_strikes"
NUM_PINGS = 20
TIMEOUT = 20.0

# RFC 9113: length, type, flags, stream, payload
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, PING, GOAWAY, ACK = 4, 6, 7, 1


def frame(kind: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, 0]) + bytes(4) + payload


async def last_words(options: Options) -> bytes | None:
    """What the server says after pings that come at once; None where it answers one more."""
    server = grpc.aio.server(options=options)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(PREFACE + frame(SETTINGS) + NUM_PINGS * frame(PING, bytes(8)))
    num_answers, said = 0, None
    async with asyncio.timeout(TIMEOUT):
        while num_answers <= NUM_PINGS and said is None:
            head = await reader.readexactly(9)
            payload = await reader.readexactly(int.from_bytes(head[:3]))
            if head[3:5] == bytes([PING, ACK]):
                num_answers += 1
                if num_answers == NUM_PINGS:
                    writer.write(frame(PING, bytes(8)))
            elif head[3] == GOAWAY:
                said = payload[8:]
    writer.close()
    await server.stop(None)
    return said


async def test_pings_that_are_read_at_once_end_no_connection() -> None:
    """Beside a server that counts them, to which they are too many."""
    options = server_options(PRODUCTION)
    assert await last_words(options) is None
    counting = [option for option in options if option[0] != STRIKES]
    assert await last_words(counting) == b"too_many_pings"
