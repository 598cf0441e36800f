"""Describes why a container terminated, from its `terminated` state, in one line. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

SIGNALLED: Final = 128  # greater exit codes are 128 plus the number of a signal


def ending(terminated: Mapping[str, Any] | None) -> str:
    """Return the reason, the exit code and the last error of the log; "" for None."""
    if terminated is None:
        return ""
    reason, code = terminated.get("reason", "Error"), terminated.get("exitCode")
    cause = _cause(str(terminated.get("message", "")), by_signal=(code or 0) > SIGNALLED)
    return f"{reason}, exit code {code}" + (f": {cause}" if cause else "")


def _cause(log: str, *, by_signal: bool) -> str:
    """Return the last error in the last lines of a log; "" if there is none.

    A process that a signal ended logs no reason, so only an error in its last line counts.
    """
    lines = log.strip().splitlines()
    for line in lines[-1:] if by_signal else reversed(lines):
        if found := _error_in(line):
            return found
    return ""


def _error_in(line: str) -> str:
    """Return the message of a line if it is an error, else "".

    A line that is not a JSON log entry counts as an error.
    """
    try:
        entry = json.loads(line)
    except ValueError:
        return line
    if not isinstance(entry, dict) or "level" not in entry:
        return line
    if str(entry["level"]).lower() not in ("error", "critical"):
        return ""
    return ": ".join(str(entry[key]) for key in ("message", "error") if entry.get(key))
