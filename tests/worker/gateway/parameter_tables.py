"""The tables of parameters in docs/openai.md, and those of the code as the page has them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from vlm_worker.gateway.api.schema import Parameter

Rows = list[tuple[str, str, str]]
DOCS = Path(__file__).parents[3] / "docs" / "openai.md"


def documented(heading: str) -> Rows:
    """Name, support and note of each parameter below a heading of the page."""
    section = DOCS.read_text().split(f"{heading}\n", 1)[1].split("\n#", 1)[0]
    return re.findall(r"^\| `(\w+)` \| ([a-z ]+) \| (.*) \|$", section, re.MULTILINE)


def printed(table: Sequence[Parameter]) -> Rows:
    """What the page has of a table of the code."""
    rows = []
    for row in table:
        taken = ", ".join(f"`{json.dumps(value)}`" for value in row.neutral)
        what = f"{row.note}; taken: {taken}" if row.neutral else row.note
        rows.append((row.name, row.support.value, what))
    return rows
