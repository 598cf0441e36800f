"""docs/conditions.md names every condition, reason and cause of the code, and no other."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from vlm_operator.api.enums import AutoscalingPolicy
from vlm_operator.api.status import CONDITIONS
from vlm_operator.autoscale.outcome import Reason
from vlm_operator.status.causes import ACCESS_DENIED, POD_CAUSES, REFUSED_SECONDS
from vlm_operator.status.inputs import ConditionReason

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "conditions.md").read_text()
SOURCES = sorted((ROOT / "operator" / "vlm_operator" / "status").glob("*.py"))
OF_DEPLOYMENTS = {"QuotaExceeded", "PodsRefused"}  # causes that `refused_pods` finds


def sections() -> dict[str, str]:
    """The text below each heading."""
    parts = re.split(r"^## (.*)$", PAGE, flags=re.MULTILINE)
    return {
        name.strip(): text
        for title, text in zip(parts[1::2], parts[2::2], strict=True)
        for name in title.split(",")
    }


def table(text: str) -> dict[str, str]:
    """The last column, by the first."""
    return dict(re.findall(r"^\| `(\w+)` \|(?: [^|]* \|)? ([^|]*) \|$", text, re.MULTILINE))


def test_every_condition_has_a_table_of_reasons():
    found = sections()
    assert all(table(found[kind]) for kind in CONDITIONS)
    assert set(table(found["Causes"])) == {row.reason for row in POD_CAUSES} | OF_DEPLOYMENTS


def test_the_table_of_causes_has_the_delay_until_stalled():
    delays = {row.reason: row.delay for row in POD_CAUSES}
    delays |= dict.fromkeys(OF_DEPLOYMENTS, REFUSED_SECONDS)
    written = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \| [^|]* \|$", PAGE, re.MULTILINE))
    for reason, delay in delays.items():
        words = "the deadline" if delay is None else f"{delay:.0f} s" if delay else "at once"
        assert written[reason] == words, reason


def test_the_operator_recognises_the_message_of_a_denied_gateway():
    source = (ROOT / "worker" / "vlm_worker" / "gateway" / "discovery.py").read_text()
    assert f'"{ACCESS_DENIED}: ' in source


def test_every_reason_of_the_code_is_in_the_table_of_its_condition():
    found = sections()
    causes = set(table(found["Causes"]))
    known = {kind: set(table(found[kind])) | causes for kind in CONDITIONS}
    num_reasons = 0
    for kind, reason_of in states():
        kinds = {item for item in strings(kind) if item in known} or set(known)
        for reason in strings(reason_of):
            num_reasons += 1
            assert any(reason in known[kind] for kind in kinds), (kinds, reason)
    assert num_reasons > 30
    every = set().union(*known.values())
    assert {reason.value for reason in ConditionReason} <= every


def test_every_reason_of_a_table_is_in_the_code():
    enums = (ConditionReason, Reason, AutoscalingPolicy)
    can_say = {str(item.value) for enum in enums for item in enum}
    for source in SOURCES:
        can_say |= strings(ast.parse(source.read_text()))
    for title, text in sections().items():
        assert set(table(text)) <= can_say, title


def states() -> Iterator[tuple[ast.expr, ast.expr]]:
    """Kind and reason of each construction of a ConditionState of a VLMService.

    A function with one kind constructs them by `state = functools.partial(ConditionState, kind)`.
    """
    for source in SOURCES:
        for function in ast.parse(source.read_text()).body:
            calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
            of_kind = [
                call.args[1]
                for call in calls
                if getattr(call.func, "attr", "") == "partial"
                and getattr(call.args[0], "id", "") == "ConditionState"
            ]
            for call in calls:
                name = getattr(call.func, "id", "")
                if name == "ConditionState" and "NodesFound" not in strings(call.args[0]):
                    yield call.args[0], call.args[2]
                elif name == "state" and of_kind:
                    yield of_kind[0], call.args[1]


def strings(tree: ast.AST) -> set[str]:
    """The string constants below a node."""
    return {
        item.value
        for item in ast.walk(tree)
        if isinstance(item, ast.Constant) and isinstance(item.value, str)
    }
