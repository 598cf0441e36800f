"""Why a container ended, from its `terminated` state, in one line. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

SIGNALLED: Final = 128  # exit codes above it are this and the signal's number


def ending(terminated: Mapping[str, Any] | None) -> str:
    """Return the reason, the exit code, and the error in the end of the log; empty for None."""
    if terminated is None:
        return ""
    reason, code = terminated.get("reason", "Error"), terminated.get("exitCode")
    cause = _cause(str(terminated.get("message", "")), by_signal=(code or 0) > SIGNALLED)
    return f"{reason}, exit code {code}" + (f": {cause}" if cause else "")


def _cause(log: str, *, by_signal: bool) -> str:
    """The last error among the last lines of a log; empty if there is none.

    A process that a signal ended wrote no reason: only an error that is its very last line counts.
    """
    lines = log.strip().splitlines()
    for line in lines[-1:] if by_signal else reversed(lines):
        if found := _error_in(line):
            return found
    return ""


def _error_in(line: str) -> str:
    """What a line says, if it is an error: an entry of that level, or text that is no entry."""
    try:
        entry = json.loads(line)
    except ValueError:
        return line
    if not isinstance(entry, dict) or "level" not in entry:
        return line
    if str(entry["level"]).lower() not in ("error", "critical"):
        return ""
    return ": ".join(str(entry[key]) for key in ("message", "error") if entry.get(key))
