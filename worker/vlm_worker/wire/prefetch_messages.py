"""The call Prefetch and its reply as values, with their codecs."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Final

from vlm_worker.annotations import Flat
from vlm_worker.core.prefetch import PrefetchResult
from vlm_worker.pb import worker_pb2 as pb
from vlm_worker.types import Request
from vlm_worker.wire.codec import Codec
from vlm_worker.wire.messages import check_request


@dataclasses.dataclass(frozen=True, slots=True)
class PrefetchCall:
    """A prompt whose beginning a worker computes if nothing else is to do.

    The sampling of the request is not used: no token is answered.
    """

    request: Annotated[Request, Flat()]


PREFETCH_CALL: Final = Codec(PrefetchCall, pb.PrefetchRequest, check=check_request)
PREFETCH_REPLY: Final = Codec(PrefetchResult, pb.PrefetchReply)
