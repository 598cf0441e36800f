"""Patterns find what `re` finds, in linear time, and know what more text could still match."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_worker.gateway.responding.patterns import (
    MAX_MATCH,
    Match,
    Pattern,
    PatternError,
    Pending,
    literal,
    literal_runs,
    parse,
)

PATTERNS = {
    source: Pattern(parse(source))
    for source in (
        r"\s*<tool_call>", r"<f=(?P<name>[^>\n]+)>", r"a(?P<x>.*?)\s*b|ab*c", r"(?:a|ab)(?:c|bcd)",
        r"(?:<x>)?\{(?=\s*\"n)", r"(?P<a>a+)(?P<b>b?|c{1,2})", r"a{2,3}?b{2}|c{2,}", r"[]a\]]\.\w",
        r"(?:a|b)*?c", r"(?:a*)*b",
    )
}  # fmt: skip
TEXTS = st.lists(
    st.sampled_from(["a", "b", "c", "d", " ", "\n", "<", ">", "<x>", "{", '"n', "<f=", "]", ".",
                     "<tool_call>", "x"]),
    max_size=12,
).map("".join)  # fmt: skip


@pytest.mark.parametrize("source", PATTERNS)
@given(text=TEXTS)
def test_a_match_is_that_of_re(source: str, text: str) -> None:
    expected = re.search(source, text, re.DOTALL)
    found = PATTERNS[source].search(text, 0, final=True)
    if expected is None:
        assert found is None
        return
    groups = {name: value for name, value in expected.groupdict().items() if value is not None}
    assert found == Match(expected.start(), expected.end(), groups)


@pytest.mark.parametrize("source", PATTERNS)
@given(text=TEXTS, more=TEXTS)
def test_what_is_decided_is_not_changed_by_more_text(source: str, text: str, more: str) -> None:
    pattern = PATTERNS[source]
    early = pattern.search(text, 0, final=False)
    late = pattern.search(text + more, 0, final=True)
    if isinstance(early, Match):
        assert late == early
    elif isinstance(early, Pending):
        assert late is None or isinstance(late, Match) and late.start >= early.start  # noqa: RUF021
    else:
        assert not isinstance(late, Match) or late.start >= len(text)


@pytest.mark.parametrize("source", [r"(?:a*)*b", r"(?:a|aa)+b", r"(?:.*?a){12}b"])
def test_no_pattern_takes_exponential_time(source: str) -> None:
    pattern = Pattern(parse(source))
    started = time.perf_counter()
    assert pattern.search("a" * 3000 + "c", 0, final=True) is None
    assert time.perf_counter() - started < 20


def test_a_match_has_a_longest_length() -> None:
    pattern = Pattern(parse("a.*?b"))
    assert isinstance(pattern.search("a" + "x" * (MAX_MATCH - 3) + "b", 0, final=True), Match)
    assert pattern.search("a" + "x" * MAX_MATCH + "b", 0, final=True) is None
    assert pattern.search("a" + "x" * MAX_MATCH, 0, final=False) is None


def test_of_literals_the_longest_is_found() -> None:
    pattern = Pattern(literal(["</s>", "</s></s>"]))
    assert pattern.search("x</s>", 0, final=False) == Pending(1)
    assert pattern.search("x</s></s>", 0, final=False) == Match(1, 9, {})
    assert pattern.search("x</s>y", 0, final=False) == Match(1, 5, {})


def test_the_texts_of_a_pattern_are_found() -> None:
    assert literal_runs(parse(r"\s*<\|call\|>f:(?P<n>\w+)(?:\[ARGS\])?(?=\{)")) == [
        "<|call|>f:", "[ARGS]", "{",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (r"(a)\1", "not built"), ("^a", "not built"), ("a$", "not built"), (r"\ba", "not built"),
        ("(?=a)b", "not its end"), ("(?!a)b", "not built"), ("(?<=a)b", "not built"),
        ("(?i)a", "not built"), ("a++", "possessive"), ("(a", r"without '\)'"),
        ("a)", r"without '\('"),
        ("[a", "class"), ("[b-a]", "class"), ("a*", "empty text"), ("x" * 1025, "characters"),
        ("(?:a{999}){999}", "states"), ("(" * 40 + "a" + ")" * 40, "levels"), ("*a", "not built"),
        ("(?=a)*", "repeats"),
    ],
)  # fmt: skip
def test_what_is_not_in_the_subset_is_refused(source: str, why: str) -> None:
    with pytest.raises(PatternError, match=why):
        Pattern(parse(source))
