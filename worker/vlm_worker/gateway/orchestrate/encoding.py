"""The pictures of one attempt: sent to an encoder, decoded there at once, encoded one by one."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from vlm_worker.client import WorkerClient
from vlm_worker.errors import EngineError, InvalidImageError, PeerLostError
from vlm_worker.gateway.orchestrate.job import Job
from vlm_worker.gateway.orchestrate.trace import Trace
from vlm_worker.route import Choice
from vlm_worker.types import RequestKey, Source
from vlm_worker.wire.calls import (
    Decoded,
    DecodedItem,
    EncodeCall,
    EncodeItem,
    ItemFailed,
    ItemReady,
)

# What an encoder may call wrong with a picture itself; all else is its own trouble.
PICTURE_CODES = frozenset(
    {
        "invalid_image",
        "image_too_large",
        "image_aspect_ratio",
        "image_type_mismatch",
        "unsupported_image_format",
        "animated_not_supported",
    }
)


class Encoding:
    """One Encode call. `decoded` is set before the pictures are encoded: prefill may begin then."""

    def __init__(self, job: Job, key: RequestKey, choice: Choice, trace: Trace) -> None:
        self._job = job
        self._choice = choice
        self._trace = trace
        self._key = key
        self.transfer_ids = tuple(
            f"{key.request_id}.{key.attempt}.e{i}" for i in range(len(job.pictures))
        )
        self.decoded: asyncio.Future[tuple[DecodedItem, ...]] = (
            asyncio.get_running_loop().create_future()
        )

    async def run(self, client: WorkerClient) -> None:
        """Send all, and follow until every picture is ready.

        Raises:
            InvalidImageError: a picture cannot be used, and none may be left out.
            WorkerError: the encoder refused or was lost.
        """
        call = self._trace.call(outbound="media")
        pictures = [picture.data for picture in self._job.pictures]
        replies = client.encode(self._call(), pictures, timeout=client.timers.encode)
        num_left: int | None = None
        async with aclosing(replies):
            async for reply in replies:
                call.report(reply)
                match reply.event:
                    case Decoded() as decoded:
                        num_left = self._take(decoded)
                    case ItemReady() if num_left is not None:
                        num_left -= 1
                    case ItemFailed() as failed:
                        raise _of_item(failed)
                if num_left == 0:
                    return
        raise PeerLostError("the encoder ended its stream before every picture was ready")

    def source(self, item: int) -> Source:
        """Where the embedding of a picture is."""
        pod = self._choice.pod
        return Source(
            address=pod.address,
            boot_id=pod.boot_id,
            transfer_id=self.transfer_ids[item],
            fingerprint=pod.embed_fingerprint,
        )

    def _call(self) -> EncodeCall:
        return EncodeCall(
            key=self._key,
            items=tuple(
                EncodeItem(
                    transfer_id=transfer_id,
                    num_bytes=len(picture.data),
                    width=picture.width,
                    height=picture.height,
                    num_tokens=picture.num_tokens,
                    max_pixels=picture.max_pixels,
                    format=picture.format,
                )
                for transfer_id, picture in zip(self.transfer_ids, self._job.pictures, strict=True)
            ),
            cache_salt=self._job.cache_salt,
            last_resort=self._choice.last_resort,
            skip_corrupt=self._job.skip_corrupt,
            priority=self._job.priority,
        )

    def _take(self, decoded: Decoded) -> int:
        """Hand the pictures on; how many are still to be encoded."""
        if len(decoded.items) != len(self._job.pictures):
            raise EngineError("the encoder answered for another number of pictures")
        errors = [item.error for item in decoded.items if item.error is not None]
        if errors and not self._job.skip_corrupt:
            raise errors[0]
        self.decoded.set_result(decoded.items)
        return len(decoded.items) - len(errors)


def _of_item(failed: ItemFailed) -> Exception:
    if failed.code in PICTURE_CODES:
        return InvalidImageError(failed.message, item=failed.item, code=failed.code)
    return EngineError(f"picture {failed.item}: {failed.code}: {failed.message}")
