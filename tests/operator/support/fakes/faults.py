"""What may become of a call to an API server, and which calls it happens to."""

from __future__ import annotations

import dataclasses

from aiohttp import web

_VERBS = {"POST": "create", "PUT": "replace", "PATCH": "patch", "DELETE": "delete"}


@dataclasses.dataclass(frozen=True)
class Refused:
    """The call is answered with a Status, and never reaches the API server."""

    status: int
    reason: str


@dataclasses.dataclass(frozen=True)
class AnswerLost:
    """The call is carried out, and the connection breaks before the answer."""


@dataclasses.dataclass(frozen=True)
class InStream:
    """A watch gets an ERROR event instead of its next one, and ends."""

    code: int
    reason: str


@dataclasses.dataclass(frozen=True)
class HalfLine:
    """A watch ends in the middle of its next event."""


@dataclasses.dataclass(frozen=True)
class Silence:
    """A watch stays open and sends nothing any more, not even bookmarks."""


@dataclasses.dataclass(frozen=True)
class Chaos:
    """Events of a watch are dropped, doubled or late, by chance from a seed.

    Attributes:
        dropped: share of events that never come.
        doubled: share of events that come twice.
        late_seconds: the longest that an event, and all behind it, is held back.
    """

    seed: int
    dropped: float = 0.2
    doubled: float = 0.2
    late_seconds: float = 0.2


Fault = Refused | AnswerLost | InStream | HalfLine | Silence | Chaos
OF_CALLS = (Refused, AnswerLost)


@dataclasses.dataclass
class Rule:
    """Which calls meet a fault. The proxy alone counts.

    Attributes:
        verb: `get`, `list`, `watch`, `create`, `replace`, `patch`, `delete`; empty for all.
        plural: the resource, as `deployments`; empty for all.
        skip: so many matching calls, or events of watches, go unharmed first.
        times: so many then meet the fault; None for all from there on.
        hits: how many met it so far.
    """

    fault: Fault
    verb: str = ""
    plural: str = ""
    skip: int = 0
    times: int | None = 1
    hits: int = 0
    passed: int = 0

    def meets(self, call: Call) -> bool:
        """Count a call or event; return whether it gets the fault."""
        if self.verb not in ("", call.verb) or self.plural not in ("", call.plural):
            return False
        if self.passed < self.skip:
            self.passed += 1
            return False
        if self.times is not None and self.hits >= self.times:
            return False
        self.hits += 1
        return True


@dataclasses.dataclass(frozen=True)
class Call:
    """What a request asks for, in Kubernetes' words."""

    verb: str
    plural: str
    name: str

    @classmethod
    def of(cls, request: web.Request) -> Call:
        """Read it from method and path."""
        parts = request.path.strip("/").split("/")
        # api/v1/… or apis/GROUP/VERSION/…, then namespaces/NS/ where it has one
        rest = parts[2:] if parts[0] == "api" else parts[3:]
        if rest[:1] == ["namespaces"] and len(rest) > 2:
            rest = rest[2:]
        name = rest[1] if len(rest) > 1 else ""
        verb = _VERBS.get(request.method) or ("get" if name else "list")
        if request.query.get("watch") in ("true", "1"):
            verb = "watch"
        return cls(verb, rest[0] if rest else "", name)
