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


class Table:
    """The kill matrix: what became of a request, by its stage and by who was hit how."""

    def __init__(self) -> None:
        self._cells: dict[tuple[str, str, str], list[tuple[str, float]]] = {}

    def add(self, *, stage: str, role: str, blow: str, result: str, seconds: float) -> None:
        """One case; repetitions share a cell."""
        self._cells.setdefault((stage, role, blow), []).append((result, seconds))

    def lines(self) -> list[str]:
        """Rows are stages, columns what was hit and how; the slowest seconds of each cell."""
        if not self._cells:
            return []
        stages = list(dict.fromkeys(stage for stage, _, _ in self._cells))
        columns = list(dict.fromkeys((role, blow) for _, role, blow in self._cells))
        heads = [f"{role[0].upper()} {blow}" for role, blow in columns]
        rows = [f"{'stage':<15}" + "".join(f"{head:>11}" for head in heads)]
        for stage in stages:
            cells = [self._cell(stage, role, blow) for role, blow in columns]
            rows.append(f"{stage:<15}" + "".join(f"{cell:>11}" for cell in cells))
        return [*rows, ". untouched   m moved elsewhere; seconds to the last word"]

    def _cell(self, stage: str, role: str, blow: str) -> str:
        cases = self._cells.get((stage, role, blow), [])
        if not cases:
            return ""
        marks = {"m" if result.startswith("moved") else "." for result, _ in cases}
        return f"{''.join(sorted(marks))} {max(seconds for _, seconds in cases):.2f}"


MATRIX = Table()
