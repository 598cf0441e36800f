"""A tick as one line of JSON that can be replayed: all that went in, and all that came out.

{"version": 2, "service": …, "policy": …, "view": …, "memory": …, "outcome": …}

Nothing is rounded. `replay` computes the outcome again from what went in: the same to the bit.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from vlm_operator.autoscale.codec import decode, encode
from vlm_operator.autoscale.decide import Memory, Outcome, decide
from vlm_operator.autoscale.policy import ServicePolicy
from vlm_operator.autoscale.view import View

VERSION = 2


class RecordError(ValueError):
    """A line that is no record, or one of another version."""


@dataclasses.dataclass(frozen=True)
class Record:
    """One tick of one service.

    Attributes:
        epoch: the lease's, under which it was decided; None where there was none.
        memory: before the tick.
    """

    service: str
    policy: ServicePolicy
    view: View
    memory: Memory
    outcome: Outcome
    epoch: int | None = None

    def dump(self) -> str:
        """One line of JSON."""
        return json.dumps({"version": VERSION, **encode(self)}, allow_nan=False)

    @property
    def changes_something(self) -> bool:
        """Whether any pool's number moves by it."""
        return any(item.before != item.to for item in self.outcome.decisions.values())


def load_record(line: str) -> Record:
    """Read one line; the log's own envelope around a record is taken off.

    Raises:
        RecordError: it is no record, or of a version that this program does not know.
    """
    try:
        value = json.loads(line)
        value = value.get("record", value)
        version = value.pop("version")
        if version != VERSION:
            raise RecordError(f"the record has version {version}, this program knows {VERSION}")
        found: Record = decode(Record, value)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, RecordError):
            raise
        raise RecordError(f"this is no record of a decision: {error}") from error
    return found


def replay(record: Record) -> Outcome:
    """Decide again, from what went in."""
    return decide(record.policy, record.view, record.memory)


def differences(record: Record, outcome: Outcome) -> list[str]:
    """Where another outcome differs from the recorded one, by path; empty where it does not."""
    return list(_unlike(encode(record.outcome), encode(outcome), "outcome"))


def _unlike(first: Any, second: Any, path: str) -> list[str]:
    if isinstance(first, dict) and isinstance(second, dict):
        found = []
        for name in sorted({*first, *second}):
            found += _unlike(first.get(name), second.get(name), f"{path}.{name}")
        return found
    return [] if first == second else [f"{path}: recorded {first!r}, now {second!r}"]
