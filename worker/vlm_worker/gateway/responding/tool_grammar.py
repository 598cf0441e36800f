r"""Writes the grammar of the calls that a template and tools allow, as Lark for llguidance. Pure.

    start: call call*
    call: c0 | c1
    c0: "<tool_call>" S "{\"name\": \"f\", \"arguments\": " %json {schema of f} "}" S "</tool_call>"

Anchors become what their patterns spell out; white space in them is bounded, so that a model cannot
fill its answer with it. A control token is written by its id, because it has no bytes.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence, Set
from typing import Any, Final, Literal

from vlm_worker.annotations import MAX_GRAMMAR_BYTES
from vlm_worker.gateway.api.tools import ToolUse
from vlm_worker.gateway.closed_schema import closed
from vlm_worker.gateway.responding.calls import properties_of
from vlm_worker.gateway.responding.dialect_grammar import DialectRules
from vlm_worker.gateway.responding.enforceable import GrammarError, located, read
from vlm_worker.gateway.responding.patterns import (
    Char,
    Lookahead,
    Node,
    Repeat,
    literal_runs,
    plain_char,
)
from vlm_worker.gateway.responding.tag_grammar import TagRules
from vlm_worker.gateway.responding.template import (
    JsonCalls,
    Kind,
    Region,
    ResponseTemplate,
    TagCalls,
)

SPACE: Final = "S"
_SPACE_RULE: Final = r"S: /[ \t\r\n]{0,4}/"
_ANY: Final = "/(?s:.*)/"

Mode = Literal["auto", "required"]


@dataclasses.dataclass(frozen=True, slots=True)
class CallTool:
    """A tool by its name and the JSON schema of its arguments; None: any object.

    `path` is the schema's in the request, for errors.
    """

    name: str
    schema: Mapping[str, Any] | None
    path: str = "parameters"


def tool_grammar(
    template: ResponseTemplate,
    tools: Sequence[CallTool],
    *,
    mode: Mode,
    parallel: bool,
    control_ids: Mapping[str, int],
    in_reasoning: bool = False,
    content: Mapping[str, Any] | None = None,
) -> str:
    """Return the grammar of an answer.

    Args:
        template: it has calls.
        tools: those that may be called; a named choice has one.
        mode: `required`: the answer is calls; `auto`: text, with calls in it.
        parallel: whether there may be several calls.
        control_ids: ids of control tokens, which have no text.
        in_reasoning: the prompt has begun the reasoning.
        content: JSON schema of an answer without calls; only with `required`.

    Raises:
        GrammarError: the format cannot enforce a schema, or cannot tell a call from text.
    """
    assert content is None or mode == "required"
    return _Writer(template.region(Kind.CALLS), control_ids).grammar(
        template, tools, mode=mode, parallel=parallel, in_reasoning=in_reasoning, content=content
    )


def call_grammar(
    template: ResponseTemplate, tool: CallTool, *, control_ids: Mapping[str, int]
) -> str:
    """Return the grammar of one call of a tool that may also take any arguments.

    Raises:
        GrammarError: the format cannot enforce the schema, or would leave all arguments out.
    """
    region = template.region(Kind.CALLS)
    if region is not None and isinstance(region.calls, TagCalls) and tool.schema is not None:
        root = read(tool.schema)
        if not root.members and root.others is not None:
            raise GrammarError("names no properties")
    return tool_grammar(template, [tool], mode="required", parallel=False, control_ids=control_ids)


def content_grammar(
    template: ResponseTemplate,
    content: Mapping[str, Any],
    *,
    control_ids: Mapping[str, int],
    in_reasoning: bool,
) -> str:
    """Return the grammar of a JSON text behind the reasoning that a model may write before it."""
    return _Writer(None, control_ids).only(template, content, in_reasoning=in_reasoning)


def grammar_of(
    use: ToolUse,
    template: ResponseTemplate,
    *,
    control_ids: Mapping[str, int],
    in_reasoning: bool,
    kept: Set[str] = frozenset(),
    content: Mapping[str, Any] | None = None,
) -> str | None:
    """Return the grammar that a request's tools ask for; None if nothing is enforced.

    It is with `required`, a named function, a strict tool, or `content`, the JSON schema of an
    answer without calls. `kept` names the tools that are not strict whose schemas are enforced;
    those of others are hints for the model.

    Raises:
        GrammarError: as `tool_grammar`.
    """
    must = use.choice == "required"
    if not must and content is None and not any(tool.strict for tool in use.offered):
        return None
    tools = [call_tool(use, index, kept) for index in callable_tools(use)]
    return tool_grammar(
        template,
        tools,
        mode="required" if must or content is not None else "auto",
        parallel=use.parallel and use.named is None,
        control_ids=control_ids,
        in_reasoning=in_reasoning,
        content=None if must else content,
    )


def callable_tools(use: ToolUse) -> list[int]:
    """Return the places in `tools` of those that an answer may call."""
    return [i for i, tool in enumerate(use.offered) if use.named in (None, tool.name)]


def call_tool(use: ToolUse, index: int, kept: Set[str]) -> CallTool:
    """Return what a call of a tool must be."""
    tool = use.tools[index]
    schema = tool.parameters if tool.name in kept else None
    if tool.strict:
        schema = tool.parameters or _EMPTY
    return CallTool(tool.name, schema, parameters_path(index))


def parameters_path(index: int) -> str:
    """Return the path of a tool's schema in the request."""
    return f"tools[{index}].function.parameters"


