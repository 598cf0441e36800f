"""Writes the rules of a call's tags: one per argument, with a text or JSON in it. Pure.

    <parameter=city>Paris</parameter>     a string has no quotes
    <parameter=days>3</parameter>         other values are JSON

The reader takes a text by the types of its property (`calls.written_value`). So a value is only
written if the reader makes the same value of it; else the schema is refused.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from vlm_worker.gateway.responding.calls import escaped_value, written_value
from vlm_worker.gateway.responding.dialect_grammar import StandardRules, hexed, quoted, without
from vlm_worker.gateway.responding.enforceable import (
    AnyText,
    AnyValue,
    Array,
    GrammarError,
    Literals,
    Member,
    Node,
    Object,
    Scalar,
    choices,
    is_of,
)
from vlm_worker.gateway.responding.patterns import (
    Char,
    Group,
    Lookahead,
    Match,
    Pattern,
    Repeat,
    plain_char,
)
from vlm_worker.gateway.responding.patterns import Node as PatternNode
from vlm_worker.gateway.responding.template import TagCalls

TEXT = "TAGTEXT"
"""The terminal of a text without the anchors that would end it."""


class TagRules:
    """Rules of values within tags. `end` is the anchor of the whole call."""

    def __init__(self, form: TagCalls, end: Pattern | None, space: str, rules: list[str]) -> None:
        self._form = form
        self._ends = [form.end, *([] if end is None else [end])]
        self._rules = rules
        self._has_text = False
        barred = "|".join(regular(one.nodes) for one in self._ends)
        self._barred = barred
        self._json = StandardRules(barred, space, rules)

    def check_key(self, key: str) -> None:
        """Raise GrammarError if the reader would not read this key of a tag."""
        anchor = spelled(self._form.begin.nodes, key)
        found = None if anchor is None else self._form.begin.search(anchor + "x", 0, final=True)
        if not isinstance(found, Match) or found.groups.get("key") != key:
            raise GrammarError(
                f"the property {key[:64]!r} is not built for this model's calls: rename it"
            )

    def text(self) -> str:
        """The terminal of a text that no anchor ends."""
        if not self._has_text:
            rule = f"{TEXT}: {without(self._barred)}"
            self._rules += [] if rule in self._rules else [rule]  # of another tool
            self._has_text = True
        return TEXT

    def value(self, member: Member, types: Sequence[str], rule: str) -> str | None:
        """Write a value; return what stands for it, or None for any text.

        Raises:
            GrammarError: the reader would take some text for another value.
        """
        listed = list(choices(member.value))
        if any(isinstance(one, AnyText) for one in listed) or self._is_text(types):
            if all(self._is_free(one, types) for one in listed) and self._covered(listed, types):
                return None
            if not all(isinstance(one, Literals) for one in listed):
                raise GrammarError(
                    "mixes any string with values that have bounds, items, properties or an enum, "
                    "which is not enforced in this model's calls: leave one of them out"
                )
        parts = []
        for index, one in enumerate(listed):
            if isinstance(one, Literals):
                parts += [quoted(self._literal(value, types)) for value in one.values]
            else:
                self._check_json(one, types)
                parts.append(self._json.value(one, f"{rule}-{index}"))
        return f"({' | '.join(parts)})"

    def _is_text(self, types: Sequence[str]) -> bool:
        """Whether the reader takes every text as a string."""
        return tuple(types) == ("string",) or (not types and not self._form.is_json)

    def _is_free(self, node: Node, types: Sequence[str]) -> bool:
        """Whether a value may be any of its type."""
        if isinstance(node, AnyValue):
            return self._is_text(types)
        if isinstance(node, Scalar):
            return not node.is_bounded and not self._is_text(types)
        if isinstance(node, Array):
            free = isinstance(node.item, AnyValue) and not node.least and node.most is None
            return free and not self._is_text(types)
        if isinstance(node, Object):
            free = isinstance(node.others, AnyValue) and not node.members
            return free and not self._is_text(types)
        return isinstance(node, AnyText)

    def _covered(self, listed: Sequence[Node], types: Sequence[str]) -> bool:
        """Whether each type that the reader may take a text for is among the alternatives."""
        kinds = {_kind(node) for node in listed}
        if "number" in kinds:
            kinds.add("integer")
        return self._is_text(types) or (bool(types) and set(types) <= kinds)

    def _check_json(self, node: Node, types: Sequence[str]) -> None:
        """Raise GrammarError if the reader would not take the JSON of a value as the value."""
        kind = _kind(node)
        taken = kind in types or (kind == "integer" and "number" in types)
        if not (taken or (not types and self._form.is_json)):
            raise GrammarError(
                "has no 'type' that this model's calls need: name it beside each alternative"
            )
        self._check_literals(node)

    def _check_literals(self, node: Node) -> None:
        """Raise GrammarError if a text within JSON would end the tag."""
        texts: list[Any] = []
        inner: list[Node] = []
        for one in choices(node):
            if isinstance(one, Literals):
                texts += one.values
            elif isinstance(one, Array):
                inner.append(one.item)
            elif isinstance(one, Object):
                texts += [member.key for member in one.members]
                inner += [member.value for member in one.members]
                inner += [] if one.others is None else [one.others]
        for text in texts:
            self._check_text(json.dumps(text, ensure_ascii=False))
        for one in inner:
            self._check_literals(one)

    def _check_text(self, text: str) -> None:
        if any(isinstance(end.search(text, 0, final=True), Match) for end in self._ends):
            raise GrammarError("has a value with the text that ends an argument: leave it out")

    def _literal(self, value: Any, types: Sequence[str]) -> str:
        """Return the text that the reader takes for a value."""
        text = value if isinstance(value, str) and (types or not self._form.is_json) else None
        text = json.dumps(value, ensure_ascii=False) if text is None else text
        self._check_text(text)
        if self._is_text(types):
            read = escaped_value(text)
        else:
            read = written_value(text, types, is_json=self._form.is_json)
        if text != text.strip("\n") or not _same(json.loads(read), value):
            raise GrammarError(
                f"has the value {quoted(str(value)[:64])}, whose text this model's calls read as "
                "another one: name the type of the value, or leave it out"
            )
        return text


def _kind(node: Node) -> str:
    """The type of a node that is no union."""
    if isinstance(node, Scalar):
        return node.kind
    names = {AnyText: "string", Array: "array", Object: "object"}
    return names.get(type(node), "any")


def _same(one: Any, other: Any) -> bool:
    """Whether two JSON values are equal; true is not 1."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True) or (
        is_of(one, "number") and is_of(other, "number") and one == other
    )


def regular(nodes: Sequence[PatternNode]) -> str:
    """Return a pattern as a regular expression of grammars."""
    return "".join(map(_regular, nodes))


def _regular(node: PatternNode) -> str:
    if isinstance(node, Char):
        plain = plain_char(node.text)
        return f"(?s:{node.text})".replace("/", "\\/") if plain is None else hexed(plain)
    if isinstance(node, Repeat):
        most = "" if node.most is None else node.most
        return f"({_regular(node.node)}){{{node.least},{most}}}"
    group = node.group if isinstance(node, Lookahead) else node
    return f"({'|'.join(regular(branch) for branch in group.branches)})"


def spelled(nodes: Sequence[PatternNode], key: str) -> str | None:
    """Return the shortest text of an anchor with a key; None if it is not that plain."""
    text = ""
    for node in nodes:
        if isinstance(node, Group) and node.name == "key":
            text += key
        elif isinstance(node, Char) and plain_char(node.text) is not None:
            text += plain_char(node.text) or ""
        elif not (isinstance(node, Repeat) and node.least == 0):
            return None
    return text
