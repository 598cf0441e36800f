"""Summarises a run: counts by outcome, percentiles, TTFT by stage, errors by kind."""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console

from vlm_cli.bench.load import Outcome, Result
from vlm_cli.output import ordered, plain_table

PERCENTILES = (50, 95, 99)


def summarise(results: Sequence[Result], *, elapsed: float) -> dict[str, Any]:
    """Return the report of a run, as `-o json` prints it; `elapsed` is in seconds.

    `results` has one item for each sent request, so `sent = ok + rejected + failed + cancelled`.
    `stages` counts only answers with stage times.
    """
    groups = {
        "all": results,
        "text": [r for r in results if not r.arrival.image],
        "image": [r for r in results if r.arrival.image],
    }
    errors = collections.Counter(r.error for r in results if r.outcome is not Outcome.OK)
    answers = [r.answer for r in results if r.answer is not None]
    tokens = sum(int(a.usage.get("completion_tokens") or 0) for a in answers)
    return {
        "elapsedSeconds": round(elapsed, 3),
        "answersPerSecond": _rate(len(answers), elapsed),
        "outputTokensPerSecond": _rate(tokens, elapsed),
        "requests": {name: _group(found) for name, found in groups.items() if found},
        "stages": {name: stages for name, found in groups.items() if (stages := _stages(found))},
        "errors": dict(errors.most_common()),
        "lagMilliseconds": _percentiles(r.lag for r in results),
    }


def print_report(report: dict[str, Any], out: Console) -> None:
    """Print a report as tables."""
    counts = [outcome.value for outcome in Outcome]
    times = [f"TTFT-P{p}" for p in PERCENTILES] + ["ITL-P50", "ITL-P95", "TOTAL-P95"]
    heads = ["SENT", *(c.upper() for c in counts), *times]
    table = plain_table("REQUESTS", *heads, numbers=tuple(heads))
    for name, group in report["requests"].items():
        table.add_row(
            name,
            str(group["sent"]),
            *(str(group[count]) for count in counts),
            *(_ms(group["ttftMilliseconds"], p) for p in PERCENTILES),
            *(_ms(group["itlMilliseconds"], p) for p in (50, 95)),
            _ms(group["totalMilliseconds"], 95),
        )
    out.print(table)
    _print_stages(report["stages"], out)
    if report["errors"]:
        errors = plain_table("ERROR", "COUNT", numbers=("COUNT",))
        for kind, count in report["errors"].items():
            errors.add_row(kind, str(count))
        out.print()
        out.print(errors)
    out.print(
        f"\n{report['answersPerSecond']} answers and {report['outputTokensPerSecond']} tokens a "
        f"second over {report['elapsedSeconds']} s. Times in ms, seen from here. Requests left at "
        f"most {report['lagMilliseconds'].get('p99', 0)} ms late (p99)."
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the nearest-rank percentile: the least value that `percent` % do not exceed."""
    ranked = sorted(values)
    return ranked[max(0, math.ceil(percent / 100 * len(ranked)) - 1)]


def _group(results: Sequence[Result]) -> dict[str, Any]:
    counts = collections.Counter(r.outcome for r in results)
    answers = [r.answer for r in results if r.answer is not None]
    gaps = [
        later - earlier
        for answer in answers
        for earlier, later in itertools.pairwise(answer.arrivals)
    ]
    group = {"sent": len(results), **{outcome.value: counts[outcome] for outcome in Outcome}}
    assert group["sent"] == sum(counts.values())
    return group | {
        "ttftMilliseconds": _percentiles(
            a.first_token for a in answers if a.first_token is not None
        ),
        "itlMilliseconds": _percentiles(gaps),
        "totalMilliseconds": _percentiles(a.total for a in answers),
    }


def _stages(results: Sequence[Result]) -> dict[str, Any]:
    measured = [r.answer.stages for r in results if r.answer is not None and r.answer.stages]
    by_stage: dict[str, list[float]] = collections.defaultdict(list)
    for stages in measured:
        for stage, spent in stages.items():
            by_stage[stage].append(spent)
    total = sum(sum(stages.values()) for stages in measured)
    return {
        stage: {
            "mean": round(sum(by_stage[stage]) / len(measured), 2),
            "p50": round(percentile(by_stage[stage], 50), 2),
            "p95": round(percentile(by_stage[stage], 95), 2),
            "sharePercent": round(100 * sum(by_stage[stage]) / total, 1) if total else 0.0,
        }
        for stage in ordered(by_stage)
    }


def _print_stages(stages: dict[str, Any], out: Console) -> None:
    names = [name for name in ("text", "image") if name in stages]
    if not names:
        out.print("\nThe server reports no stage times.")
        return
    heads = [f"{name.upper()} {what}" for name in names for what in ("MEAN", "P95", "SHARE")]
    table = plain_table("STAGE OF TTFT", *heads, numbers=tuple(heads))
    for stage in ordered(stage for name in names for stage in stages[name]):
        row: list[str] = []
        for name in names:
            figures = stages[name].get(stage)
            row += (
                [f"{figures['mean']:.1f}", f"{figures['p95']:.1f}", f"{figures['sharePercent']}%"]
                if figures
                else ["-"] * 3
            )
        table.add_row(stage, *row)
    out.print()
    out.print(table)


def _percentiles(seconds: Iterable[float]) -> dict[str, float]:
    values = list(seconds)
    if not values:
        return {}
    figures = {f"p{p}": round(percentile(values, p) * 1e3, 2) for p in PERCENTILES}
    return figures | {"mean": round(sum(values) / len(values) * 1e3, 2)}


def _ms(figures: dict[str, float], percent: int) -> str:
    value = figures.get(f"p{percent}")
    return "-" if value is None else f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def _rate(count: int, elapsed: float) -> float:
    return round(count / elapsed, 2) if elapsed > 0 else 0.0
