"""What a worker runs for each stage: the role, its RPCs and its fetches. A new role is a row."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, Final

from vlm_worker.roles.context import RoleContext
from vlm_worker.roles.decode import DecodeRole
from vlm_worker.roles.encode import EncoderRole
from vlm_worker.roles.prefill import PrefillRole
from vlm_worker.roles.uploads import Media
from vlm_worker.types import Stage
from vlm_worker.wire import messages
from vlm_worker.wire.codec import Codec
from vlm_worker.wire.data_protocol import Fetch


@dataclasses.dataclass(frozen=True, slots=True)
class StageRole:
    """The role of a stage.

    `rpcs` has its RPCs with one call and a stream of replies: `Prefill` calls the role's `prefill`.
    RPCs of another form are in `server/service.py`. `fetch` is what its peers fetch from it.
    """

    construct: Callable[[RoleContext, Any], Any]
    rpcs: Mapping[str, tuple[Codec[Any], Codec[Any]]] = dataclasses.field(default_factory=dict)
    fetch: Fetch | None = None


ROLES: Final[Mapping[Stage, StageRole]] = {
    Stage.ENCODER: StageRole(EncoderRole, fetch=Fetch.EMBEDDING),
    Stage.PREFILL: StageRole(
        lambda context, _: PrefillRole(context),
        {"Prefill": (messages.PREFILL_CALL, messages.PREFILL_REPLY)},
        fetch=Fetch.KV,
    ),
    Stage.DECODE: StageRole(
        lambda context, _: DecodeRole(context),
        {"Decode": (messages.DECODE_CALL, messages.DECODE_REPLY)},
    ),
}
FETCHED_FROM: Final = {role.fetch: stage for stage, role in ROLES.items() if role.fetch}


def build_roles(
    stages: AbstractSet[Stage], context: RoleContext, media: Media | None
) -> dict[Stage, Any]:
    """The roles of the loaded stages; the encoder needs `media`."""
    return {stage: row.construct(context, media) for stage, row in ROLES.items() if stage in stages}
