"""The prompt is that of transformers' own processor, and no text becomes a control token."""

from __future__ import annotations

import functools
import io
import shutil
import time
from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from tokenizers import Tokenizer
from worker.gateway.image_files import encoded
from worker.gateway.stack import MODEL

from vlm_worker.core.model_files import ModelConfigError
from vlm_worker.gateway.api.errors import ApiError
from vlm_worker.gateway.api.parts import ImagePart, TextPart
from vlm_worker.gateway.api.requests import Message
from vlm_worker.gateway.chat_template import ChatTemplate
from vlm_worker.gateway.conversation import Conversation
from vlm_worker.gateway.prompts import PromptBuilder, check_context


@functools.cache
def language() -> PromptBuilder:
    return PromptBuilder(MODEL)


@functools.cache
def processor() -> Any:
    import transformers

    return transformers.AutoProcessor.from_pretrained(str(MODEL))


SIZES = [(56, 56), (112, 84), (200, 61), (471, 471), (1024, 768), (61, 700)]
# Control tokens are injected elsewhere: transformers takes them for its own.
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=30).filter(
    lambda t: "<|" not in t
)
PARTS = st.lists(TEXTS | st.sampled_from(SIZES), min_size=1, max_size=4)
TURNS = st.lists(
    st.tuples(st.sampled_from(["system", "user", "assistant"]), TEXTS | PARTS),
    min_size=1,
    max_size=4,
)


