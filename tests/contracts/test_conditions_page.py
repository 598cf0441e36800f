"""docs/conditions.md names every condition, reason and cause that the code says, and no other."""

import ast
import re
from pathlib import Path

from vlm_operator.api.status import CONDITIONS
from vlm_operator.status.causes import ACCESS_DENIED, POD_CAUSES, REFUSED_SECONDS
from vlm_operator.status.inputs import ConditionReason
from vlm_operator.status.reasons import CAUSES, REASONS_OF

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "conditions.md").read_text()
SOURCES = sorted((ROOT / "operator" / "vlm_operator" / "status").glob("*.py"))


def sections() -> dict[str, str]:
    """The text below each heading."""
    parts = re.split(r"^## (.*)$", PAGE, flags=re.MULTILINE)
    return {
        name.strip(): text
        for title, text in zip(parts[1::2], parts[2::2], strict=True)
        for name in title.split(",")
    }


def table(text: str) -> dict[str, str]:
    """The last column by the first."""
    return dict(re.findall(r"^\| `(\w+)` \|(?: [^|]* \|)? ([^|]*) \|$", text, re.MULTILINE))


def test_every_condition_has_its_table_of_reasons():
    found = sections()
    assert set(REASONS_OF) == set(CONDITIONS)
    for kind, reasons in REASONS_OF.items():
        assert table(found[kind]) == dict(reasons), kind
    assert table(found["Causes"]) == dict(CAUSES)


def test_the_table_of_causes_says_after_what_delay_a_person_is_needed():
    delays = {row.reason: row.delay for row in POD_CAUSES}
    delays |= {"QuotaExceeded": REFUSED_SECONDS, "PodsRefused": REFUSED_SECONDS}
    written = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \| [^|]* \|$", PAGE, re.MULTILINE))
    for reason, delay in delays.items():
        words = "the deadline" if delay is None else f"{delay:.0f} s" if delay else "at once"
        assert written[reason] == words, reason


def test_the_operator_knows_a_denied_gateway_by_the_gateways_own_words():
    source = (ROOT / "worker" / "vlm_worker" / "gateway" / "discovery.py").read_text()
    assert f'"{ACCESS_DENIED}: ' in source


def test_every_reason_that_the_code_says_is_in_a_table():
    known = set(CAUSES) | {reason for reasons in REASONS_OF.values() for reason in reasons}
    said = {reason.value for reason in ConditionReason}
    for source in SOURCES:
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "ConditionState":
                said |= {
                    item.value
                    for argument in node.args[2:3]
                    for item in ast.walk(argument)
                    if isinstance(item, ast.Constant) and isinstance(item.value, str)
                }
    assert len(said) > 30
    assert said <= known
