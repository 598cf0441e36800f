"""Tools of a request, and the calls of earlier answers: checks and values. Pure."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Final, Literal

from vlm_worker.gateway.api.errors import ApiError, invalid, unsupported
from vlm_worker.gateway.api.schema import Fields
from vlm_worker.gateway.body import MAX_VALUES, read_json
from vlm_worker.gateway.turns import Steps

MAX_TOOLS: Final = 128
MAX_CALLS: Final = 128
MAX_NAME: Final = 64
MAX_DESCRIPTION: Final = 64 * 1024
MAX_ARGUMENTS: Final = 2**20
MAX_ID: Final = 256
_NAME: Final = re.compile(r"[a-zA-Z0-9_-]+")
_NAME_RULE: Final = "has letters, digits, '_' and '-' only"
# Keywords of JSON Schema whose values are schemas, by how they are put.
_OF_SCHEMAS: Final = ("properties", "$defs", "definitions", "patternProperties")
_LISTS: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
_ONE: Final = ("items", "additionalProperties", "not")

Choice = Literal["none", "auto", "required"]


@dataclasses.dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. `parameters` is the JSON schema of its arguments."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    strict: bool = False

    @property
    def body(self) -> dict[str, Any]:
        """The tool as chat templates know it."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        if self.parameters is not None:
            function["parameters"] = self.parameters
        return {"type": "function", "function": function}


@dataclasses.dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request, and how the model may use them; `named` is the one that it must."""

    tools: tuple[Tool, ...] = ()
    choice: Choice = "auto"
    named: str | None = None
    parallel: bool = True

    @property
    def offered(self) -> tuple[Tool, ...]:
        """The tools that the model sees."""
        return () if self.choice == "none" else self.tools


@dataclasses.dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of an earlier answer; `arguments` is the JSON text of `values`."""

    id: str
    name: str
    arguments: str
    values: Mapping[str, Any]


def parse_tools(fields: Fields) -> Steps[ToolUse]:
    """Take `tools`, `tool_choice` and `parallel_tool_calls`.

    Raises:
        ApiError: 400; it names the invalid part.
    """
    values = fields.array("tools", min_length=1, max_length=MAX_TOOLS)
    tools: list[Tool] = []
    names: set[str] = set()
    for index, value in enumerate(values or ()):
        tool = yield from _tool(f"tools[{index}]", value)
        tools.append(tool)
        if tool.name in names:
            where = f"tools[{index}].function.name"
            raise invalid(f"'{where}' is '{tool.name}', as that of a tool before it.", param=where)
        names.add(tool.name)
    choice, named = _choice(fields, names)
    parallel = fields.boolean("parallel_tool_calls")
    for name, value in (("tool_choice", named or choice), ("parallel_tool_calls", parallel)):
        if not tools and value not in (None, "none"):
            raise invalid(f"'{name}' needs 'tools'.", param=name)
    return ToolUse(tuple(tools), choice or "auto", named, parallel is not False)


def _tool(path: str, value: Any) -> Steps[Tool]:
    fields = Fields(path, value)
    kind = fields.required_text("type", max_length=64)
    if kind != "function":
        raise unsupported(
            f"{path}.type", f"'{path}.type' must be 'function'; others are not built."
        )
    function = fields.child("function")
    if function is None:
        raise fields.missing("function")
    fields.done()
    name = _function_name(function)
    description = function.text("description", max_length=MAX_DESCRIPTION)
    parameters = function.take("parameters")
    strict = function.boolean("strict") or False
    function.done()
    if parameters is not None:
        where = function.at("parameters")
        if not isinstance(parameters, dict):
            raise _not(where, "an object, a JSON schema")
        if parameters.get("type", "object") != "object":
            raise invalid(
                f"'{where}.type' must be 'object': arguments have names.", param=f"{where}.type"
            )
        yield from _check_schema(where, parameters)
    return Tool(name, description, parameters, strict)


def _check_schema(path: str, schema: Any) -> Steps[None]:
    """Raise ApiError if a template or a parser could not read the schema's structure."""
    yield
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise _not(path, "a JSON schema: an object or a boolean")
    kind = schema.get("type")
    kinds = kind if isinstance(kind, list) else [kind]
    if "type" in schema and not all(isinstance(one, str) for one in kinds):
        raise _not(f"{path}.type", "a string or an array of strings")
    required = schema.get("required")
    if required is not None and not (
        isinstance(required, list) and all(isinstance(name, str) for name in required)
    ):
        raise _not(f"{path}.required", "an array of strings")
    if schema.get("description") is not None and not isinstance(schema["description"], str):
        raise _not(f"{path}.description", "a string")
    if "enum" in schema and not isinstance(schema["enum"], list):
        raise _not(f"{path}.enum", "an array")
    for keyword in _OF_SCHEMAS:
        if keyword in schema:
            if not isinstance(schema[keyword], dict):
                raise _not(f"{path}.{keyword}", "an object of JSON schemas")
            for name, inner in schema[keyword].items():
                yield from _check_schema(f"{path}.{keyword}.{_shown(name)}", inner)
    for keyword in _LISTS:
        if keyword in schema:
            if not isinstance(schema[keyword], list):
                raise _not(f"{path}.{keyword}", "an array of JSON schemas")
            for index, inner in enumerate(schema[keyword]):
                yield from _check_schema(f"{path}.{keyword}[{index}]", inner)
    for keyword in _ONE:
        if keyword in schema and not (keyword == "items" and isinstance(schema[keyword], list)):
            yield from _check_schema(f"{path}.{keyword}", schema[keyword])


