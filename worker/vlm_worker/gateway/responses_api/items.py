"""Writes `input` as the messages of a chat. Pure.

    instructions                     ─▶ system
    message (system, developer, user) ─▶ the same role
    reasoning, message (assistant),  ─▶ one message of the assistant: reasoning_content,
      function_call, function_call        content, tool_calls
    function_call_output             ─▶ tool

It checks what only items have. The values go to the chat's own checks, whose errors get the names
of the items by `Paths`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

from vlm_worker.gateway.api.errors import ApiError, invalid, unsupported
from vlm_worker.gateway.api.schema import MAX_TEXT, Fields, refuse
from vlm_worker.gateway.api.tools import MAX_ID
from vlm_worker.gateway.responses_api.fields import (
    FUNCTION_CALL,
    FUNCTION_CALL_OUTPUT,
    MESSAGE,
    REASONING,
)
from vlm_worker.gateway.responses_api.paths import Paths
from vlm_worker.gateway.turns import Steps

_MAX_ITEM_ID: Final = 512
_STATUSES: Final = ("in_progress", "completed", "incomplete")
_TYPES: Final = ("message", "function_call", "function_call_output", "reasoning")
_FILES: Final = ("input_file", "input_audio", "input_video")


def messages_of(value: Any, instructions: str | None, paths: Paths) -> Steps[list[dict[str, Any]]]:
    """Return the messages of a chat that `input` and `instructions` ask for.

    Raises:
        ApiError: 400; it names the invalid item.
    """
    messages = _Messages(paths)
    if instructions is not None:
        messages.put({"role": "system", "content": instructions}, "instructions", "instructions")
    if isinstance(value, str):
        messages.put({"role": "user", "content": value}, "input", "input")
        return messages.done()
    if not isinstance(value, list):
        raise _type("input", "a string or an array of items")
    if not value:
        raise invalid("'input' must have at least one item.", param="input")
    for index, item in enumerate(value):
        yield from messages.item(f"input[{index}]", item)
        yield
    written = messages.done()
    if not written:
        raise invalid("'input' has no item that the model reads.", param="input")
    return written


@dataclasses.dataclass(slots=True)
class _Answer:
    """A message of the assistant that is being written. `_Messages` is the only writer."""

    message: dict[str, Any]
    index: int
    texts: list[str] = dataclasses.field(default_factory=list)
    reasoning: list[str] = dataclasses.field(default_factory=list)
    calls: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def end(self) -> None:
        """Write the fields of the message, as an answer of a chat has them."""
        message = self.message
        message["content"] = None if self.calls and not self.texts else "".join(self.texts)
        if self.reasoning:
            message["reasoning_content"] = "".join(self.reasoning)
        if self.calls:
            message["tool_calls"] = self.calls


class _Messages:
    """The messages of the items so far."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        self._messages: list[dict[str, Any]] = []
        self._answer: _Answer | None = None
        self._call_ids: set[str] = set()

    def put(self, message: dict[str, Any], path: str, content_path: str) -> None:
        """Add a message of another role than the assistant's."""
        self._end_answer()
        self._place(message, path, content_path)

    def done(self) -> list[dict[str, Any]]:
        self._end_answer()
        return self._messages

    def item(self, path: str, value: Any) -> Steps[None]:
        fields = Fields(path, value)
        kind = fields.text("type", max_length=64) or "message"
        if kind not in _TYPES:
            raise unsupported(f"{path}.type", _why_not(f"{path}.type", kind))
        fields.text("id", max_length=_MAX_ITEM_ID)
        fields.choice("status", _STATUSES)
        if kind == "message":
            yield from self._message(path, fields)
        elif kind == "reasoning":
            yield from self._reasoning(path, fields)
        elif kind == "function_call":
            self._call(path, fields)
        else:
            yield from self._output(path, fields)

    def _message(self, path: str, fields: Fields) -> Steps[None]:
        role = fields.choice("role", ("user", "assistant", "system", "developer"))
        if role is None:
            raise fields.missing("role")
        refuse(fields, MESSAGE)
        where, content = fields.at("content"), fields.take("content")
        fields.done()
        if content is None:
            raise fields.missing("content")
        if role == "assistant":
            text = content if isinstance(content, str) else (yield from _said(where, content))
            answer = self._answer_for(path)
            answer.texts.append(text)
            self._paths.put(f"messages[{answer.index}].content", where)
            return
        if isinstance(content, list):
            content = yield from _parts(where, content)
        self.put({"role": role, "content": content}, path, where)

    def _reasoning(self, path: str, fields: Fields) -> Steps[None]:
        refuse(fields, REASONING)
        content = fields.take("content")
        fields.done()
        if content is None:
            return
        texts = yield from _texts(fields.at("content"), content, ("reasoning_text",))
        answer = self._answer_for(path)
        answer.reasoning += texts
        self._paths.put(f"messages[{answer.index}].reasoning_content", fields.at("content"))

    def _call(self, path: str, fields: Fields) -> None:
        call_id = fields.required_text("call_id", max_length=MAX_ID)
        refuse(fields, FUNCTION_CALL)
        function = {name: fields.take(name) for name in ("name", "arguments")}
        fields.done()
        self._call_ids.add(call_id)
        answer = self._answer or self._begin_answer(path)
        where = f"messages[{answer.index}].tool_calls[{len(answer.calls)}]"
        self._paths.put(where, path)
        answer.calls.append({"id": call_id, "type": "function", "function": function})

    def _output(self, path: str, fields: Fields) -> Steps[None]:
        call_id = fields.required_text("call_id", max_length=MAX_ID)
        refuse(fields, FUNCTION_CALL_OUTPUT)
        where, output = fields.at("output"), fields.take("output")
        fields.done()
        if call_id not in self._call_ids:
            raise invalid(
                f"'{path}.call_id' is the id of no 'function_call' item before it; send the item "
                "with the call.",
                param=f"{path}.call_id",
            )
        if output is None:
            raise fields.missing("output")
        if isinstance(output, list):
            texts = yield from _texts(where, output, ("input_text",))
            output = [{"type": "text", "text": text} for text in texts]
        message = {"role": "tool", "tool_call_id": call_id, "content": output}
        self.put(message, path, where)

    def _answer_for(self, path: str) -> _Answer:
        """Return the message that a text or reasoning belongs to.

        An answer has no two texts in a row: the second one begins another message.
        """
        answer = self._answer
        if answer is None or (answer.texts and not answer.calls):
            self._end_answer()
            return self._begin_answer(path)
        return answer

    def _begin_answer(self, path: str) -> _Answer:
        message: dict[str, Any] = {"role": "assistant"}
        self._place(message, path, path)
        self._answer = _Answer(message, len(self._messages) - 1)
        return self._answer

    def _end_answer(self) -> None:
        if self._answer is not None:
            self._answer.end()
            self._answer = None

    def _place(self, message: dict[str, Any], path: str, content_path: str) -> None:
        where = f"messages[{len(self._messages)}]"
        self._paths.put(where, path)
        self._paths.put(f"{where}.content", content_path)
        self._messages.append(message)


