"""The outward side of a sequence: who listens, and what of it a peer may see."""

from __future__ import annotations

import dataclasses

from vlm_worker.core.encoder_entries import Entry
from vlm_worker.engine.events import EventStream, PrefillEvent


@dataclasses.dataclass(eq=False, slots=True)
class Sink:
    """Hangs on `Sequence.sink`; written by the engine thread.

    Attributes:
        stream: who listens; None while nobody does (held, receiving).
        first_only: the stream ends with the first token.
        supplied: somebody answers NeedItems; without, a sequence that lost what it cannot get back
            is handed over (DRAINED).
        adopter: takes the stream's place after the first token.
        scheduled: ScheduledEvent was said.
        asked: items that NeedItems named and nobody put yet.
        pins: per item, the cache entry that is pinned for it.
        missing: blocks that a peer has still to deliver.
    """

    stream: EventStream[PrefillEvent] | None = None
    first_only: bool = False
    supplied: bool = False
    adopter: EventStream[PrefillEvent] | None = None
    scheduled: bool = False
    asked: set[int] = dataclasses.field(default_factory=set)
    pins: dict[int, Entry] = dataclasses.field(default_factory=dict)
    missing: set[int] = dataclasses.field(default_factory=set)
