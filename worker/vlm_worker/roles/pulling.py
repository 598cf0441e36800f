"""One transfer from a producer to this worker: what is asked for, and what is held against it.

FetchCall (with our transport's invitation) ─▶ frames ─▶ FrameReader ─▶ Pull: checked units
"""

from __future__ import annotations

from collections.abc import Callable

from vlm_worker.errors import CorruptTransferError, Refusal
from vlm_worker.roles.host import Host
from vlm_worker.transfer.incoming import Pull
from vlm_worker.transfer.peers import Peer
from vlm_worker.transfer.transport import Transport, View
from vlm_worker.types import RequestKey, Source
from vlm_worker.wire.calls import FetchCall
from vlm_worker.wire.data import Fetch
from vlm_worker.wire.frame_reader import FrameReader
from vlm_worker.wire.frames import TransferId
from vlm_worker.wire.rooms import Rooms


def pull(
    host: Host,
    peer: Peer,
    fetch: Fetch,
    source: Source,
    key: RequestKey,
    *,
    fingerprint: bytes,
    content: bytes,
    unit_bytes: int,
    first_unit: int,
    end_unit: int,
    into: Rooms | None = None,
) -> Pull:
    """Begin a transfer; all sizes are what we ourselves know of layout and request.

    `content` is what the bytes must be made from (`TransferId`); a frame of another one voids it.
    """
    transport = host.transport
    call = FetchCall(
        transfer_id=source.transfer_id,
        boot_id=source.boot_id,
        fingerprint=fingerprint,
        key=key,
        first_unit=first_unit,
        transport=transport.name,
        invitation=transport.invitation(),
    )
    reader = FrameReader(
        TransferId(key, source.transfer_id, source.boot_id, fingerprint, content=content),
        unit_bytes=unit_bytes,
        first_unit=first_unit,
        end_unit=end_unit,
        open_memory=_opener(transport),
        into=into,
    )
    units = peer.units(fetch, call, reader)
    return Pull(units, reader, peer=source.address, on_refused=host.refused)


def _opener(transport: Transport) -> Callable[[str, bytes, int], View] | None:
    if not transport.invitation():
        return None

    def open_memory(name: str, opening: bytes, num_bytes: int) -> View:
        if name != transport.name:
            raise CorruptTransferError(
                f"{name!r} was opened, {transport.name} was asked for", refusal=Refusal.MEMORY
            )
        return transport.view(opening, num_bytes)

    return open_memory
