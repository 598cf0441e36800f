"""Where the time to the first token went, as bars that follow each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rich.table import Table

from vlm_operator.cli.output import plain_table

WIDTH = 40
# In the order in which a request passes them; stages of a newer gateway follow.
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


def waterfall(stages: Mapping[str, float]) -> Table:
    """One row a stage that took time, each bar beginning where the one above it ends.

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
    """Stage names in the order of a request."""
    found = set(stages)
    return [stage for stage in STAGES if stage in found] + sorted(found - set(STAGES))
