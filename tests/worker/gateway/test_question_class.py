"""The classifier of questions: its file, its laws, and its accuracy on wordings it never saw."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shapes_vlm import questions as shapes_questions
from shapes_vlm import scenes

from question_class import evaluate
from question_class.train import train
from question_class.wordings import SLOT, read, slots
from vlm_worker.gateway import question_class
from vlm_worker.gateway.question_class import (
    LEARNED,
    MAX_CHARACTERS,
    MAX_TURNS,
    Classified,
    Method,
    QuestionClass,
    Weights,
    Why,
    bloom_filter,
    classify,
    join,
)

FILE = Path(question_class.__file__).with_suffix(".bin")
HELD_OUT = ("heldout.txt", "heldout_2.txt")
UNSURE = QuestionClass.UNSURE
LIKE = ({"attribute", "locate"}, {"count", "cell"})
"""Classes that all tiers of the specification treat alike."""

methods = st.sampled_from(["Learned", "Words"])
questions = st.sampled_from(
    [wording.text for name in HELD_OUT for wording in read(name)] + ["", "?!", "\ud800", "ok"]
)
anything = st.one_of(questions, st.text(st.characters(), max_size=60))
results = st.builds(
    lambda one, p: Classified(one, p, Why.UNCERTAIN if one is UNSURE else Why.CLASSIFIED),
    st.sampled_from(QuestionClass),
    st.floats(0, 1),
)


def data() -> bytes:
    return FILE.read_bytes()


def class_of(*texts: str, method: Method = "Learned") -> str:
    return classify(texts, method=method).question_class


# The file


def test_the_shipped_weights_are_the_output_of_the_trainer() -> None:
    assert train(read("wordings.txt")).to_bytes() == data()


def test_the_shipped_file_has_at_most_16_kb() -> None:
    assert len(data()) <= 16_000


def test_a_file_is_read_as_it_was_written() -> None:
    assert Weights.from_bytes(data()).to_bytes() == data()
    assert Weights.from_bytes(data()).columns.shape == (2_048, 7)


@given(at=st.integers(0, len(data()) - 1), bit=st.integers(0, 7))
def test_a_flipped_bit_of_the_file_is_noticed(at: int, bit: int) -> None:
    changed = bytearray(data())
    changed[at] ^= 1 << bit
    with pytest.raises(ValueError, match="weights"):
        Weights.from_bytes(bytes(changed))


@pytest.mark.parametrize("size", [0, 7, 40, 1_000])
def test_a_cut_file_is_noticed(size: int) -> None:
    with pytest.raises(ValueError, match="no weights"):
        Weights.from_bytes(data()[:size])


def test_the_fingerprint_follows_the_weights() -> None:
    shipped = Weights.from_bytes(data())
    other = dataclasses.replace(shipped, unit=2 * shipped.unit)
    assert question_class.fingerprint() == data()[8:40].hex()
    assert other.to_bytes()[8:40].hex() != question_class.fingerprint()


def test_the_order_of_the_classes_is_fixed() -> None:
    names = "attribute,locate,read,count,cell,chart,scene,unsure"
    assert ",".join(QuestionClass) == names


# Laws


@given(texts=st.lists(anything, max_size=5), method=methods)
def test_any_text_has_a_class(texts: list[str], method: Method) -> None:
    result = classify(texts, method=method)
    assert (result.question_class is UNSURE) == (result.why is not Why.CLASSIFIED)
    assert 0 <= result.probability <= 1
    assert result == classify(texts, method=method)


@given(texts=st.lists(anything, max_size=4), method=methods)
def test_the_order_of_turns_does_not_change_the_class(texts: list[str], method: Method) -> None:
    expected = class_of(*texts, method=method)
    for order in itertools.permutations(texts):
        assert class_of(*order, method=method) == expected


@given(texts=st.lists(questions, min_size=1, max_size=3), more=questions, method=methods)
def test_one_more_turn_keeps_the_class_or_makes_it_unsure(
    texts: list[str], more: str, method: Method
) -> None:
    before, after = class_of(*texts, method=method), class_of(*texts, more, method=method)
    assert after in (before, UNSURE) or any({before, after} <= alike for alike in LIKE)


@given(text=questions, other=questions, method=methods)
def test_turns_with_other_needs_are_unsure(text: str, other: str, method: Method) -> None:
    one, two = class_of(text, method=method), class_of(other, method=method)
    if one != two and not any({one, two} <= alike for alike in LIKE):
        assert class_of(text, other, method=method) == UNSURE


@given(text=questions, times=st.integers(1, MAX_TURNS), method=methods)
def test_a_repeated_turn_changes_nothing(text: str, times: int, method: Method) -> None:
    result = classify([text], method=method)
    if times * len(text) <= question_class.MAX_TOTAL_CHARACTERS:
        assert classify([text] * times, method=method) == result


@given(one=results, two=results, three=results)
def test_join_is_a_least_upper_bound(one: Classified, two: Classified, three: Classified) -> None:
    assert join(one, one) == one
    assert join(one, two).question_class is join(two, one).question_class
    left, right = join(join(one, two), three), join(one, join(two, three))
    assert (left.question_class, left.probability) == (right.question_class, right.probability)
    assert join(one, two).probability == min(one.probability, two.probability)


@given(before=st.text(st.characters(), min_size=1, max_size=50), method=methods)
def test_only_the_end_of_a_long_text_is_read(before: str, method: Method) -> None:
    end = ("What color is the car? " * 200)[-MAX_CHARACTERS:]
    cut = end[end.index(" ") + 1 :]
    assert classify([f"{before}{'x' * 9}{end}"], method=method) == classify([cut], method=method)


@given(text=st.text(st.characters(min_codepoint=0x370), max_size=80), method=methods)
def test_other_scripts_are_unsure(text: str, method: Method) -> None:
    assert class_of(text, method=method) == UNSURE


@given(words=st.lists(st.text("abcdefgh", min_size=1), max_size=50))
def test_the_filter_holds_what_was_put_in(words: list[str]) -> None:
    weights = dataclasses.replace(Weights.from_bytes(data()), known=bloom_filter(words))
    assert not words or weights.known_share(words) == 1
    assert weights.known_share(["zzzz"]) in (0, 1)


def test_the_filter_holds_few_other_words() -> None:
    unknown = [f"{number:x}zq" for number in range(5_000)]
    assert Weights.from_bytes(data()).known_share(unknown) < 0.03


def test_probabilities_sum_to_one_and_ignore_repetition() -> None:
    weights = Weights.from_bytes(data())
    counts = question_class.features(["how", "many", "cars"])
    once = weights.probabilities(counts)
    assert once.shape == (len(LEARNED),)
    assert once.sum() == pytest.approx(1)
    assert np.allclose(once, weights.probabilities(counts + counts))


# Accuracy


def test_questions_in_other_styles_are_classified() -> None:
    weights = Weights.from_bytes(data())
    outcomes = [one for name in HELD_OUT for one in evaluate.held_out(weights, read(name))]
    found = evaluate.accuracy(outcomes)
    assert found.questions > 300
    assert found.right >= 0.90
    assert found.right_where_sure >= 0.95
    assert found.sure >= 0.80
    assert found.lost <= 0.03


def test_few_held_out_questions_lose_the_tokens_that_they_need() -> None:
    asked = [one for name in HELD_OUT for one in read(name)]
    counts = evaluate.served(asked)
    assert counts.total() == len(asked)
    assert counts["right"] >= 0.80 * len(asked)
    assert counts["lost"] <= 0.03 * len(asked)


def test_questions_of_the_example_model_have_the_class_of_their_kind() -> None:
    rng, counts = random.Random(23), Counter[str]()
    for _ in range(200):
        scene = scenes.make_scene(rng, 168, 168)
        for kind, turns in shapes_questions.questions(scene, rng, 4):
            if kind in KINDS:
                found = class_of(turns[0][0])
                assert found in (*KINDS[kind].split(), "unsure"), turns[0][0]
                counts[found] += 1
    assert counts.keys() == {*QuestionClass}
    assert counts["unsure"] < 0.1 * counts.total()


KINDS = {
    **dict.fromkeys(("color", "exist", "shape", "background", "text_color"), "attribute locate"),
    **dict.fromkeys(("where", "rel_yesno", "rel_what", "extreme"), "attribute locate"),
    **dict.fromkeys(("ocr", "ocr_line", "char_count"), "read"),
    **dict.fromkeys(("count_all", "count_color", "count_shape"), "count"),
    **dict.fromkeys(("cell", "grid_size"), "cell"),
    **dict.fromkeys(("bar_extreme", "bar_value", "bar_count"), "chart"),
    "caption": "scene",
}
"""Class by kind of question; one of two where all tiers treat them alike."""


def test_no_question_of_the_held_out_lists_is_trained_on() -> None:
    trained = {tuple(question_class.words(one.text)) for one in read("wordings.txt")}
    asked = [one.text for name in HELD_OUT for one in read(name)]
    assert len(set(asked)) == len(asked)
    assert [text for text in asked if tuple(question_class.words(text)) in trained] == []


@pytest.mark.full
@pytest.mark.timeout(900)
def test_left_out_wordings_are_classified() -> None:
    found = evaluate.accuracy(list(evaluate.left_out(read("wordings.txt"), folds=6)))
    assert found.right >= 0.90
    assert found.right_where_sure >= 0.95


def test_each_slot_of_the_wordings_has_words() -> None:
    used = {name for one in read("wordings.txt") for name in SLOT.findall(one.text)}
    assert used <= slots().keys()


@pytest.mark.parametrize("method", ["Learned", "Words"])
def test_other_languages_are_unsure(method: Method) -> None:
    texts = [one.text for one in read("heldout.txt") if one.question_class is UNSURE]
    foreign = [text for text in texts if question_class.words(text)[0] not in ENGLISH]
    assert len(foreign) > 25
    assert {class_of(text, method=method) for text in foreign} == {"unsure"}


ENGLISH = {"hello", "thanks", "ok"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("What color is the star?", "attribute"),
        ("Is the red star left of the blue ring?", "locate"),
        ("Read the text.", "read"),
        ("How many cars are there?", "count"),
        ("What is in row 2, column 3?", "cell"),
        ("Which bar is the tallest?", "chart"),
        ("How many bars are there?", "chart"),
        ("Describe the image.", "scene"),
        ("HOW MANY CARS ARE THERE? Answer with a number.", "count"),
        ("What color is the car? How many people are there?", "unsure"),
        ("", "unsure"),
        ("\ud800\udfff", "unsure"),
    ],
)
def test_examples(text: str, expected: str) -> None:
    assert class_of(text) == expected


@pytest.mark.parametrize(
    ("text", "expected", "why"),
    [
        ("Read the text.", "read", Why.CLASSIFIED),
        ("How many cars are there?", "count", Why.CLASSIFIED),
        ("Where is the car?", "locate", Why.CLASSIFIED),
        ("What is the bread made of?", "attribute", Why.CLASSIFIED),
        ("Describe every detail.", "unsure", Why.UNCERTAIN),
        ("Read the small text.", "unsure", Why.UNCERTAIN),
        ("Wie viele Autos siehst du?", "unsure", Why.UNKNOWN_WORDS),
        (" ", "unsure", Why.NO_TEXT),
    ],
)
def test_word_lists(text: str, expected: str, why: Why) -> None:
    found = classify([text], method="Words")
    assert (found.question_class, found.why) == (expected, why)


@pytest.mark.parametrize("method", ["Learned", "Words"])
def test_requests_that_take_long_are_unsure(method: Method) -> None:
    many = classify(["Read the text."] * (MAX_TURNS + 1), method=method)
    long = classify(["Read the text. " * 1_000] * 3, method=method)
    assert many == long == Classified(UNSURE, 0.0, Why.TOO_LONG)
    assert classify([], method=method) == Classified(UNSURE, 0.0, Why.NO_TEXT)
