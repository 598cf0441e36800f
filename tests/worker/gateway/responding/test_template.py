"""A model's own response template: what is taken, what is refused, and which one a model gets."""

from __future__ import annotations

import copy
import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer
from worker.gateway.responding.templates import HERMES
from worker.gateway.responding.written import CALLS, TOOLS, gemma4, parsed
from worker.gateway.stack import MODEL

from vlm_worker.gateway.detokenization import TextAssembler, TokenTexts
from vlm_worker.gateway.prompts import PromptBuilder
from vlm_worker.gateway.responding.builtin import CALLS as FIELDS
from vlm_worker.gateway.responding.builtin import builtin, choose
from vlm_worker.gateway.responding.template import TemplateError, load_template
from vlm_worker.types import TokenLogprobs

OWN: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "tool_calls": dict(FIELDS["hermes"]),
        "content": {"close_pattern": r"\s*(?:<\|im_end\|>|<\|endoftext\|>)"},
    },
}


def changed(path: str, value: Any) -> dict[str, Any]:
    template = copy.deepcopy(OWN)
    *folders, name = path.split(".")
    functools.reduce(lambda inner, folder: inner[folder], folders, template)[name] = value
    return template


def test_a_model_s_own_template_comes_first() -> None:
    chosen = choose(OWN, "<tool_call> <function=")
    assert (chosen.name, chosen.problem) == ("own", "")
    text = '<think>a</think>b<tool_call>{"name": "no-arguments_2"}</tool_call>\n<|im_end|>\n'
    assert parsed(load_template(OWN), list(text)) == ("b", "a", [("no-arguments_2", "{}")])


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ([], "must be an object"),
        (changed("version", 2), "version 2"),
        (changed("more", 1), "'more' is not built"),
        (changed("fields", {}), "has no field 'content'"),
        (changed("fields.audio", {"open": "<a>"}), "'audio' is not built"),
        (changed("fields.reasoning", {"open": "<t>"}), "two fields"),
        (changed("fields.thinking.open", ""), "not empty"),
        (changed("fields.thinking.open_pattern", "x"), "both"),
        (changed("fields.thinking.content", "int"), "'int' is not built"),
        (changed("fields.thinking.transform", {}), "transform is not built"),
        (changed("fields.thinking", {}), "only 'content' may have no 'open'"),
        (changed("fields.content.close_pattern", "(?<=a)b"), "content.close_pattern has"),
        (changed("fields.tool_calls.content", "kv-lines"), "'kv-lines' is not built"),
        (changed("fields.tool_calls.transform", "{content}"), "tool_calls.transform"),
        (changed("fields.tool_calls.transform", {"function": {"name": "{x}", "arguments": "{y}"}}),
         "tool_calls.transform"),
        (changed("fields.tool_calls.open_pattern", None), "no 'open'"),
        (changed("fields.tool_calls.content_args", {"x": 1}), "'x' is not built"),
        (changed("fields.tool_calls", {**FIELDS["glm4"], "content_args": {"tag_pattern": "a"}}),
         "value"),
        (changed("start_anchor", None), "start_anchor"),
    ],
)  # fmt: skip
def test_what_is_not_built_is_refused_and_named(template: Any, why: str) -> None:
    with pytest.raises(TemplateError, match=why):
        load_template(template)
    assert choose(template, "<tool_call>").template is None


def model(tmp_path: Path, chat_template: str, **config: Any) -> Path:
    directory = tmp_path / "model"
    shutil.copytree(MODEL, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    (directory / "chat_template.jinja").write_text(chat_template)
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return directory


def test_the_gateway_reads_it_from_the_tokenizer_s_configuration(tmp_path: Path) -> None:
    builder = PromptBuilder(model(tmp_path, HERMES, response_template=OWN))
    assert builder.responding.name == "own"
    assert builder.responding.template is not None
    kept = builder.responding.template.anchors_in(builder.control_tokens)
    assert kept == {"<|im_end|>", "<|endoftext|>"}
    assert builder.ids_of(kept) == {0, 2}


def test_a_template_that_is_not_built_is_in_the_log_and_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = changed("fields.thinking.content", "int")
    builder = PromptBuilder(model(tmp_path, HERMES, response_template=own))
    assert builder.responding.template is None
    assert "response_template" in caplog.text


def test_a_model_without_calls_and_reasoning_has_no_template() -> None:
    assert PromptBuilder(MODEL).responding.template is None
    reasons = choose(None, "<|im_start|>... <think>")
    assert reasons.name == "reasoning"
    assert reasons.template is not None
    assert not reasons.template.has_calls


def test_control_tokens_that_are_anchors_reach_the_parser() -> None:
    """As Gemma 4's: its anchors and quotes are control tokens, which have no text elsewhere."""
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    special = ["<|tool_call>", "<tool_call|>", '<|"|>']
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    template = builtin("gemma4")
    ids = tokenizer.encode("Héy " + gemma4(CALLS)).ids
    control = {token: tokenizer.token_to_id(token) for token in special}
    assert template.anchors_in([*special, "<|im_end|>"]) == set(special)
    assert set(control.values()) <= set(ids)
    kept = frozenset(control.values())
    assembler = TextAssembler(tokenizer, TokenTexts(tokenizer), stop=(), kept_ids=kept)
    logprobs = TokenLogprobs(-1.0, ())
    pieces = [assembler.feed(token_id, logprobs) for token_id in [*ids, 2]]
    pieces.append(assembler.finish())
    content, _, calls = parsed(template, [piece.text for piece in pieces], tools=TOOLS)
    assert content == "Héy"
    assert [(name, json.loads(arguments)) for name, arguments in calls] == CALLS
    joined = b"".join(t.chosen.utf8_bytes for piece in pieces for t in piece.tokens)
    assert joined.decode() == "".join(piece.text for piece in pieces)
    bare = TextAssembler(tokenizer, TokenTexts(tokenizer), stop=())
    plain = "".join(bare.feed(token_id, None).text for token_id in ids) + bare.finish().text
    assert "<|tool_call>" not in plain
