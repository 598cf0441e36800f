"""How long work takes on each node type, fitted to what its pods report. Pure.

kind      a row is the difference of `WorkCounters` of two ticks; weighted least squares
encode    seconds / items = c0 + c1 · P + c2 · P²             P  patches of an image
prefill   seconds / calls = c0 + c1 · n + c2 · n·(h + n/2)    n  tokens computed after h cached ones
decode    seconds / calls = B + A · k                         k  KV tokens of a step: ITL(k)

A fit is believed when it rests on fit_points rows whose regressor spreads by fit_spread; rows are
forgotten after fit_seconds. Coefficients are never negative: a term that would be is left out, and
where the slope itself would be, the last good fit stays. When the newest rows take more than
fit_shift longer or shorter than the fit says, the work has changed its shape: older rows go.
A variant without a fit of its own takes another's, by the ratio of their speeds, unconfidently.
A role's mean service time is credible from fit_points rows on, however alike they are.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

from vlm_operator.autoscale.constants import Constants
from vlm_operator.autoscale.estimating.readings import PoolReading
from vlm_operator.autoscale.policy import ServicePolicy
from vlm_operator.names import POOL_ROLES, Role
from vlm_operator.state import WorkCounters

MAX_ROWS = 64  # beyond, neighbours are added up: a sum of rows is a row
SHIFT_ROWS = 5  # newest, that a change of shape must show in
SQUARES = {"encode": True, "prefill": True, "decode": False}  # kinds with a third term
KINDS = tuple(SQUARES)


@dataclasses.dataclass(frozen=True)
class Row:
    """What was computed between two ticks, over `weight` items (encode) or calls."""

    at: float
    weight: float
    items: float
    seconds: float
    units: float
    squares: float

    @property
    def size(self) -> float:
        """Units of one item or call."""
        return self.units / self.weight


@dataclasses.dataclass(frozen=True)
class Fit:
    """Seconds of one item (encode) or call, as a function of its size.

    Attributes:
        base, slope, curve: of 1, of units, of squares.
        confident: enough rows, spread widely enough; all else is a guess.
        size, square: of a mean item or call.
        rows: how many it rests on.
    """

    base: float
    slope: float
    curve: float
    confident: bool
    size: float
    square: float
    rows: int

    @property
    def seconds(self) -> float:
        """Of a mean item or call."""
        return self.base + self.slope * self.size + self.curve * self.square

    def size_within(self, seconds: float) -> float | None:
        """How many units fit into so many seconds; None where the fit sets no bound."""
        if self.slope <= 0:
            return None
        return max(0.0, (seconds - self.base) / self.slope)

    def at_speed(self, ratio: float) -> Fit:
        """The same work on a node type that is so many times as fast; a guess."""
        return dataclasses.replace(
            self,
            base=self.base / ratio,
            slope=self.slope / ratio,
            curve=self.curve / ratio,
            confident=False,
        )


@dataclasses.dataclass(frozen=True)
class FitMemory:
    """Rows of one role, variant and kind, oldest first, and the last good fit."""

    rows: tuple[Row, ...] = ()
    fit: Fit | None = None


def with_rows(
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
    found = dict(memory)
    for key, parts in sums.items():
        weight = sum(part.items if key.endswith("/encode") else part.calls for part in parts)
        if weight <= 0:
            continue
        row = Row(
            at=now,
            weight=float(weight),
            items=float(sum(part.items for part in parts)),
            seconds=sum(part.seconds for part in parts),
            units=float(sum(part.units for part in parts)),
            squares=sum(part.squares for part in parts),
        )
        old = found.get(key, FitMemory())
        found[key] = dataclasses.replace(old, rows=_thin((*old.rows, row)))
    known = {
        f"{role}/{variant.name}" for role, pool in policy.pools.items() for variant in pool.variants
    }
    return {key: item for key, item in found.items() if key.rpartition("/")[0] in known}


def fitted(constants: Constants, memory: FitMemory, kind: str, *, now: float) -> FitMemory:
    """Fit anew, on the slow tick."""
    rows = tuple(row for row in memory.rows if now - row.at <= constants.fit_seconds)
    if memory.fit is not None and _shifted(memory.fit, rows, constants.fit_shift):
        rows = rows[-SHIFT_ROWS:]
    found = _fit(rows, curved=SQUARES[kind])
    if found is None:
        return FitMemory(rows, memory.fit)
    sizes = [row.size for row in rows]
    spread = (max(sizes) - min(sizes)) / max(sizes)
    sure = len(rows) >= constants.fit_points and spread >= constants.fit_spread
    found = dataclasses.replace(found, confident=sure)
    if not sure and memory.fit is not None and memory.fit.confident:
        return FitMemory(rows, memory.fit)
    return FitMemory(rows, found)


def fit_of(
    policy: ServicePolicy, memory: Mapping[str, FitMemory], role: Role, variant: str, kind: str
) -> Fit | None:
    """The variant's own fit, or a guess from another's by their speeds; None without any."""
    own = memory.get(f"{role}/{variant}/{kind}")
    if own is not None and own.fit is not None and own.fit.confident:
        return own.fit
    pool = policy.pools.get(role)
    speeds = {item.name: item.speed for item in pool.variants} if pool is not None else {}
    for name, speed in speeds.items():
        other = memory.get(f"{role}/{name}/{kind}")
        if name != variant and other is not None and other.fit and other.fit.confident:
            return other.fit.at_speed(speeds.get(variant, 1.0) / speed)
    return own.fit if own is not None else None


def credible(constants: Constants, memory: Mapping[str, FitMemory], role: Role, kind: str) -> bool:
    """Whether enough is known of how long a role's work takes to rest its size on it."""
    return any(
        len(item.rows) >= constants.fit_points or (item.fit is not None and item.fit.confident)
        for item in _of(memory, role, kind)
    )


