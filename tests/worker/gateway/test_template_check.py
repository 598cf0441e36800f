"""A model's chat template cannot hold a gateway, at its start or later."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlm_worker.core.model_files import ModelConfigError
from vlm_worker.gateway import chat_template
from vlm_worker.gateway.api.errors import ApiError
from vlm_worker.gateway.api.requests import Message
from vlm_worker.gateway.chat_template import ChatTemplate, examine, read_template
from vlm_worker.gateway.conversation import Conversation, TemplateFacts

USER = Conversation([Message("user", "hi")])
LONG_LOOP = "{% set s = 'a' * 9999 %}" + "{% for x in s %}" * 5 + "{% endfor %}" * 5
LARGE_TEXT = "{% set s = 'a' * 999999 %}{{ s | replace('a', s) | length }}"
PARTS_ALONE = (
    "{% for m in messages %}{% if m.content is not string %}"
    "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("source", [LONG_LOOP, LARGE_TEXT], ids=["a long loop", "a large text"])
def test_a_template_that_takes_too_much_ends_the_start(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "CPU_SECONDS", 1)
    with pytest.raises(ModelConfigError, match=r"chat_template\.jinja.*to render"):
        examine(source, ())


@pytest.mark.parametrize(
    ("source", "dropped"),
    [(PARTS_ALONE, True), ("{{ messages[0].content }}", False), ("{% include 'x' %}", False)],
)
def test_whether_texts_are_dropped_is_found_in_the_other_process(
    source: str, dropped: bool
) -> None:
    assert examine(source, (("bos_token", "<s>"),)).as_parts is dropped
    assert ChatTemplate(source, [], {}).drops_strings() is dropped


@pytest.mark.parametrize(
    "source",
    [
        "{% include 'x' %}",
        "{{ 1 // 0 }}",
        "{{ messages[0].content + 1 }}",
        "{{ 'a' * 9000000000 }}",
        "{{ ['a'] * 9000000000 }}",
        "{{ 9 ** 999999999 }}",
        "{{ '%999999999d' % 1 }}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ range(10 ** 12) | list }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_whatever_a_template_does_wrong_is_a_refusal(source: str) -> None:
    with pytest.raises(ApiError) as refused:
        ChatTemplate(source, [], {}, facts=TemplateFacts()).render(USER)
    assert (refused.value.status, refused.value.code) == (400, "invalid_messages")


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("{{ '-' * 3 }}{{ 2 ** 3 }}{{ '%d' % 4 }}{{ 3 * 4 }}", "---8412"),
        ("{% for i in range(3) %}{{ i }}{% endfor %}", "012"),
        ("{{ range(1, 7, 2) | list }}", "[1, 3, 5]"),
    ],
)
def test_what_templates_do_still_works(source: str, shown: str) -> None:
    pieces = ChatTemplate(source, [], {}, facts=TemplateFacts()).render(USER)
    assert "".join(text for text, _ in pieces) == shown


def test_a_link_out_of_the_model_s_directory_is_refused(tmp_path: Path) -> None:
    model, elsewhere = tmp_path / "model", tmp_path / "secret"
    model.mkdir()
    elsewhere.write_text("secret")
    (model / "chat_template.jinja").symlink_to(elsewhere)
    with pytest.raises(ModelConfigError, match="outside of the model's directory"):
        read_template(model)


@pytest.mark.parametrize("target", ["../../blobs/1", "other.jinja", "../../blobs/../blobs/1"])
def test_links_inside_of_it_and_of_the_hub_s_cache_are_followed(
    tmp_path: Path, target: str
) -> None:
    model, blobs = tmp_path / "models--a--b/snapshots/r", tmp_path / "models--a--b/blobs"
    model.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "1").write_text("x")
    (model / "other.jinja").write_text("x")
    (model / "chat_template.jinja").symlink_to(target)
    assert read_template(model) == "x"
