"""Measures how long work takes: means, and a line for decode steps. Pure.

A row is the growth of the workers' `WorkCounters` in one tick, by role, variant and kind. Rows are
dropped after fit_seconds.

mean     Σ seconds / Σ items of a role's work; credible from fit_points rows on
decode   seconds of a step = base + slope · KV tokens of the step, by weighted least squares

A line is confident if it rests on fit_points rows whose steps differ by fit_spread. Both of its
coefficients are never negative: if the slope would be, the last line stays. If the newest rows
differ from the line by more than fit_shift, the shape of the work has changed: older rows are
dropped, and the line is not confident until a new one is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from vlm_operator.autoscale.constants import Constants
from vlm_operator.autoscale.policy import ServicePolicy
from vlm_operator.autoscale.readings import PoolReading
from vlm_operator.names import POOL_ROLES, Role

MAX_ROWS = 64  # if there are more, pairs of the older half are added up
SHIFT_ROWS = 5  # newest rows that show a change of shape


@dataclasses.dataclass(frozen=True)
class Row:
    """The work of one tick, or of several. `units` are the KV tokens of decode steps."""

    at: float
    calls: float
    items: float
    seconds: float
    units: float

    def __add__(self, later: Row) -> Row:
        return Row(
            later.at,
            self.calls + later.calls,
            self.items + later.items,
            self.seconds + later.seconds,
            self.units + later.units,
        )


@dataclasses.dataclass(frozen=True)
class Fit:
    """Seconds of a decode step: `base`, plus `slope` per KV token of the step.

    Attributes:
        confident: it rests on enough rows that differ enough.
    """

    base: float
    slope: float
    confident: bool = False

    def tokens_within(self, seconds: float) -> float:
        """Return the KV tokens of a step that takes this long."""
        return max(0.0, (seconds - self.base) / self.slope)


@dataclasses.dataclass(frozen=True)
class FitMemory:
    """Rows of one role, variant and kind, oldest first.

    Attributes:
        fit: the last line; None except for decode.
        credible: there were fit_points rows, in this process or an earlier one.
    """

    rows: tuple[Row, ...] = ()
    fit: Fit | None = None
    credible: bool = False


def calibrate(
    policy: ServicePolicy,
    pools: Iterable[PoolReading],
    memory: Mapping[str, FitMemory],
    *,
    now: float,
) -> dict[str, FitMemory]:
    """Add the rows of one tick; keys are "role/variant/kind". Drops variants without a policy."""
    known = {
        f"{role}/{variant.name}" for role, pool in policy.pools.items() for variant in pool.variants
    }
    found = {key: item for key, item in memory.items() if key.rpartition("/")[0] in known}
    rows: dict[str, Row] = {}
    for pool in pools:
        for pod in pool.pods:
            variant = f"{pool.role}/{pod.variant}"
            for kind, work in pod.work.items():
                if variant in known and min(work.calls, work.seconds, work.units) > 0:
                    key = f"{variant}/{kind}"
                    calls, items, units = float(work.calls), float(work.items), float(work.units)
                    row = Row(now, calls, items, work.seconds, units)
                    rows[key] = rows[key] + row if key in rows else row
    for key, row in rows.items():
        old = found.get(key, FitMemory())
        found[key] = with_row(policy.constants, old, row, decode=key.endswith("/decode"))
    return found


def with_row(constants: Constants, memory: FitMemory, row: Row, *, decode: bool) -> FitMemory:
    """Add one row and drop old ones; for decode, fit a new line."""
    recent = [item for item in memory.rows if row.at - item.at <= constants.fit_seconds]
    rows = _thinned((*recent, row))
    credible = memory.credible or len(rows) >= constants.fit_points
    fit = memory.fit
    if not decode:
        return FitMemory(rows, fit, credible)
    if fit is not None and _shifted(fit, rows, constants.fit_shift):
        rows, fit = rows[-SHIFT_ROWS:], dataclasses.replace(fit, confident=False)
    line = _line(rows)
    if line is not None:
        sizes = [item.units / item.calls for item in rows]
        spread = (max(sizes) - min(sizes)) / max(sizes)
        sure = len(rows) >= constants.fit_points and spread >= constants.fit_spread
        if sure or fit is None or not fit.confident:
            fit = dataclasses.replace(line, confident=sure)
    return FitMemory(rows, fit, credible)


def credible(memory: Mapping[str, FitMemory], role: Role, kind: str) -> bool:
    """Whether the seconds of a role's work are known from fit_points rows of any variant."""
    return any(item.credible for item in _variants(memory, role, kind))


def service_seconds(memory: Mapping[str, FitMemory], role: Role, kind: str) -> float | None:
    """Return the mean seconds of one item of a role's work; None without rows."""
    rows = [row for item in _variants(memory, role, kind) for row in item.rows]
    items = sum(row.items for row in rows)
    return sum(row.seconds for row in rows) / items if items > 0 else None


def busy_seconds(memory: Mapping[str, FitMemory], kind: str, *, since: float) -> float:
    """Return the seconds that all pools computed one kind of work since a time."""
    variants = [item for role in POOL_ROLES for item in _variants(memory, role, kind)]
    return sum(row.seconds for item in variants for row in item.rows if row.at > since)


def _variants(memory: Mapping[str, FitMemory], role: Role, kind: str) -> list[FitMemory]:
    head, tail = f"{role}/", f"/{kind}"
    return [item for key, item in memory.items() if key.startswith(head) and key.endswith(tail)]


def _line(rows: Sequence[Row]) -> Fit | None:
    """Return the least squares line weighted by calls; None if it does not rise."""
    if len(rows) < 2:
        return None
    calls = sum(row.calls for row in rows)
    size = sum(row.units for row in rows) / calls
    mean = sum(row.seconds for row in rows) / calls
    squares = sum(row.units**2 / row.calls for row in rows)
    products = sum(row.units * row.seconds / row.calls for row in rows)
    spread = squares - calls * size**2
    slope = (products - calls * size * mean) / spread if spread > 1e-9 * squares else 0.0
    base = mean - slope * size
    if base < 0:
        base, slope = 0.0, products / squares
    return Fit(base, slope) if slope > 0 else None


def _shifted(fit: Fit, rows: Sequence[Row], share: float) -> bool:
    """Whether the newest rows differ from the fit by more than `share` of its prediction."""
    newest = rows[-SHIFT_ROWS:]
    if len(newest) < SHIFT_ROWS:
        return False
    predicted = sum(fit.base * row.calls + fit.slope * row.units for row in newest)
    error = abs(sum(row.seconds for row in newest) - predicted)
    return predicted > 0 and error > share * predicted


def _thinned(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    if len(rows) <= MAX_ROWS:
        return rows
    half = MAX_ROWS // 2
    older = (first + second for first, second in zip(rows[:half:2], rows[1:half:2], strict=True))
    return (*older, *rows[half:])
