"""Regular expressions in linear time, for text that arrives in pieces. Pure.

Patterns come with a model's files, and text comes from the model. Python's `re` backtracks, which
takes exponential time for some patterns, and cannot say whether more text could complete a match.
So a pattern is compiled to a nondeterministic automaton (Pike's), which is run on all its states
at once: each character costs at most one visit per instruction.

    search(text) ─▶ Match     decided: no further text changes it
                 ─▶ Pending   from `start` on, further text may make a match
                 ─▶ None      no match begins in the text

Matches are those of `re` with DOTALL: leftmost, then by the order of alternatives. Taken: literals,
escapes, classes, `.`, groups, named groups, `|`, `* + ? {m,n}` also lazy, and one lookahead at the
end of the pattern. Everything else is refused.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Final

MAX_PATTERN: Final = 1024
MAX_INSTRUCTIONS: Final = 2048
MAX_MATCH: Final = 1024
"""Longest match, in characters. It bounds the text that a parser holds back."""

_END = "(end)"
_QUANTIFIER = re.compile(r"\*|\+|\?|\{(\d{1,3})(,(\d{0,3}))?\}")
_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_GROUP_NAME = re.compile(r"\?P<([A-Za-z_]\w*)>")


class PatternError(ValueError):
    """The pattern is not in the subset; the message says what."""


@dataclasses.dataclass(frozen=True, slots=True)
class Match:
    start: int
    end: int
    groups: dict[str, str]


@dataclasses.dataclass(frozen=True, slots=True)
class Pending:
    """Text from `start` on may become a match."""

    start: int


@dataclasses.dataclass(frozen=True, slots=True)
class Char:
    """One character; `text` is its class in the syntax of `re`."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """Alternatives of sequences. `name` is that of a named group."""

    branches: tuple[tuple[Node, ...], ...]
    name: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Repeat:
    node: Node
    least: int
    most: int | None
    lazy: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Lookahead:
    """Text that must follow the match; it is at the end of a pattern."""

    group: Group


Node = Char | Group | Repeat | Lookahead


def literal(texts: Sequence[str]) -> tuple[Node, ...]:
    """Return the nodes of a set of literals; the longest is preferred."""
    ordered = sorted(texts, key=len, reverse=True)
    branches = tuple(tuple(Char(re.escape(c)) for c in text) for text in ordered)
    return branches[0] if len(branches) == 1 else (Group(branches),)


def parse(source: str) -> tuple[Node, ...]:
    """Return the nodes of a pattern.

    Raises:
        PatternError: it is too long, invalid, or not in the subset.
    """
    if len(source) > MAX_PATTERN:
        raise PatternError(f"has more than {MAX_PATTERN} characters")
    parser = _Parser(source)
    branches = parser.branches()
    if parser.at < len(source):
        raise PatternError("has a ')' without '('")
    nodes = branches[0] if len(branches) == 1 else (Group(branches),)
    _check_lookahead(nodes, is_last=True)
    return nodes


def literal_runs(nodes: Sequence[Node]) -> list[str]:
    """Return the texts that the pattern spells out, longest runs of plain characters."""
    runs, run = [], ""
    for node in nodes:
        plain = isinstance(node, Char) and plain_char(node.text)
        if isinstance(plain, str):
            run += plain
            continue
        runs.append(run)
        run = ""
        inner: Node = node.group if isinstance(node, Lookahead) else node
        inner = inner.node if isinstance(inner, Repeat) else inner
        for branch in inner.branches if isinstance(inner, Group) else ():
            runs += literal_runs(branch)
    return [text for text in (*runs, run) if text]


def plain_char(text: str) -> str | None:
    """Return the character that a class text is, or None if it is a class."""
    if len(text) == 1 and text != ".":
        return text
    if len(text) == 2 and text[0] == "\\" and not text[1].isalnum():
        return text[1]
    return {"\\n": "\n", "\\t": "\t", "\\r": "\r"}.get(text)


def _check_lookahead(nodes: Sequence[Node], *, is_last: bool) -> None:
    for index, node in enumerate(nodes):
        if isinstance(node, Lookahead) and not (is_last and index == len(nodes) - 1):
            raise PatternError("has a lookahead that is not its end")
        inner: Node = node.node if isinstance(node, Repeat) else node
        inner = inner.group if isinstance(inner, Lookahead) else inner
        for branch in inner.branches if isinstance(inner, Group) else ():
            _check_lookahead(branch, is_last=False)


class _Parser:
    """Recursive descent over one pattern."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.at = 0
        self._depth = 0

    def branches(self) -> tuple[tuple[Node, ...], ...]:
        found: list[tuple[Node, ...]] = []
        nodes: list[Node] = []
        while self.at < len(self.source) and self.source[self.at] != ")":
            if self.source[self.at] == "|":
                self.at += 1
                found.append(tuple(nodes))
                nodes = []
            else:
                nodes.append(self._quantified(self._atom()))
        return (*found, tuple(nodes))

    def _quantified(self, node: Node) -> Node:
        match = _QUANTIFIER.match(self.source, self.at)
        if not match:
            return node
        if isinstance(node, Lookahead):
            raise PatternError("repeats a lookahead")
        self.at = match.end()
        lazy = self.source[self.at : self.at + 1] == "?"
        self.at += lazy
        if self.source[self.at : self.at + 1] in ("*", "+", "?"):
            raise PatternError("has a possessive or repeated quantifier")
        kind = match.group()
        if kind[0] in "*+?":
            least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[kind]
            return Repeat(node, least, most, lazy)
        least = int(match[1])
        if not match[2]:
            return Repeat(node, least, least, lazy)
        return Repeat(node, least, int(match[3]) if match[3] else None, lazy)

    def _atom(self) -> Node:
        char = self.source[self.at]
        if char == "(":
            return self._group()
        if char == "[":
            match = _CLASS.match(self.source, self.at)
            return self._char(match.group() if match else "")
        if char == "\\":
            text = self.source[self.at : self.at + 2]
            if text[1:].isalnum() and text[1] not in "sSdDwWntrfv":
                raise PatternError(f"has {text!r}, which is not built")
            return self._char(text)
        if char in "^$*+?":
            raise PatternError(f"has {char!r}, which is not built here")
        return self._char("." if char == "." else re.escape(char), length=1)

    def _char(self, text: str, length: int | None = None) -> Char:
        try:
            re.compile(text, re.DOTALL)
        except re.error:
            text = ""
        if not text:
            raise PatternError("has an invalid escape or class")
        self.at += len(text) if length is None else length
        return Char(text)

    def _group(self) -> Node:
        self._depth += 1
        if self._depth > 32:
            raise PatternError("has groups in more than 32 levels")
        self.at += 1
        name, ahead = None, False
        if named := _GROUP_NAME.match(self.source, self.at):
            name, self.at = named[1], named.end()
        elif self.source.startswith("?:", self.at):
            self.at += 2
        elif self.source.startswith("?=", self.at):
            ahead, self.at = True, self.at + 2
        elif self.source.startswith("?", self.at):
            raise PatternError(f"has '({self.source[self.at : self.at + 3]}', which is not built")
        group = Group(self.branches(), name)
        if self.source[self.at : self.at + 1] != ")":
            raise PatternError("has a '(' without ')'")
        self.at += 1
        self._depth -= 1
        return Lookahead(group) if ahead else group