def _shown(name: str) -> str:
    return name if len(name) <= MAX_NAME and name.isprintable() else "?"


def _not(path: str, expected: str) -> ApiError:
    return invalid(f"'{path}' must be {expected}.", param=path, code="invalid_type")


def _choice(fields: Fields, names: set[str]) -> tuple[Choice | None, str | None]:
    """Return the choice, and the name of the function that it names."""
    value = fields.take("tool_choice")
    if value is None:
        return None, None
    if value == "none" or value == "auto" or value == "required":
        return value, None
    if not isinstance(value, dict):
        raise invalid(
            "'tool_choice' must be 'none', 'auto', 'required' or "
            "{'type': 'function', 'function': {'name': NAME}}.",
            param="tool_choice",
        )
    choice = Fields("tool_choice", value)
    if choice.required_text("type", max_length=64) != "function":
        raise unsupported("tool_choice.type", "'tool_choice.type' must be 'function'.")
    function = choice.child("function")
    if function is None:
        raise choice.missing("function")
    name = _function_name(function)
    function.done()
    choice.done()
    if name not in names:
        raise invalid(
            f"'tool_choice.function.name' is '{name}', and no tool of 'tools' has this name.",
            param="tool_choice.function.name",
        )
    return "required", name


def _function_name(function: Fields) -> str:
    name = function.required_text("name", max_length=MAX_NAME)
    if not _NAME.fullmatch(name):
        where = function.at("name")
        raise invalid(f"'{where}' is not a name of a function: one {_NAME_RULE}.", param=where)
    return name


class CallsParser:
    """Takes the tool calls of all messages of a request, within limits on all together."""

    def __init__(self) -> None:
        self._num_values = 0
        self._names: dict[str, str] = {}

    def name_of(self, call_id: str) -> str | None:
        """Return the function of an earlier call; None if there is no such call."""
        return self._names.get(call_id)

    def parse(self, fields: Fields) -> Steps[tuple[ToolCall, ...]]:
        """Take `tool_calls` of an assistant's message.

        Raises:
            ApiError: 400; it names the invalid part.
        """
        values = fields.array("tool_calls", max_length=MAX_CALLS) or []
        calls = []
        for index, value in enumerate(values):
            call = yield from self._call(f"{fields.at('tool_calls')}[{index}]", value)
            self._names[call.id] = call.name
            calls.append(call)
        return tuple(calls)

    def _call(self, path: str, value: Any) -> Steps[ToolCall]:
        fields = Fields(path, value)
        call_id = fields.required_text("id", max_length=MAX_ID)
        kind = fields.text("type", max_length=64)
        if kind not in (None, "function"):
            raise unsupported(f"{path}.type", f"'{path}.type' must be 'function'.")
        fields.integer("index", minimum=0, maximum=MAX_CALLS)  # streams have it
        function = fields.child("function")
        if function is None:
            raise fields.missing("function")
        fields.done()
        name = _function_name(function)
        arguments = function.text("arguments", max_length=MAX_ARGUMENTS)
        if arguments is None:
            raise function.missing("arguments")
        function.take("parsed_arguments")  # what a client has read from them
        function.done()
        values = yield from self._object(function.at("arguments"), arguments)
        return ToolCall(call_id, name, arguments or "{}", values)

    def _object(self, path: str, text: str) -> Steps[Mapping[str, Any]]:
        """Decode arguments as strictly as a body. No text counts as no arguments."""
        if not text:
            return {}
        try:
            return (yield from read_json(text.encode(), self._count)).value
        except ApiError as error:
            raise invalid(
                f"'{path}' must be the text of a JSON object. {error.message}", param=path
            ) from error
        except UnicodeEncodeError as error:
            raise invalid(f"'{path}' is not valid Unicode.", param=path) from error

    def _count(self, num_bytes: int, num_values: int) -> None:
        del num_bytes  # the body's limit bounds them
        self._num_values += num_values
        if self._num_values > MAX_VALUES:
            raise invalid(
                f"The arguments of all calls have more than {MAX_VALUES} values.", param=None
            )
