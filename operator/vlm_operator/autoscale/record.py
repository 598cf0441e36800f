"""A tick as one line of JSON that can be replayed: all that went in, and all that came out.

{"version": 2, "service": …, "policy": …, "view": …, "memory": …, "outcome": …}

Nothing is rounded. `replay` computes the outcome again from what went in: the same to the bit.
A log carries it packed: JSON, deflated, in base64, cut into parts that log collectors take.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

from vlm_operator.autoscale.codec import decode, encode
from vlm_operator.autoscale.decide import Memory, Outcome, decide
from vlm_operator.autoscale.policy import ServicePolicy
from vlm_operator.autoscale.view import View

VERSION = 2
PART_CHARACTERS = 12_000
"""Of a packed record in one line of a log: with its envelope a line stays below 16 KB."""


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

    def packed(self) -> list[dict[str, Any]]:
        """The parts that a log writes, one a line."""
        text = self.dump().encode()
        data = base64.b64encode(zlib.compress(text, 9)).decode()
        parts = [data[i : i + PART_CHARACTERS] for i in range(0, len(data), PART_CHARACTERS)]
        name = hashlib.sha256(text).hexdigest()[:16]
        return [
            {"id": name, "part": number, "parts": len(parts), "data": part}
            for number, part in enumerate(parts, start=1)
        ]

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


def read_log(lines: Iterable[str]) -> Iterator[tuple[int, Record | RecordError]]:
    """Every record of a log with the number of its last line, from 1.

    Parts of one record may have other lines between them. A line that is no record gives the
    `RecordError` that says why.
    """
    found: dict[str, dict[int, str]] = {}
    for number, line in enumerate(lines, start=1):
        try:
            text = _joined(line, found)
            if text is not None:
                yield number, load_record(text)
        except RecordError as error:
            yield number, error


def _joined(line: str, found: dict[str, dict[int, str]]) -> str | None:
    """The JSON of a record that is whole with this line; None while parts are missing.

    A line without a packed record is returned as it is.
    """
    try:
        value = json.loads(line)
        part = value["record"]
        name, count = str(part["id"]), int(part["parts"])
        found.setdefault(name, {})[int(part["part"])] = str(part["data"])
    except (ValueError, KeyError, TypeError):
        return line
    parts = found[name]
    if any(number not in parts for number in range(1, count + 1)):
        return None
    del found[name]
    try:
        data = "".join(parts[number] for number in range(1, count + 1))
        return zlib.decompress(base64.b64decode(data, validate=True)).decode()
    except (binascii.Error, zlib.error, UnicodeDecodeError) as error:
        raise RecordError(f"the packed record {name} is damaged: {error}") from error


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
