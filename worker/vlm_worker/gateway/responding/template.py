r"""The format `response_template` of transformers: the regions of an answer, from a dict. Pure.

    {"start_anchor": "<|im_start|>assistant\n",
     "fields": {"reasoning_content": {"open": "<think>", "close": "</think>"},
                "tool_calls": {"open": "<tool_call>", "close": "</tool_call>", "repeats": true,
                               "content": "json",
                               "transform": {"type": "function", "function": "{content}"}},
                "content": {}}}

Taken: the fields content, reasoning_content (also reasoning, thinking) and tool_calls; `text` in
the first two; `json` and `xml-inline` in calls. What would change an answer and is not built is
refused.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Any, Final

from vlm_worker.gateway.responding.patterns import (
    Group,
    Match,
    Node,
    Pattern,
    PatternError,
    Repeat,
    literal,
    literal_runs,
    parse,
)

_REASONING: Final = ("reasoning_content", "reasoning", "thinking")
_TOP: Final = frozenset({"version", "defaults", "fields", "start_anchor", "start_anchor_pattern"})
_FIELD: Final = frozenset(
    {"open", "open_pattern", "close", "close_pattern", "content", "content_args", "repeats", "join",
     "optional", "transform", "transform_each"}
)  # fmt: skip
_ARGS: Final = {
    "text": {"strip"},
    "json": {"unquoted_keys", "string_delims", "allow_non_json"},
    "xml-inline": {"tag_pattern", "value_parser"},
}


class TemplateError(ValueError):
    """The template cannot be used; the message names the field and says why."""


class Kind(enum.Enum):
    """What the text of a region becomes."""

    CONTENT = "content"
    REASONING = "reasoning_content"
    CALLS = "tool_calls"


@dataclasses.dataclass(frozen=True, slots=True)
class JsonCalls:
    """A call in JSON. `name` and `arguments` are keys; None: the region's name, the whole value."""

    name: str | None
    arguments: str | None
    is_list: bool
    delimiters: tuple[tuple[str, str], ...]
    bare_keys: bool


@dataclasses.dataclass(frozen=True, slots=True)
class TagCalls:
    """A call of tags, one per argument: `begin` has the group `key`, then the value, then `end`.

    If `is_json`, a value that is JSON stands for itself.
    """

    begin: Pattern
    end: Pattern
    is_json: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Region:
    """A region between two anchors. `begin` is None for what is outside of all others."""

    kind: Kind
    begin: Pattern | None
    end: Pattern | None
    strip: bool = True
    join: str = ""
    calls: JsonCalls | TagCalls | None = None
    texts: tuple[str, ...] = ()
    """Texts that its anchors and delimiters spell out."""


@dataclasses.dataclass(frozen=True, slots=True)
class ResponseTemplate:
    """The regions of an answer; `anchor` is before the answer in a prompt."""

    regions: tuple[Region, ...]
    anchor: Pattern

    def region(self, kind: Kind) -> Region | None:
        return next((region for region in self.regions if region.kind is kind), None)

    @property
    def has_calls(self) -> bool:
        return self.region(Kind.CALLS) is not None

    @property
    def has_reasoning(self) -> bool:
        return self.region(Kind.REASONING) is not None

    def without_calls(self) -> ResponseTemplate:
        """Return the same for a request without tools: its calls are content."""
        regions = tuple(region for region in self.regions if region.kind is not Kind.CALLS)
        return dataclasses.replace(self, regions=regions)

    def anchors_in(self, control_tokens: Sequence[str]) -> frozenset[str]:
        """Return the control tokens that are a part of an anchor: a parser must see them."""
        return frozenset(
            token
            for token in control_tokens
            if any(token in text for region in self.regions for text in region.texts)
        )

    def opening(self, prompt: str) -> str:
        """Return what the prompt says of the answer: its text after the last anchor."""
        end, at = None, 0
        while at <= len(prompt):
            found = self.anchor.search(prompt, at, final=True)
            if found is None:
                break
            assert isinstance(found, Match)
            end = at = max(found.end, at + 1)
        return "" if end is None else prompt[end:]


