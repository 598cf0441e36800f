"""Starts one transfer from a producer to this worker, with the values that validate it.

FetchCall (with our transport's invitation) ─▶ frames ─▶ FrameReader ─▶ Pull: checked units
"""

from __future__ import annotations

from collections.abc import Callable

from vlm_worker.errors import CorruptTransferError, Refusal
from vlm_worker.roles.context import RoleContext
from vlm_worker.transfer.consumer import Pull
from vlm_worker.transfer.peers import Peer
from vlm_worker.transfer.transport import Transport, View
from vlm_worker.types import RequestKey, Source
from vlm_worker.wire.buffers import DestinationBuffers
from vlm_worker.wire.data_protocol import Fetch
from vlm_worker.wire.frame_reader import FrameReader
from vlm_worker.wire.frames import TransferId
from vlm_worker.wire.messages import FetchCall


def start_pull(
    context: RoleContext,
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
    into: DestinationBuffers | None = None,
) -> Pull:
    """Start a transfer. All sizes come from our own layout and request, none from the producer.

    `content` identifies the expected data (`TransferId`); a frame with another one voids the
    transfer. The units are `first_unit` to `end_unit`, each of `unit_bytes`, written to `into` if
    given.
    """
    transport = context.transport
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
    return Pull(units, reader, peer=source.address, on_refused=context.refused)


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