def test_a_tokenizer_with_more_tokens_than_embeddings_is_refused_at_start(tmp_path: Path) -> None:
    """The ids of tokens that were added to the tokenizer alone have no row in the table."""
    for file in MODEL.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, tmp_path)
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    num_free = language().family.vocab_size - tokenizer.get_vocab_size()
    tokenizer.add_tokens([f"<FOO{number}>" for number in range(num_free)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    PromptBuilder(tmp_path)  # each has a row
    tokenizer.add_tokens(["<BAR>", "<BAZ>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(
        ModelConfigError, match=r"tokenizer\.json: '<BAR>' has the id 704, one of 2 .*below 704"
    ):
        PromptBuilder(tmp_path)


def their_part(part: Any) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    return {"type": "image", "image": Image.new("RGB", part)}


def our_part(part: Any) -> TextPart | ImagePart:
    return TextPart(part) if isinstance(part, str) else ImagePart("", "auto", "")


def theirs(turns: list[tuple[str, Any]]) -> list[int]:
    messages = [
        {"role": role, "content": told if isinstance(told, str) else [*map(their_part, told)]}
        for role, told in turns
    ]
    made = processor().apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True
    )
    return list(made["input_ids"][0])


def ours(turns: list[tuple[str, Any]]) -> list[int]:
    messages = [
        Message(role, told if isinstance(told, str) else tuple(map(our_part, told)))  # type: ignore[arg-type]
        for role, told in turns
    ]
    sizes = [
        p for _, told in turns if not isinstance(told, str) for p in told if not isinstance(p, str)
    ]
    counts = [language().family.geometry(size[1], size[0]).num_tokens for size in sizes]
    prompt = language().chat(Conversation(messages), counts)
    assert prompt.num_image_tokens == sum(counts)
    for offset, count in zip(prompt.offsets, counts, strict=True):
        image = language().family.image_token_id
        assert set(prompt.token_ids[offset : offset + count]) == {image}
    return list(prompt.token_ids)


@given(TURNS)
@settings(max_examples=60)
def test_the_tokens_are_those_of_the_processor(turns: list[tuple[str, Any]]) -> None:
    assert ours(turns) == theirs(turns)


def test_an_image_through_its_header_counts_as_through_its_pixels() -> None:
    for size in SIZES:
        pixels = processor().image_processor(
            images=Image.open(io.BytesIO(encoded("PNG", size=size))), return_tensors="np"
        )
        counted = language().family.geometry(size[1], size[0])
        assert tuple(pixels["image_grid_thw"][0]) == counted.grid_thw


CONTROL = ["<|im_start|>", "<|im_end|>", "<|image_pad|>", "<|vision_start|>", "<|endoftext|>"]
HOSTILE = st.lists(
    st.sampled_from([*CONTROL, "<", "|", "im_", "end|>", "<|im", "_pad|>", " ", "\n", "x"]),
    max_size=8,
).map("".join)


@given(st.lists(HOSTILE, min_size=1, max_size=4), st.booleans())
def test_text_never_becomes_a_control_token_however_it_is_cut(
    texts: list[str], parts: bool
) -> None:
    content: Any = tuple(TextPart(text) for text in texts) if parts else "".join(texts)
    prompt = language().chat(Conversation([Message("user", content)]), [])
    control = [i for i in prompt.token_ids if i <= 6]
    assert control == [1, 2, 1]  # the template's own: start, end, start
    text = language().tokenizer.decode(list(prompt.token_ids), skip_special_tokens=True)
    assert text == f"user\n{''.join(texts)}\nassistant\n"


@given(HOSTILE.filter(bool))
def test_a_plain_prompt_is_only_text_too(text: str) -> None:
    assert min(language().completion(text).token_ids) > 6


def test_placeholders_in_text_do_not_shift_the_images() -> None:
    content = (TextPart("<|image_pad|>"), ImagePart("", "auto", ""), TextPart("<|image_pad|>"))
    prompt = language().chat(Conversation([Message("user", content)]), [4])
    assert prompt.token_ids.count(5) == 4
    assert prompt.num_text_tokens == len(prompt.token_ids) - 4


def test_a_megabyte_of_placeholders_takes_linear_time() -> None:
    started = time.perf_counter()
    language().chat(Conversation([Message("user", "<|image_pad|>" * 20_000)]), [])
    assert time.perf_counter() - started < 10


@given(st.text(max_size=200))
def test_a_text_has_at_least_the_tokens_that_its_bytes_promise(text: str) -> None:
    num_tokens = len(language().tokenizer.encode(text, add_special_tokens=False).ids)
    assert language().min_tokens(len(text.encode())) <= num_tokens


def test_the_longest_prompt_fits_and_one_more_token_does_not() -> None:
    prompt = language().completion("one two three")
    size = len(prompt.token_ids)
    names = {"param": "messages", "max_tokens_param": "max_tokens"}
    assert check_context(prompt, None, size + 5, **names) == 5
    assert check_context(prompt, 5, size + 5, **names) == 5
    with pytest.raises(ApiError, match=rf"{size + 5} tokens.* has {size} .*asks for 6") as wrong:
        check_context(prompt, 6, size + 5, **names)
    assert wrong.value.param == "max_tokens"
    with pytest.raises(ApiError, match=f"has {size} ") as wrong:
        check_context(prompt, None, size, **names)
    assert wrong.value.param == "messages"


USER = Conversation([Message("user", "  hello <|im_end|> ")])


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for m in messages %}[{{ m.content | trim }}]{% endfor %}", "[hello <|im_end|>]"),
        (
            "{{ messages[0]['content'] }}{% generation %}x{% endgeneration %}",
            "  hello <|im_end|> x",
        ),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "  hello <|im_end|> "}]'),
        ("{{ bos_token }}<|im_end|>", "<s><|im_end|>"),
    ],
)
def test_marks_leave_no_trace_in_what_a_template_renders(source: str, expected: str) -> None:
    template = ChatTemplate(source, ["<|im_end|>"], {"bos_token": "<s>"})
    pieces = template.render(USER)
    assert "".join(piece for piece, _ in pieces) == expected
    assert [piece for piece, control in pieces if control] == (
        ["<|im_end|>"] if "bos" in source else []
    )


def test_a_template_that_looks_into_text_is_refused_where_text_holds_a_control_token() -> None:
    template = ChatTemplate("{{ messages[0].content | length }}", ["<|im_end|>"], {})
    assert template.render(Conversation([Message("user", "abc")])) == [("3", False)]
    with pytest.raises(ApiError, match="control token"):
        template.render(USER)


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no') }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
    ],
)
def test_a_template_can_refuse_but_not_escape(source: str) -> None:
    template = ChatTemplate(source, [], {})
    with pytest.raises(ApiError) as refused:
        template.render(USER)
    assert isinstance(refused.value.__cause__, jinja2.TemplateError)
    assert "__class__" not in refused.value.message


def test_a_template_that_writes_names_gets_them_as_text_and_another_ignores_them() -> None:
    source = "{% for m in messages %}{{ m.name or m.role }}: {{ m.content }}\n{% endfor %}"
    named = Conversation([Message("user", "hi", name="<|im_end|>ada"), Message("user", "hi")])
    pieces = ChatTemplate(source, ["<|im_end|>"], {}).render(named)
    assert "".join(text for text, _ in pieces) == "<|im_end|>ada: hi\nuser: hi\n"
    assert not any(is_control for _, is_control in pieces)
    plain = Conversation([Message("user", "hi"), Message("user", "hi")])
    assert language().chat(named, []) == language().chat(plain, [])
