"""What fault tests measured, printed at the end of the run whether they pass or fail."""

from __future__ import annotations

NOTES: list[str] = []


def note(line: str) -> None:
    """A line of the summary."""
    NOTES.append(line)


def quantile(values: list[float], share: float) -> float:
    """The value that so large a share does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
