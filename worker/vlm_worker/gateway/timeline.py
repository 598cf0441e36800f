"""Where the time to the first token went: one stage owns each instant, so the sum is the TTFT.

    gateway clock   |received                                                     first byte|
    spans           [gateway][media][encoder_queue][encode     ]
                             [decode_reserve ]     ········[embed_transfer]
                                                   [prefill_queue  ··············][prefill][gateway]
    owners          |gateway |media | enc_queue |encode       |embed_trans|  prefill |gateway|

We walk back from the first byte: what finished last before now was what we waited for; it owns the
time since its own start; and so on from there (the critical path). A span that waits for another (a
transfer for its encode, a queue or a prefill for its transfers) owns only what follows that other's
end. What nobody claims is `other`: mostly the wire.

Pure: workers report offsets from the arrival of a call; when that was on the gateway's clock is
estimated from when their replies came.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence

from vlm_worker.types import STAGES, StageSpan

_OTHER = "other"
# A span of the first waits for spans of the second to end.
_WAITS_FOR = {
    "encode": ("media", "encoder_queue"),
    "encoder_queue": ("media",),
    "embed_transfer": ("media", "encoder_queue", "encode"),
    "prefill_queue": ("media", "encoder_queue", "encode", "embed_transfer"),
    "prefill": ("media", "encoder_queue", "encode", "embed_transfer", "prefill_queue"),
}
_WHOLE_REQUEST = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """What one reply said about its call.

    Attributes:
        received: when the reply came, on the gateway's clock.
        clock: seconds since the call's arrival when the worker wrote it, on the worker's clock.
        spans: offsets in seconds from the call's arrival.
    """

    received: float
    clock: float
    spans: tuple[StageSpan, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """One call to a worker: when it left, and all that its replies reported."""

    started: float
    reports: tuple[Report, ...]

    @property
    def arrived(self) -> float:
        """When it arrived there, on our clock: between its start and what the fastest reply allows.

        The two ways are taken as equally long, of the reply that was under way the shortest.
        """
        latest = min((r.received - r.clock for r in self.reports), default=self.started)
        return (self.started + max(latest, self.started)) / 2

    @property
    def spans(self) -> tuple[StageSpan, ...]:
        """Its spans on our clock; of those that were reported several times, the longest."""
        placed: dict[tuple[str, int, float], StageSpan] = {}
        for report in self.reports:
            for span in report.spans:
                key = (span.stage, span.item, span.start)
                known = placed.get(key)
                if known is None or known.end < span.end:
                    placed[key] = span
        at = self.arrived
        return tuple(StageSpan(s.stage, at + s.start, at + s.end, s.item) for s in placed.values())


def attribute(
    spans: Iterable[StageSpan], *, received: float, first_byte: float
) -> dict[str, float]:
    """Seconds that each stage owns between the last request byte and the first token byte.

    Args:
        spans: on the gateway's clock, from the gateway and all workers.
        received: when the request's last byte was there.
        first_byte: when the first token's first byte left.

    Returns:
        Every stage of `types.STAGES`, in that order; they sum to `first_byte - received`.
    """
    known = [_clip(s, received, first_byte) for s in spans if s.stage in STAGES]
    inside = _after_their_waits([s for s in known if s.end > s.start])
    owned = dict.fromkeys(STAGES, 0.0)
    now = first_byte
    while now > received:
        last = max(
            (s for s in inside if s.end <= now), key=lambda s: (s.end, -s.start), default=None
        )
        boundary = received if last is None else last.end
        for stage, start, end in _gap(inside, boundary, now):
            owned[stage] += end - start
        if last is None:
            break
        owned[last.stage] += last.end - last.start
        now = last.start
    return owned


def _clip(span: StageSpan, start: float, end: float) -> StageSpan:
    low, high = max(span.start, start), min(span.end, end)
    return StageSpan(span.stage, low, max(low, high), span.item)


def _after_their_waits(spans: Sequence[StageSpan]) -> list[StageSpan]:
    """Each span without the part in which it waited for another's end.

    A stage that comes in several pieces (one a chunk) says itself when it worked: they wait for
    nothing.
    """
    pieces = Counter((span.stage, span.item) for span in spans)
    trimmed = []
    for span in spans:
        start = span.start
        if pieces[span.stage, span.item] == 1:
            start = max([start, *(s.end for s in spans if _waits(span, s))])
        trimmed.append(StageSpan(span.stage, start, span.end, span.item))
    return trimmed


def _waits(span: StageSpan, other: StageSpan) -> bool:
    same_item = span.item == other.item or _WHOLE_REQUEST in (span.item, other.item)
    return same_item and other.stage in _WAITS_FOR.get(span.stage, ()) and other.end < span.end


def _gap(
    spans: Sequence[StageSpan], start: float, end: float
) -> Iterable[tuple[str, float, float]]:
    """Owners of a time in which nothing finished: what was under way, else nobody."""
    running = min((s for s in spans if s.start < end < s.end), key=lambda s: s.start, default=None)
    if running is None:
        yield _OTHER, start, end
        return
    since = max(start, running.start)
    yield running.stage, since, end
    if since > start:
        yield _OTHER, start, since
