"""Formats the numbers of a decision, so that a reader can compute the replicas by hand.

  load     1.8 s of work came each second, 6 s of it wait; 1.92 is planned for, 60 s ahead
  rests on 75 % use; an item takes 0.45 s and may wait 0.5 s, variability 1; bottleneck share 68 %

The formulas are in docs/autoscaling.md.
"""

from __future__ import annotations

from vlm_operator.autoscale.estimating.size import LoadSignals
from vlm_operator.autoscale.record import Record
from vlm_operator.names import Role


def reckoned(record: Record, role: Role) -> list[str]:
    """Return the lines of one pool; none if its tick had no signals of the pool."""
    signals = record.outcome.estimate.signals.get(role)
    if signals is None:
        return []
    starts = [seconds for (of, _), seconds in record.outcome.estimate.startup.items() if of is role]
    ahead = f"{max(starts, default=0.0):.0f} s ahead"
    if role is Role.DECODE:
        parts = _of_tokens(record, signals, ahead)
        if Role.PREFILL in record.policy.pools:
            return parts
        return [*parts, *_of_work(record, role, signals, signals.planned_work, "now")]
    return _of_work(record, role, signals, signals.planned, ahead)


def _of_work(
    record: Record, role: Role, signals: LoadSignals, planned: float, ahead: str
) -> list[str]:
    demand, rules = signals.demand, record.policy.pools[role]
    load = (
        f"{demand.erlangs:.3g} s of work came each second, {demand.queued_seconds:.3g} s wait; "
        f"{planned:.3g} is planned for, {ahead}"
    )
    rests = [f"{rules.utilization:.0%} use"]
    each, budget = signals.service_seconds, signals.budget_seconds
    if each is not None and budget is not None:
        known = "" if signals.credible else ", not credible yet"
        rests.append(
            f"an item takes {each:.3g} s and may wait {budget:.3g} s, "
            f"variability {demand.variability:.2g}{known}"
        )
    return [
        _line("load", load),
        _line("rests on", "; ".join([*rests, _bottleneck_share(record, signals)])),
    ]


def _of_tokens(record: Record, signals: LoadSignals, ahead: str) -> list[str]:
    demand, rules = signals.demand, record.policy.pools[Role.DECODE]
    load = (
        f"{demand.tokens:,.0f} KV tokens in use or asked for, {demand.queued_tokens:,.0f} of them "
        f"wait; {signals.planned:,.0f} are planned for, {ahead}"
    )
    rests = [f"{rules.kv_occupancy:.0%} occupancy"]
    if demand.tokens_per_unit is not None:
        rests.append(f"a unit has {demand.tokens_per_unit:,.0f}")
    if signals.itl_tokens is not None:
        rests.append(f"{signals.itl_tokens:,.0f} within the time between tokens")
    return [
        _line("load", load),
        _line("rests on", "; ".join([*rests, _bottleneck_share(record, signals)])),
    ]


def _bottleneck_share(record: Record, signals: LoadSignals) -> str:
    share = f"bottleneck share {signals.bottleneck_share:.0%}"
    return f"{share}, growth from {record.policy.tuning.bottleneck_share:.0%}"


def _line(name: str, text: str) -> str:
    return f"  {name:<8} {text}"