_Test = Callable[[str], object]


@dataclasses.dataclass(frozen=True, slots=True)
class _Step:
    """An instruction. `test` consumes a character; `mark` notes a position; else it branches."""

    test: _Test | None = None
    mark: str | None = None
    to: tuple[int, ...] = ()
    is_end: bool = False


class Pattern:
    """A compiled pattern.

    Raises:
        PatternError: it has too many instructions, or matches the empty text.
    """

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = tuple(nodes)
        self._steps: list[_Step] = []
        self._classes: dict[int, str] = {}
        self._sequence(self.nodes)
        self._add(_Step(is_end=True))
        self._reached = [self._follow(pc) for pc in range(len(self._steps))]
        if any(self._steps[pc].is_end for pc, _ in self._reached[0]):
            raise PatternError("matches the empty text")
        classes = sorted({self._classes[pc] for pc, _ in self._reached[0]})
        self._begin = re.compile("|".join(classes), re.DOTALL)

    @property
    def group_names(self) -> frozenset[str]:
        marks = (step.mark for step in self._steps if step.mark)
        return frozenset(mark[1:] for mark in marks if mark[0] == "<")

    def search(self, text: str, start: int, *, final: bool) -> Match | Pending | None:
        """Return the first match from `start` on. If `final`, no text follows."""
        threads: list[_Thread] = []
        best: _Thread | None = None
        at = start
        while True:
            if best is None:
                begin = self._begin.match(text, at) if threads else self._begin.search(text, at)
                if begin is not None:
                    at = begin.start()
                    threads = self._with_new(threads, at)
                elif not threads:
                    return None
            if at == len(text):
                break
            threads, ended = self._advance(threads, text[at], at + 1)
            at += 1
            best = ended or best
            if best is not None and not threads:
                return self._match(text, best)
        if final:
            return None if best is None else self._match(text, best)
        starts = [begin for _, begin, _, _ in threads] + ([best[1]] if best else [])
        return Pending(min(starts)) if starts else None

    def _with_new(self, threads: list[_Thread], at: int) -> list[_Thread]:
        """Add the threads that begin at `at`, behind those that began before."""
        seen = {thread[0] for thread in threads}
        return threads + [
            (pc, at, tuple((name, at) for name in names), at)
            for pc, names in self._reached[0]
            if pc not in seen
        ]

    def _advance(
        self, threads: list[_Thread], char: str, at: int
    ) -> tuple[list[_Thread], _Thread | None]:
        """Read one character; return the threads, and the one that ended after them."""
        advanced: list[_Thread] = []
        seen: set[int] = set()
        for pc, begin, marks, _ in threads:
            test = self._steps[pc].test
            if test is None or not test(char) or at - begin > MAX_MATCH:
                continue
            for to, names in self._reached[pc + 1]:
                if to in seen:
                    continue
                seen.add(to)
                noted = (*marks, *((name, at) for name in names)) if names else marks
                if self._steps[to].is_end:
                    return advanced, (to, begin, noted, at)
                advanced.append((to, begin, noted, at))
        return advanced, None

    def _follow(self, start: int) -> tuple[tuple[int, tuple[str, ...]], ...]:
        """The consuming and ending steps that `start` leads to, by priority, with the marks."""
        out: list[tuple[int, tuple[str, ...]]] = []
        seen: set[int] = set()
        pending: list[tuple[int, tuple[str, ...]]] = [(start, ())]
        while pending:
            pc, names = pending.pop()
            if pc in seen:
                continue
            seen.add(pc)
            step = self._steps[pc]
            if step.test is not None or step.is_end:
                out.append((pc, names))
            elif step.mark is not None:
                pending.append((pc + 1, (*names, step.mark)))
            else:
                pending += [(to, names) for to in reversed(step.to)]
        return tuple(out)

    def _match(self, text: str, found: _Thread) -> Match:
        _, start, marks, end = found
        places = dict(marks)
        groups = {
            name[1:]: text[begin : places[">" + name[1:]]]
            for name, begin in places.items()
            if name[0] == "<"
        }
        return Match(start, places.get(_END, end), groups)

    def _add(self, step: _Step) -> int:
        if len(self._steps) >= MAX_INSTRUCTIONS:
            raise PatternError(f"has more than {MAX_INSTRUCTIONS} states")
        self._steps.append(step)
        return len(self._steps) - 1

    def _sequence(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            if isinstance(node, Char):
                test = re.compile(node.text, re.DOTALL).match
                self._classes[self._add(_Step(test=test))] = node.text
            elif isinstance(node, Group):
                self._group(node)
            elif isinstance(node, Repeat):
                self._repeat(node)
            else:
                self._add(_Step(mark=_END))
                self._group(node.group)

    def _group(self, group: Group) -> None:
        if group.name is not None:
            self._add(_Step(mark="<" + group.name))
        self._branches(group.branches)
        if group.name is not None:
            self._add(_Step(mark=">" + group.name))

    def _branches(self, branches: Sequence[tuple[Node, ...]]) -> None:
        if len(branches) == 1:
            return self._sequence(branches[0])
        split = self._add(_Step())
        self._sequence(branches[0])
        leave = self._add(_Step())
        self._steps[split] = _Step(to=(split + 1, len(self._steps)))
        self._branches(branches[1:])
        self._steps[leave] = _Step(to=(len(self._steps),))
        return None

    def _repeat(self, repeat: Repeat) -> None:
        for _ in range(repeat.least):
            self._sequence((repeat.node,))
        if repeat.most is None:
            split = self._add(_Step())
            self._sequence((repeat.node,))
            self._add(_Step(to=(split,)))
            self._steps[split] = _Step(to=self._order(repeat, split))
            return
        for _ in range(repeat.most - repeat.least):
            split = self._add(_Step())
            self._sequence((repeat.node,))
            self._steps[split] = _Step(to=self._order(repeat, split))

    def _order(self, repeat: Repeat, split: int) -> tuple[int, int]:
        inside, after = split + 1, len(self._steps)
        return (after, inside) if repeat.lazy else (inside, after)


_Marks = tuple[tuple[str, int], ...]
"""Names of marks with their positions, in the order in which they were passed."""
_Thread = tuple[int, int, _Marks, int]
"""Step, position where it began, marks, position that it reached."""
