"""How long work takes, from what pods report: means of all work, a line for decode steps. Pure.

A row is the difference of `WorkCounters` of two ticks. Rows are forgotten after fit_seconds.

mean      Σ seconds / Σ items of a role's work; credible from fit_points rows on
decode    seconds / calls = B + A · k    k  KV tokens of a step: ITL(k); weighted least squares

A line is believed when it rests on fit_points rows whose steps spread by fit_spread. B is never
negative, and where A would be, the last good line stays. When the newest rows take more than
fit_shift longer or shorter than the line predicts, the work has changed its shape: older rows are
forgotten, and the old line is unconfident until a new one fits.
A variant without a line of its own takes another's, by the ratio of their speeds, unconfidently.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from vlm_operator.autoscale.constants import Constants
from vlm_operator.autoscale.policy import ServicePolicy
from vlm_operator.autoscale.readings import PoolReading
from vlm_operator.names import POOL_ROLES, Role
from vlm_operator.state import WorkCounters

MAX_ROWS = 64  # beyond, neighbours are added up: a sum of rows is a row
SHIFT_ROWS = 5  # newest, that a change of shape must show in


@dataclasses.dataclass(frozen=True)
class Row:
    """What was computed between two ticks. `units` are the KV tokens of decode steps."""

    at: float
    calls: float
    items: float
    seconds: float
    units: float

    def __add__(self, later: Row) -> Row:
        """Both as one row."""
        return Row(
            later.at,
            self.calls + later.calls,
            self.items + later.items,
            self.seconds + later.seconds,
            self.units + later.units,
        )


@dataclasses.dataclass(frozen=True)
class Fit:
    """Seconds of a decode step: `base`, and `slope` for each KV token.

    Attributes:
        confident: enough rows, spread widely enough; all else is a guess.
    """

    base: float
    slope: float
    confident: bool = False

    def tokens_within(self, seconds: float) -> float:
        """How many KV tokens a step may have that takes so many seconds."""
        return max(0.0, (seconds - self.base) / self.slope)

    def at_speed(self, ratio: float) -> Fit:
        """The same work on a node type that is so many times as fast; a guess."""
        return Fit(self.base / ratio, self.slope / ratio)


@dataclasses.dataclass(frozen=True)
class FitMemory:
    """Rows of one role, variant and kind, oldest first.

    Attributes:
        fit: of decode, the last good line.
        credible: there were fit_points rows, in this process or an earlier one.
    """

    rows: tuple[Row, ...] = ()
    fit: Fit | None = None
    credible: bool = False


def calibrated(
    policy: ServicePolicy,
    pools: Iterable[PoolReading],
    memory: Mapping[str, FitMemory],
    *,
    now: float,
) -> dict[str, FitMemory]:
    """Add what this tick's answers say; keys are "role/variant/kind"."""
    sums: dict[str, list[WorkCounters]] = {}
    for pool in pools:
        for pod in pool.pods:
            for kind, did in pod.did.items():
                if did.calls > 0 and did.seconds > 0 and did.units > 0:
                    sums.setdefault(f"{pool.role}/{pod.variant}/{kind}", []).append(did)
    known = {
        f"{role}/{variant.name}" for role, pool in policy.pools.items() for variant in pool.variants
    }
    found = {key: item for key, item in memory.items() if key.rpartition("/")[0] in known}
    for key, parts in sums.items():
        if key.rpartition("/")[0] not in known:
            continue
        row = Row(
            at=now,
            calls=float(sum(part.calls for part in parts)),
            items=float(sum(part.items for part in parts)),
            seconds=sum(part.seconds for part in parts),
            units=float(sum(part.units for part in parts)),
        )
        old = found.get(key, FitMemory())
        found[key] = with_row(policy.constants, old, row, decode=key.endswith("/decode"))
    return found


def with_row(constants: Constants, memory: FitMemory, row: Row, *, decode: bool) -> FitMemory:
    """Add one row, forget old ones and, of decode, fit anew."""
    recent = [item for item in memory.rows if row.at - item.at <= constants.fit_seconds]
    rows = _thin((*recent, row))
    credible = memory.credible or len(rows) >= constants.fit_points
    fit = memory.fit
    if decode:
        if fit is not None and _shifted(fit, rows, constants.fit_shift):
            rows, fit = rows[-SHIFT_ROWS:], dataclasses.replace(fit, confident=False)
        found = _line(rows)
        if found is not None:
            sizes = [item.units / item.calls for item in rows]
            spread = (max(sizes) - min(sizes)) / max(sizes)
            sure = len(rows) >= constants.fit_points and spread >= constants.fit_spread
            if sure or fit is None or not fit.confident:
                fit = dataclasses.replace(found, confident=sure)
    return FitMemory(rows, fit, credible)


def fit_of(policy: ServicePolicy, memory: Mapping[str, FitMemory], variant: str) -> Fit | None:
    """A variant's own decode line, or a guess from another's by their speeds; None without any."""
    own = memory.get(f"{Role.DECODE}/{variant}/decode", FitMemory()).fit
    if own is not None and own.confident:
        return own
    speeds = {item.name: item.speed for item in policy.pools[Role.DECODE].variants}
    for name, speed in speeds.items():
        other = memory.get(f"{Role.DECODE}/{name}/decode", FitMemory()).fit
        if name != variant and other is not None and other.confident:
            return other.at_speed(speeds.get(variant, 1.0) / speed)
    return own


def credible(memory: Mapping[str, FitMemory], role: Role, kind: str) -> bool:
    """Whether enough is known of how long a role's work takes to rest its size on it."""
    return any(item.credible for item in _of(memory, role, kind))


def service_seconds(memory: Mapping[str, FitMemory], role: Role, kind: str) -> float | None:
    """Mean seconds of one item of a role's work, over all node types; None before the first."""
    rows = _rows(memory, role, kind)
    items = sum(row.items for row in rows)
    return sum(row.seconds for row in rows) / items if items > 0 else None


def busy_seconds(memory: Mapping[str, FitMemory], kind: str, *, since: float) -> float:
    """Seconds that all pods together spent on a kind of work."""
    rows = [row for role in POOL_ROLES for row in _rows(memory, role, kind)]
    return sum(row.seconds for row in rows if row.at > since)


def _rows(memory: Mapping[str, FitMemory], role: Role, kind: str) -> list[Row]:
    return [row for item in _of(memory, role, kind) for row in item.rows]


def _of(memory: Mapping[str, FitMemory], role: Role, kind: str) -> list[FitMemory]:
    """Of all variants of a role."""
    head, tail = f"{role}/", f"/{kind}"
    return [item for key, item in memory.items() if key.startswith(head) and key.endswith(tail)]


def _line(rows: Sequence[Row]) -> Fit | None:
    """Least squares weighted by calls; None where steps do not take longer with more tokens."""
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
    """Whether the newest rows took more than `share` longer or shorter than the fit says."""
    newest = rows[-SHIFT_ROWS:]
    if len(newest) < SHIFT_ROWS:
        return False
    said = sum(fit.base * row.calls + fit.slope * row.units for row in newest)
    return said > 0 and abs(sum(row.seconds for row in newest) - said) > share * said


def _thin(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """Add up neighbours of the older half when there are too many."""
    if len(rows) <= MAX_ROWS:
        return rows
    half = MAX_ROWS // 2
    older = (first + second for first, second in zip(rows[:half:2], rows[1:half:2], strict=True))
    return (*older, *rows[half:])