_EMPTY: Final = {"type": "object", "properties": {}, "additionalProperties": False}
"""The schema of a strict tool without parameters."""


class _Writer:
    """Writes the rules of one grammar."""

    def __init__(self, region: Region | None, control_ids: Mapping[str, int]) -> None:
        begin, end = (None, None) if region is None else (region.begin, region.end)
        self._begin = begin.nodes if begin is not None else ()
        self._end = end.nodes if end is not None else ()
        self._form = None if region is None else region.calls
        self._control_ids = control_ids
        self._control = re.compile("|".join(map(re.escape, control_ids)) or r"(?!)")
        self._rules: list[str] = []
        self._num_counted = self._num_bytes = 0  # rules, and their bytes
        self._dialect: DialectRules | None = None
        if isinstance(self._form, JsonCalls) and self._form.delimiters:
            self._dialect = DialectRules(self._form, self._text, self._rules)
        self._tag_rules: TagRules | None = None
        if isinstance(self._form, TagCalls):
            whole = None if region is None else region.end
            self._tag_rules = TagRules(self._form, whole, SPACE, self._rules)

    def grammar(
        self,
        template: ResponseTemplate,
        tools: Sequence[CallTool],
        *,
        mode: Mode,
        parallel: bool,
        in_reasoning: bool,
        content: Mapping[str, Any] | None,
    ) -> str:
        lead = self._reasoning(template, in_reasoning=in_reasoning)
        trigger = self._trigger() if mode == "auto" else None
        if isinstance(self._form, JsonCalls) and self._form.is_list:
            calls = self._list(tools, parallel=parallel, trigger=trigger)
        else:
            for index, tool in enumerate(tools):
                with located(tool.path):
                    self._rules.append(f"c{index}: {self._call(tool, f'c{index}', trigger)}")
                    self._check_size()
            self._rules.append("call: " + " | ".join(f"c{index}" for index in range(len(tools))))
            calls = "call call*" if parallel else "call"
            if trigger is not None:
                calls = "(head call)*" if parallel else "(head call)?"
        if trigger is not None:
            self._rules.append(f"rest: {_ANY}")
            calls = f"{calls} rest"
        if content is not None:
            self._first_text()
            self._rules.append(f"json: {_json_rule(content)}")
            calls = f"({calls} | json)"
        return "\n".join([f"start: {lead}{calls}", *self._rules, _SPACE_RULE])

    def only(
        self, template: ResponseTemplate, content: Mapping[str, Any], *, in_reasoning: bool
    ) -> str:
        lead = self._reasoning(template, in_reasoning=in_reasoning)
        self._rules.append(f"json: {_json_rule(content)}")
        return "\n".join([f"start: {lead}json", *self._rules, _SPACE_RULE])

    def _reasoning(self, template: ResponseTemplate, *, in_reasoning: bool) -> str:
        region = template.region(Kind.REASONING)
        if region is None or region.begin is None or region.end is None:
            return ""
        begin, end = _spelled(region.begin.nodes), _spelled(region.end.nodes)
        if begin is None or end is None:
            return ""
        self._rules.append(self._until("thought", end))
        if in_reasoning:
            return "thought S "
        self._rules.append(f"thinking: {self._text(begin)} thought S")
        return "thinking? "

    def _until(self, rule: str, end: str, text: str = _ANY) -> str:
        """A rule of `text` up to `end`."""
        if end in self._control_ids:
            return f"{rule}: {text} {self._text(end)}"
        return f"{rule}[suffix={_quoted(end)}]: {text}"

    def _trigger(self) -> str:
        """Write the rule `head`: text up to the first anchor of a call; return the anchor."""
        first = self._first_text()
        anchor = next((token for token in self._control_ids if first.startswith(token)), first)
        self._rules.append(self._until("head", anchor))
        return anchor

    def _first_text(self) -> str:
        """The text with which a call begins, and no other answer."""
        runs = literal_runs(self._begin)
        first = next((node for node in self._begin if not _is_space(node)), None)
        if not runs or not isinstance(first, Char) or plain_char(first.text) is None:
            raise GrammarError("this model's calls begin as text does; send 'required'")
        return runs[0]

    def _call(self, tool: CallTool, rule: str, trigger: str | None) -> str:
        parts = [*self._anchor(self._begin, tool, trigger)]
        form = self._form
        if isinstance(form, TagCalls):
            parts += self._tags(form, tool, rule)
        else:
            assert isinstance(form, JsonCalls)
            if not self._begin or not isinstance(self._begin[-1], Lookahead):
                parts.append(SPACE)
            parts.append(self._json(form, tool, rule))
        if self._end and not isinstance(form, TagCalls):
            parts.append(SPACE)
        return " ".join([*parts, *self._anchor(self._end, tool, None)])

    def _list(self, tools: Sequence[CallTool], *, parallel: bool, trigger: str | None) -> str:
        form = self._form
        assert isinstance(form, JsonCalls)
        for index, tool in enumerate(tools):
            with located(tool.path):
                self._rules.append(f"c{index}: {self._json(form, tool, f'c{index}')}")
                self._check_size()
        self._rules.append("item: " + " | ".join(f"c{index}" for index in range(len(tools))))
        more = ' ("," S item)*' if parallel else ""
        begin = " ".join(self._anchor(self._begin, None, trigger))
        end = " ".join(["", *self._anchor(self._end, None, None)])
        self._rules.append(f'calls: {begin} "[" item{more} "]"{end}')
        return "calls" if trigger is None else "(head calls)?"

    def _json(self, form: JsonCalls, tool: CallTool, rule: str) -> str:
        if form.name is None:
            return self._arguments(tool, rule)
        assert form.arguments is not None
        lead = f'{{"{form.name}": "{tool.name}", "{form.arguments}": '
        return f'{_quoted(lead)} {self._arguments(tool, rule)} "}}"'

    def _arguments(self, tool: CallTool, rule: str) -> str:
        if self._dialect is not None:
            return self._dialect.value(read(tool.schema or {}), f"{rule}-d")
        return _json_rule({"type": "object", **(tool.schema or {})})

    def _tags(self, form: TagCalls, tool: CallTool, rule: str) -> list[str]:
        """One tag per property, in the order of the schema; those not required may be absent.

        A tool without a schema takes any tags.
        """
        rules, schema = self._tag_rules, tool.schema
        assert rules is not None
        last = literal_runs(form.end.nodes)[-1]
        if schema is None:
            begin = " ".join(self._anchor(form.begin.nodes, None, None))
            self._rules.append(self._until(f"{rule}-v", last, rules.text()))
            self._rules.append(f"{rule}-t: S {begin} {rule}-v")
            return [f"{rule}-t*"]
        parts = []
        read_as = properties_of(schema)
        for index, member in enumerate(read(schema).members):
            name = f"{rule}-{index}"
            with located("properties", member.key):
                rules.check_key(member.key)
                value = rules.value(member, read_as[member.key][1], name)
            begin = " ".join(self._anchor(form.begin.nodes, None, None, key=member.key))
            if value is None:
                self._rules.append(self._until(f"{name}-v", last, rules.text()))
                self._rules.append(f"{name}: S {begin} {name}-v")
            else:
                end = " ".join(self._anchor(form.end.nodes, None, None))
                self._rules.append(f"{name}: S {begin} {value} {end}")
            parts.append(name if member.is_required else f"{name}?")
            self._check_size()
        return parts

    def _check_size(self) -> None:
        """Raise GrammarError if the rules are too large already, before more are written."""
        self._num_bytes += sum(len(rule.encode()) for rule in self._rules[self._num_counted :])
        self._num_counted = len(self._rules)
        if self._num_bytes > MAX_GRAMMAR_BYTES:
            raise GrammarError(f"its rules have more than {MAX_GRAMMAR_BYTES} bytes")

    def _anchor(
        self, nodes: Sequence[Node], tool: CallTool | None, skip: str | None, *, key: str = ""
    ) -> list[str]:
        """Write what a pattern matches. `skip` is its first text, which is written already."""
        parts: list[str] = []
        run = ""
        nodes = _after_space(nodes) if skip is not None else nodes
        for node in nodes:
            plain = plain_char(node.text) if isinstance(node, Char) else None
            if plain is not None:
                run += plain
                continue
            parts += self._run(run, skip)
            skip, run = (None if run else skip), ""
            parts += self._node(node, tool, key)
        return [part for part in [*parts, *self._run(run, skip)] if part]

    def _run(self, run: str, skip: str | None) -> list[str]:
        run = run.removeprefix(skip) if skip is not None else run
        return [self._text(run)] if run else []

    def _node(self, node: Node, tool: CallTool | None, key: str) -> list[str]:
        if isinstance(node, Lookahead):
            return []
        if _is_any_space(node):
            return [SPACE]
        if isinstance(node, Char):
            return [f"/{node.text}/"]
        if isinstance(node, Repeat):
            most = "" if node.most is None else node.most
            if isinstance(node.node, Char):
                return [f"/(?s:{node.node.text}){{{node.least},{most}}}/"]
            inner = " ".join(self._anchor((node.node,), tool, None, key=key))
            return [f"({inner}){{{node.least},{most}}}"]
        if node.name == "name":
            assert tool is not None
            return [_quoted(tool.name)]
        if node.name == "key" and key:
            return [_quoted(key)]
        branches = [" ".join(self._anchor(one, tool, None, key=key)) for one in node.branches]
        return [f"({' | '.join(branches)})"]

    def _text(self, text: str) -> str:
        """Write a text, with the ids of the control tokens in it."""
        if text and self._control.search(text) is None:
            return _quoted(text)
        for token, token_id in self._control_ids.items():
            before, found, after = text.partition(token)
            if found:
                parts = [self._text(before), f"<[{token_id}]>", self._text(after)]
                return " ".join(part for part in parts if part)
        return _quoted(text) if text else ""


def _spelled(nodes: Sequence[Node]) -> str | None:
    """Return the text of an anchor that is one literal."""
    chars = [plain_char(node.text) if isinstance(node, Char) else None for node in nodes]
    return None if None in chars else "".join(char for char in chars if char)


def _is_space(node: Node) -> bool:
    inner = node.node if isinstance(node, Repeat) else node
    return isinstance(inner, Char) and inner.text in (r"\s", r"\n", r"\\" + "\n", "\\\n")


def _is_any_space(node: Node) -> bool:
    """Whether the node takes all of `SPACE`; a value may follow or precede what takes less."""
    return (
        isinstance(node, Repeat)
        and (node.least, node.most) == (0, None)
        and isinstance(node.node, Char)
        and node.node.text == r"\s"
    )


def _after_space(nodes: Sequence[Node]) -> Sequence[Node]:
    at = next((i for i, node in enumerate(nodes) if not _is_space(node)), len(nodes))
    return nodes[at:]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json_rule(schema: Mapping[str, Any]) -> str:
    whitespace = {"whitespace_pattern": r"[ \t\n\r]{1,4}"}
    return "%json " + json.dumps({**closed(schema), "x-guidance": whitespace}, ensure_ascii=False)
