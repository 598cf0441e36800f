"""Records a tick as one line of JSON that can be replayed: all inputs and all outputs.

{"version": 4, "service": …, "policy": …, "view": …, "memory": …, "outcome": …}

No number is rounded, so `replay` computes exactly the recorded outcome from the inputs. In logs, a
record is packed: JSON, compressed with zlib, in base64, split to fit the line limit of log
collectors.
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

from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_json

from vlm_operator.autoscale.decide import Memory, Outcome, decide
from vlm_operator.autoscale.policy import ServicePolicy
from vlm_operator.autoscale.view import View

VERSION = 4
PART_CHARACTERS = 12_000
"""Characters of a packed record per log line. With its envelope a line is shorter than 16 KB."""


class RecordError(ValueError):
    """A line is not a record, or a record of another version."""


@dataclasses.dataclass(frozen=True)
class Record:
    """One tick of one service.

    Attributes:
        memory: the memory before the tick.
        epoch: epoch of the lease under which the operator decided; None without a lease.
    """

    service: str
    policy: ServicePolicy
    view: View
    memory: Memory
    outcome: Outcome
    epoch: int | None = None

    def dump(self) -> str:
        """Return the record as one line of JSON."""
        return to_json({"version": VERSION, **vars(self)}, inf_nan_mode="strings").decode()

    def packed(self) -> list[dict[str, Any]]:
        """Return the packed parts; a log has one part per line."""
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
        """Whether any pool's replicas change."""
        return any(item.before != item.to for item in self.outcome.decisions.values())


RECORD = TypeAdapter(Record)


def load_record(line: str) -> Record:
    """Read one line; the log's envelope around a record is removed.

    Raises:
        RecordError: the line is not a record, or its version is unknown.
    """
    try:
        value = json.loads(line)
        value = value.get("record", value)
        version = value.pop("version")
        if version != VERSION:
            raise RecordError(
                f"the record has version {version}, this program reads {VERSION}: "
                "replay it with the vlm command of the operator that wrote it"
            )
        return RECORD.validate_python(value)
    except RecordError:
        raise
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise RecordError(f"this is no record of a decision: {where}: {first['msg']}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RecordError(f"this is no record of a decision: {error}") from error


def read_log(lines: Iterable[str]) -> Iterator[tuple[int, Record | RecordError]]:
    """Yield the records of a log, each with the number of its last line (from 1).

    Other lines may separate the parts of one record. A line that is not a record yields a
    `RecordError` with the cause.
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
    """Return the JSON of the record that this line completes; None if parts are missing.

    A line without a packed record is returned unchanged. `found` collects parts by record id.
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
    """Repeat the decision from the recorded inputs."""
    return decide(record.policy, record.view, record.memory)


def differences(record: Record, outcome: Outcome) -> list[str]:
    """List the differences of an outcome from the recorded one, by path; empty if equal."""
    return list(_unlike(as_json(record.outcome), as_json(outcome), "outcome"))


def as_json(value: Any) -> Any:
    """Convert a value to what its JSON contains: dicts, lists and numbers."""
    return json.loads(to_json(value, inf_nan_mode="strings"))


def _unlike(first: Any, second: Any, path: str) -> list[str]:
    if isinstance(first, dict) and isinstance(second, dict):
        found = []
        for name in sorted({*first, *second}):
            found += _unlike(first.get(name), second.get(name), f"{path}.{name}")
        return found
    return [] if first == second else [f"{path}: recorded {first!r}, now {second!r}"]
