"""Response templates of ours, in the format of transformers, and which one a model gets. Pure.

A model's own `response_template` in `tokenizer_config.json` comes first. Else the text of its chat
template says how it writes calls and reasoning, because that text wrote them in its training.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from vlm_worker.gateway.responding.template import ResponseTemplate, TemplateError, load_template

_ANCHORS: Final = (
    "<|im_start|>assistant\n", "<|assistant|>", "<|start_header_id|>assistant<|end_header_id|>",
    "[/INST]", "[/TOOL_RESULTS]", "<|turn>model\n", "<tool_response|>",
    "<start_of_turn>model\n", "<\uff5cAssistant\uff5c>",
)  # fmt: skip
_FUNCTION: Final = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}

CALLS: Final[Mapping[str, Mapping[str, Any]]] = {
    "hermes": {
        "open_pattern": r"\s*<tool_call>",
        "close": "</tool_call>",
        "repeats": True,
        "content": "json",
        "transform": {"type": "function", "function": "{content}"},
    },
    "qwen3_xml": {
        "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\s]+)>",
        "close_pattern": r"\s*</function>\s*</tool_call>",
        "repeats": True,
        "content": "xml-inline",
        "content_args": {
            "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"
        },
        "transform": _FUNCTION,
    },
    "glm4": {
        "open_pattern": r"\s*<tool_call>\s*(?P<name>[^\s<]+)\s*",
        "close_pattern": r"\s*</tool_call>",
        "repeats": True,
        "content": "xml-inline",
        "content_args": {
            "tag_pattern": r"<arg_key>(?P<key>[^<]+)</arg_key>\s*"
            r"<arg_value>(?P<value>.*?)</arg_value>",
            "value_parser": {"name": "json", "args": {"allow_non_json": True}},
        },
        "transform": _FUNCTION,
    },
    "gemma4": {
        "open_pattern": r"\s*<\|tool_call>call:(?P<name>[^\s{]+)",
        "close": "<tool_call|>",
        "repeats": True,
        "content": "json",
        "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
        "transform": _FUNCTION,
    },
    "mistral": {
        "open_pattern": r"\s*\[TOOL_CALLS\]\s*(?=\[)",
        "content": "json",
        "transform": {
            "type": "function", "function": {"name": "{name}", "arguments": "{arguments}"},
        },
        "transform_each": True,
    },
    "mistral_args": {
        "open_pattern": r"\s*\[TOOL_CALLS\]\s*(?P<name>[^\s\[{]+)\s*(?:\[ARGS\])?\s*(?=\{)",
        "repeats": True,
        "content": "json",
        "transform": _FUNCTION,
    },
    "llama3_json": {
        "open_pattern": r"\s*(?:<\|python_tag\|>)?(?:;\s*)?"
        r'(?=\{\s*"(?:name|type|function|parameters)")',
        "repeats": True,
        "content": "json",
        "transform": {
            "type": "function",
            "function": {"name": "{content.name}", "arguments": "{content.parameters}"},
        },
    },
}  # fmt: skip
"""Fields `tool_calls`, by name."""

_MARKERS: Final = (
    ("qwen3_xml", ("<tool_call>", "<function=")),
    ("glm4", ("<tool_call>", "<arg_key>")),
    ("gemma4", ("<|tool_call>",)),
    ("mistral_args", ("[TOOL_CALLS]", "[ARGS]")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("hermes", ("<tool_call>",)),
    ("llama3_json", ("<|start_header_id|>", '"parameters": ')),
)
_REASONING: Final = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|channel>thought\n", "<channel|>"),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Responding:
    """How a model's answers are read. `problem` says why a template of the model's is not used."""

    template: ResponseTemplate | None
    name: str
    problem: str = ""


def choose(own: Any, chat_template: str) -> Responding:
    """Choose a template: `own` of `tokenizer_config.json`, else by the chat template's text."""
    if own is not None:
        try:
            return Responding(load_template(own), "own")
        except TemplateError as error:
            return Responding(None, "own", str(error))
    calls = next(
        (name for name, marks in _MARKERS if all(mark in chat_template for mark in marks)), None
    )
    reasoning = next((pair for pair in _REASONING if pair[0].strip() in chat_template), None)
    if calls is None and reasoning is None:
        return Responding(None, "none")
    return Responding(builtin(calls, reasoning), calls or "reasoning")


def builtin(
    calls: str | None, reasoning: tuple[str, str] | None = ("<think>", "</think>")
) -> ResponseTemplate:
    """Return the template with these calls and this reasoning."""
    fields: dict[str, Any] = {"content": {"content": "text"}}
    if reasoning is not None:
        fields["reasoning_content"] = {
            "open": reasoning[0], "close": reasoning[1], "content": "text", "repeats": True,
            "join": "\n",
        }  # fmt: skip
    if calls is not None:
        fields["tool_calls"] = CALLS[calls]
    return load_template({"start_anchor": list(_ANCHORS), "fields": fields})
