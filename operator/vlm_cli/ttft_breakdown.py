"""Formats TTFT by stage, as consecutive bars."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rich.table import Table

from vlm_cli.output import plain_table

WIDTH = 40
# In the order of a request. Unknown stages, from a newer gateway, come after these.
STAGES = (
    "gateway",
    "media",
    "encoder_queue",
    "encode",
    "embed_transfer",
    "decode_reserve",
    "prefill_queue",
    "prefill",
    "other",
)


def ttft_breakdown(stages: Mapping[str, float]) -> Table:
    """Return a table with one row per stage; each bar starts at the end of the one above it.

    Args:
        stages: milliseconds by stage; they add up to the TTFT.
    """
    table = plain_table("STAGE", "MS", "SHARE", "", numbers=("MS", "SHARE"))
    total = sum(stages.values())
    before = 0.0
    for stage in ordered(stages):
        spent = stages[stage]
        if total > 0 and spent > 0:
            start = round(WIDTH * before / total)
            end = max(start + 1, round(WIDTH * (before + spent) / total))
            bar = " " * min(start, WIDTH - 1) + "█" * (end - min(start, WIDTH - 1))
            table.add_row(stage, f"{spent:.1f}", f"{100 * spent / total:.0f}%", f"[cyan]{bar}[/]")
        before += spent
    table.add_row("TTFT", f"{total:.1f}", "100%" if total > 0 else "", "", style="bold")
    return table


def ordered(stages: Iterable[str]) -> list[str]:
    """Return stage names in the order of a request."""
    found = set(stages)
    return [stage for stage in STAGES if stage in found] + sorted(found - set(STAGES))