def service_seconds(memory: Mapping[str, FitMemory], role: Role, kind: str) -> float | None:
    """Mean seconds of one item of a role's work, over all node types; None before the first."""
    seconds = items = 0.0
    for row in _rows(memory, role, kind):
        seconds, items = seconds + row.seconds, items + row.items
    return seconds / items if items > 0 else None


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


def _fit(rows: Sequence[Row], *, curved: bool) -> Fit | None:
    """Weighted least squares without negative coefficients; None where nothing rises with size."""
    if len(rows) < 2:
        return None
    weight = sum(row.weight for row in rows)
    size = sum(row.units for row in rows) / weight
    square = sum(row.squares for row in rows) / weight
    mean = sum(row.seconds for row in rows) / weight
    for terms in ((True, True), (True, False), (False, True), (False, False)):
        based, bent = terms
        if bent and not curved:
            continue
        found = _solve(rows, based=based, bent=bent)
        if found is None:
            continue
        base, slope, curve = found
        if min(base, curve) >= 0 and slope > 0 and all(map(math.isfinite, found)):
            predicted = base + slope * size + curve * square
            if predicted > 0 and mean > 0:
                return Fit(base, slope, curve, False, size, square, len(rows))
    return None


def _solve(rows: Sequence[Row], *, based: bool, bent: bool) -> tuple[float, float, float] | None:
    """Normal equations of the terms asked for; None where they do not determine them."""
    scale = max(row.size for row in rows)
    bend = max(row.squares / row.weight for row in rows)
    if scale <= 0 or (bent and bend <= 0):
        return None
    use = [based, True, bent]
    columns = [index for index in range(3) if use[index]]
    matrix = [[0.0] * len(columns) for _ in columns]
    right = [0.0] * len(columns)
    for row in rows:
        values = (1.0, row.size / scale, row.squares / row.weight / bend if bent else 0.0)
        chosen = [values[index] for index in columns]
        y = row.seconds / row.weight
        for i, left in enumerate(chosen):
            right[i] += row.weight * left * y
            for j, other in enumerate(chosen):
                matrix[i][j] += row.weight * left * other
    solved = _gauss(matrix, right)
    if solved is None:
        return None
    found = [0.0, 0.0, 0.0]
    for index, value in zip(columns, solved, strict=True):
        found[index] = value
    return found[0], found[1] / scale, found[2] / bend if bent else 0.0


def _gauss(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    size = len(right)
    rows = [[*line, value] for line, value in zip(matrix, right, strict=True)]
    for column in range(size):
        pivot = max(range(column, size), key=lambda at: abs(rows[at][column]))
        if abs(rows[pivot][column]) <= 1e-9 * max(abs(matrix[column][column]), 1e-300):
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for at in range(column + 1, size):
            factor = rows[at][column] / rows[column][column]
            rows[at] = [a - factor * b for a, b in zip(rows[at], rows[column], strict=True)]
    found = [0.0] * size
    for column in reversed(range(size)):
        rest = sum(rows[column][other] * found[other] for other in range(column + 1, size))
        found[column] = (rows[column][size] - rest) / rows[column][column]
    return found


def _shifted(fit: Fit, rows: Sequence[Row], share: float) -> bool:
    """Whether the newest rows took more than `share` longer or shorter than the fit says."""
    newest = rows[-SHIFT_ROWS:]
    if len(newest) < SHIFT_ROWS:
        return False
    said = sum(
        fit.base * row.weight + fit.slope * row.units + fit.curve * row.squares for row in newest
    )
    return said > 0 and abs(sum(row.seconds for row in newest) - said) > share * said


def _thin(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """Add up neighbours of the older half when there are too many."""
    if len(rows) <= MAX_ROWS:
        return rows
    half = MAX_ROWS // 2
    older, newer = rows[:half], rows[half:]
    pairs = zip(older[::2], older[1::2], strict=True)
    return (
        *(
            Row(
                at=later.at,
                weight=earlier.weight + later.weight,
                items=earlier.items + later.items,
                seconds=earlier.seconds + later.seconds,
                units=earlier.units + later.units,
                squares=earlier.squares + later.squares,
            )
            for earlier, later in pairs
        ),
        *newer,
    )
