"""Prompts of every family are those of transformers' processor; images count as its pixels."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from worker import tokenizers_by_code as by_code
from worker.checkpoints import make_processor
from worker.gateway.test_prompts import our_part, their_part

from vlm_worker.core.families import ModelConfigError
from vlm_worker.gateway.api.requests import Message
from vlm_worker.gateway.conversation import Conversation
from vlm_worker.gateway.prompts import PieceEncoder, PromptBuilder

SIZES = [(1, 1), (56, 56), (112, 84), (61, 700), (471, 471), (1024, 768), (3, 400)]


@dataclasses.dataclass(frozen=True)
class Model:
    """Its files as transformers reads them, and as the gateway does."""

    processor: Any
    language: PromptBuilder


@pytest.fixture(scope="module", params=["gemma3", "llava"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    directory = tmp_path_factory.mktemp("prompts") / request.param
    return Model(make_processor(directory, request.param), PromptBuilder(directory))


TEXTS = st.text(st.sampled_from("ab the\n\n\n .é😀"), max_size=12)
PARTS = st.lists(TEXTS | st.sampled_from(SIZES), min_size=1, max_size=4)
TURNS = st.lists(st.tuples(st.sampled_from(["user", "assistant"]), PARTS), min_size=1, max_size=3)


@given(turns=TURNS)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_tokens_are_those_of_the_processor(
    model: Model, turns: list[tuple[str, list[Any]]]
) -> None:
    made = model.processor.apply_chat_template(
        [{"role": role, "content": [*map(their_part, told)]} for role, told in turns],
        add_generation_prompt=True, tokenize=True, return_dict=True,
    )  # fmt: skip
    sizes = [part for _, told in turns for part in told if not isinstance(part, str)]
    family = model.language.family
    counts = [family.geometry(height, width).num_tokens for width, height in sizes]
    messages = [Message(role, tuple(map(our_part, told))) for role, told in turns]  # type: ignore[arg-type]
    prompt = model.language.chat(Conversation(messages), counts)
    assert list(prompt.token_ids) == list(made["input_ids"][0])
    for offset, count in zip(prompt.offsets, counts, strict=True):
        assert set(prompt.token_ids[offset : offset + count]) == {family.image_token_id}


def test_a_message_that_is_one_text_is_not_dropped(model: Model) -> None:
    alone = model.language.chat(Conversation([Message("user", "what is this")]), [])
    assert alone == model.language.chat(
        Conversation([Message("user", our_parts("what is this"))]), []
    )
    assert "what is this" in model.language.tokenizer.decode(list(alone.token_ids))


def our_parts(*texts: str) -> tuple[Any, ...]:
    return tuple(map(our_part, texts))


def test_text_that_reads_like_an_image_is_text(model: Model) -> None:
    text = "<image><start_of_image><image_soft_token><s>"
    prompt = model.language.chat(Conversation([Message("user", text)]), [])
    images = {by_code.IMAGE, by_code.IMAGE_START, by_code.IMAGE_END}
    assert not images & set(prompt.token_ids)
    assert list(prompt.token_ids).count(1) == 1


@given(height=st.integers(1, 4000), width=st.integers(1, 4000))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_images_count_as_the_processor_counts_them(model: Model, height: int, width: int) -> None:
    counted = model.processor._get_num_multimodal_tokens(image_sizes=[(height, width)])
    if max(height, width) <= 200 * min(height, width):
        geometry = model.language.family.geometry(height, width)
        assert [geometry.num_tokens] == counted["num_image_tokens"]


def test_images_count_as_in_the_prompts_that_the_processor_makes(model: Model) -> None:
    family = model.language.family
    for size in SIZES:
        made = model.processor.apply_chat_template(
            [{"role": "user", "content": [their_part(size)]}], tokenize=True, return_dict=True
        )
        placeholders = list(made["input_ids"][0]).count(family.image_token_id)
        assert family.geometry(size[1], size[0]).num_tokens == placeholders


def test_detail_changes_nothing_where_all_images_have_one_size(model: Model) -> None:
    family = model.language.family
    low = family.geometry(700, 900, max_pixels=family.max_pixels_of("low"))
    assert low == family.geometry(700, 900)


def test_a_space_that_only_a_beginning_gets_is_not_put_behind_control_tokens(
    tmp_path: Path,
) -> None:
    processor = make_processor(tmp_path / "llava", "llava")
    theirs = by_code.llama_of_late()
    theirs.save_pretrained(tmp_path / "llava")
    language = PromptBuilder(tmp_path / "llava")
    prompt = language.chat(Conversation([Message("user", "the <color>")]), [])
    text = processor.apply_chat_template(
        [{"role": "user", "content": [{"type": "text", "text": "the <color>"}]}],
        add_generation_prompt=True,
    )
    assert list(prompt.token_ids) == theirs(text)["input_ids"]
    pieces = [("the", False), ("</s>", True), ("the", False)]
    encoder = PieceEncoder(language.tokenizer, language.family)
    assert encoder.encode(pieces) == theirs("the</s>the", add_special_tokens=False)["input_ids"]
    assert encoder.encode(pieces)[0] != encoder.encode(pieces)[-1]


def test_a_tokenizer_without_the_tokens_of_images_is_refused(tmp_path: Path) -> None:
    make_processor(tmp_path / "gemma3", "gemma3")
    by_code.llama().save_pretrained(tmp_path / "gemma3")
    with pytest.raises(ModelConfigError, match="has no control token 441"):
        PromptBuilder(tmp_path / "gemma3")