def _parts(path: str, values: list[Any]) -> Steps[list[dict[str, Any]]]:
    parts = []
    for index, value in enumerate(values):
        parts.append(_part(f"{path}[{index}]", value))
        yield
    return parts


def _part(path: str, value: Any) -> dict[str, Any]:
    fields = Fields(path, value)
    kind = fields.required_text("type", max_length=64)
    fields.only("prompt_cache_breakpoint", (), "caches need no breakpoints.")
    if kind == "input_text":
        part: dict[str, Any] = {"type": "text", "text": fields.take("text")}
    elif kind == "input_image":
        fields.only("file_id", (), "no files are stored: send 'image_url'.")
        url = fields.take("image_url")
        if url is None:
            raise fields.missing("image_url")
        image = {"url": url, "detail": fields.take("detail")}
        part = {"type": "image_url", "image_url": image}
    else:
        raise _unknown_part(path, kind, ("input_text", "input_image"))
    fields.done()
    return part


def _said(path: str, values: Any) -> Steps[str]:
    """Return the text of an assistant's parts."""
    kinds = ("output_text", "input_text", "refusal")
    return "".join((yield from _texts(path, values, kinds)))


def _texts(path: str, values: Any, kinds: Sequence[str]) -> Steps[list[str]]:
    """Return the texts of parts of these kinds."""
    if not isinstance(values, list):
        raise _type(path, "an array of parts" if len(kinds) == 1 else "a string or parts")
    texts = []
    for index, value in enumerate(values):
        fields = Fields(f"{path}[{index}]", value)
        kind = fields.required_text("type", max_length=64)
        if kind not in kinds:
            raise _unknown_part(fields.path, kind, kinds)
        name = "refusal" if kind == "refusal" else "text"
        texts.append(fields.required_text(name, max_length=MAX_TEXT, min_length=0))
        if kind == "output_text":
            fields.only("annotations", ([],), "texts have no annotations.")
            fields.take("logprobs")  # of an answer, given back
        fields.only("prompt_cache_breakpoint", (), "caches need no breakpoints.")
        fields.done()
        yield
    return texts


def _unknown_part(path: str, kind: str, kinds: Sequence[str]) -> ApiError:
    where = f"{path}.type"
    if kind in _FILES:
        return unsupported(
            where, f"'{where}' is '{kind}', which is not built: send text and images."
        )
    if kind == "input_image":
        return unsupported(where, f"'{where}' is '{kind}': images go into messages of the user.")
    listed = ", ".join(f"'{one}'" for one in kinds)
    return invalid(f"'{where}' must be one of {listed}.", param=where)


def _why_not(path: str, kind: str) -> str:
    if kind == "item_reference":
        return f"'{path}' is '{kind}', but no items are stored: send the item itself."
    listed = ", ".join(f"'{one}'" for one in _TYPES)
    return f"'{path}' must be one of {listed}; items of hosted tools are not built."


def _type(path: str, expected: str) -> ApiError:
    return invalid(f"'{path}' must be {expected}.", param=path, code="invalid_type")