def load_template(value: Any) -> ResponseTemplate:
    """Read a template.

    Raises:
        TemplateError: it is malformed, or has what is not built.
    """
    top = _object("response_template", value)
    _only("response_template", top, _TOP)
    if top.get("version", 1) != 1:
        raise TemplateError(f"version {top['version']!r} is not built; 1 is")
    fields = _object("fields", top.get("fields"))
    regions = tuple(_region(name, _object(name, field)) for name, field in fields.items())
    if len({region.kind for region in regions}) < len(regions):
        raise TemplateError("has two fields of one meaning")
    if [region.kind for region in regions if region.begin is None] not in ([], [Kind.CONTENT]):
        raise TemplateError("only 'content' may have no 'open'")
    if all(region.kind is not Kind.CONTENT for region in regions):
        raise TemplateError("has no field 'content'")
    anchor = _anchor("response_template", top, "start_anchor", [])
    if anchor is None:
        raise TemplateError("has no 'start_anchor' and no 'start_anchor_pattern'")
    return ResponseTemplate(regions, anchor)


def _region(name: str, field: Mapping[str, Any]) -> Region:
    _only(name, field, _FIELD)
    texts: list[str] = []
    kinds = {"content": Kind.CONTENT, "tool_calls": Kind.CALLS}
    kind = Kind.REASONING if name in _REASONING else kinds.get(name)
    if kind is None:
        raise TemplateError(f"the field {name!r} is not built")
    content = field.get("content", "text")
    args = _object(f"{name}.content_args", field.get("content_args", {}))
    begin = _anchor(name, field, "open", texts)
    end = _anchor(name, field, "close", texts)
    if content not in (("json", "xml-inline") if kind is Kind.CALLS else ("text",)):
        raise TemplateError(f"{name}: the content parser {content!r} is not built for this field")
    _only(f"{name}.content_args", args, _ARGS[content])
    join = field.get("join") or ""
    if not isinstance(join, str):
        raise TemplateError(f"{name}.join must be a string")
    if kind is not Kind.CALLS:
        if field.get("transform") is not None:
            raise TemplateError(f"{name}.transform is not built for this field")
        strip = args.get("strip", True) is True
        return Region(kind, begin, end, strip=strip, join=join, texts=tuple(texts))
    if begin is None:
        raise TemplateError("tool_calls has no 'open' and no 'open_pattern'")
    calls = _calls(field, begin, content, args, texts)
    return Region(kind, begin, end, calls=calls, texts=tuple(texts))


def _calls(
    field: Mapping[str, Any],
    begin: Pattern,
    content: str,
    args: Mapping[str, Any],
    texts: list[str],
) -> JsonCalls | TagCalls:
    is_list = field.get("transform_each", False) is True
    captured = begin.group_names
    name, arguments = _places(field.get("transform"), captured, is_list=is_list)
    if content == "xml-inline":
        if name is not None or arguments is not None or is_list:
            raise TemplateError("tool_calls.transform: takes 'xml-inline' as the arguments only")
        if "name" not in captured or not {"close", "close_pattern"} & set(field):
            raise TemplateError(
                "tool_calls needs 'close' and an 'open_pattern' with a group 'name'"
            )
        return _tags(args, texts)
    pairs = args.get("string_delims", [])
    if not all(_is_pair(pair) for pair in pairs):
        raise TemplateError("tool_calls.content_args.string_delims must be pairs of strings")
    texts += [text for pair in pairs for text in pair]
    if name is None and "name" not in captured:
        raise TemplateError("tool_calls.open_pattern has no group 'name'")
    return JsonCalls(
        name=name,
        arguments=arguments,
        is_list=is_list,
        delimiters=tuple((pair[0], pair[1]) for pair in pairs),
        bare_keys=args.get("unquoted_keys", False) is True,
    )


def _places(
    transform: Any, captured: frozenset[str], *, is_list: bool
) -> tuple[str | None, str | None]:
    """Return the keys of name and arguments; None for the captured name, and for the whole."""
    wrong = TemplateError(
        "tool_calls.transform must be {'type': 'function', 'function': ...} with the content, or "
        "with 'name' and 'arguments' of it or of a group 'name'"
    )
    if not isinstance(transform, Mapping) or set(transform) - {"type", "function"}:
        raise wrong
    function = transform.get("function")
    if function == "{content}" and not is_list:
        return "name", "arguments"
    if not isinstance(function, Mapping) or set(function) != {"name", "arguments"}:
        raise wrong
    places: list[str | None] = []
    for place in (function["name"], function["arguments"]):
        if not (isinstance(place, str) and place.startswith("{") and place.endswith("}")):
            raise wrong
        inner = place[1:-1]
        if inner in ("content", "name") and (inner == "content" or "name" in captured):
            places.append(None)
        elif is_list and inner.isidentifier():
            places.append(inner)
        elif inner.startswith("content.") and inner[8:].isidentifier():
            places.append(inner[8:])
        else:
            raise wrong
    if (places[0] is None) != (places[1] is None):
        raise wrong
    return places[0], places[1]


def _tags(args: Mapping[str, Any], texts: list[str]) -> TagCalls:
    where = "tool_calls.content_args.tag_pattern"
    source = args.get("tag_pattern")
    if not isinstance(source, str):
        raise TemplateError(f"{where} must be a pattern")
    nodes = _parsed(where, source)
    at = next((i for i, n in enumerate(nodes) if isinstance(n, Group) and n.name == "value"), None)
    if at is None or not _is_lazy_all(nodes[at]):
        raise TemplateError(f"{where} must have the group (?P<value>.*?) at its top level")
    begin = _pattern(where, nodes[:at])
    if begin.group_names != {"key"}:
        raise TemplateError(f"{where} must have the group 'key' before 'value', and no other")
    texts += literal_runs(nodes)
    parser = args.get("value_parser")
    name = "text" if parser is None else _object(where, parser).get("name")
    if name not in ("json", "text"):
        raise TemplateError("tool_calls.content_args.value_parser must be 'json' or 'text'")
    return TagCalls(begin, _pattern(where, nodes[at + 1 :]), is_json=name == "json")


def _is_lazy_all(node: Node) -> bool:
    assert isinstance(node, Group)
    inner = node.branches[0][0] if len(node.branches) == 1 and len(node.branches[0]) == 1 else None
    return (
        isinstance(inner, Repeat)
        and inner.lazy
        and (inner.least, inner.most) == (0, None)
        and getattr(inner.node, "text", "") == "."
    )


def _anchor(name: str, field: Mapping[str, Any], key: str, texts: list[str]) -> Pattern | None:
    """Read the literal, the literals or the pattern of an anchor; None without one."""
    value, source = field.get(key), field.get(f"{key}_pattern")
    if value is not None and source is not None:
        raise TemplateError(f"{name} has both '{key}' and '{key}_pattern'")
    if value is not None:
        literals = [value] if isinstance(value, str) else value
        if not (isinstance(literals, list) and literals and all(map(_is_text, literals))):
            raise TemplateError(f"{name}.{key} must be a string, or some, that are not empty")
        nodes = literal(literals)
    elif source is not None:
        if not isinstance(source, str):
            raise TemplateError(f"{name}.{key}_pattern must be a pattern")
        nodes = _parsed(f"{name}.{key}_pattern", source)
    else:
        return None
    texts += literal_runs(nodes)
    return _pattern(f"{name}.{key}", nodes)


def _parsed(where: str, source: str) -> tuple[Node, ...]:
    try:
        return parse(source)
    except PatternError as error:
        raise TemplateError(f"{where} {error}") from error


def _pattern(where: str, nodes: Sequence[Node]) -> Pattern:
    try:
        return Pattern(nodes)
    except PatternError as error:
        raise TemplateError(f"{where} {error}") from error


def _object(where: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TemplateError(f"{where} must be an object")
    return value


def _only(where: str, value: Mapping[str, Any], known: frozenset[str] | set[str]) -> None:
    if unknown := sorted(set(value) - known):
        raise TemplateError(f"{where}: {unknown[0]!r} is not built")


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_pair(value: Any) -> bool:
    return isinstance(value, Sequence) and len(value) == 2 and all(map(_is_text, value))
