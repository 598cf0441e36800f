"""What shapes is trained and measured on: styles and conversations."""

import hashlib
import random

import numpy as np
from shapes_vlm import batches, build, drawing, heldout, questions, scenes, style

QUESTIONS = "41f21f98b15a1b74c601049cf8f4a228c989dbab6d72c433c05296d8ffa222d4"
"""SHA-256 of plain held-out questions and their pixels: recorded accuracies belong to them."""


def test_plain_questions_never_change():
    digest = hashlib.sha256()
    for task in heldout.TASKS:
        for item in heldout.build(task, 12):
            for image in item.images:
                digest.update(image.tobytes())
            digest.update(repr(item.turns).encode())
    assert digest.hexdigest() == QUESTIONS


def test_held_out_styles_are_never_trained():
    rng = random.Random(0)
    fonts = style.held_out_fonts()
    mix = style.Trained(("trained.ttf",), share_plain=0.2)
    trained, held_out = ([draw(rng) for _ in range(500)] for draw in (mix.draw, style.held_out))
    assert {one.palette for one in held_out}.isdisjoint(one.palette for one in trained)
    assert {one.font for one in held_out} == set(fonts)
    assert {one.font for one in trained} == {"", "trained.ttf"}
    assert 50 < sum(one == style.PLAIN for one in trained) < 150
    assert style.Trained().draw(rng) == style.PLAIN


def test_a_style_changes_the_pixels_and_not_the_answers():
    for kind in scenes.SCENES:
        plain, styled = (
            scenes.make_scene(random.Random(3), 168, 168, kind, look)
            for look in (style.PLAIN, style.Style(palette="tab10", samples=4, outline=1, line=1))
        )
        asked = [questions.questions(one, random.Random(4), 5) for one in (plain, styled)]
        if kind != "text":  # another style has longer words
            assert asked[0] == asked[1]
        pixels = [drawing.render(one, random.Random(5)) for one in (plain, styled)]
        assert (pixels[0] != pixels[1]).any()


def test_fonts_without_all_characters_are_left_out():
    found = style.fonts_in(style.held_out_folder(), drawing.CHARS)
    assert set(style.held_out_fonts()) <= set(found)
    assert not any(path.endswith("STIXSizOneSymReg.ttf") for path in found)


def test_a_conversation_has_its_earlier_turns_about_one_picture():
    for number in range(heldout.MAX_EARLIER + 1):
        for item in heldout.conversation("color", 3, number):
            assert len(item.turns) == number + 1
            assert len({question for question, _ in item.turns}) == number + 1
            assert len(item.images) == 1


def test_a_trained_conversation_is_one_branch_whose_answers_all_count():
    prompts = batches.Prompts(build.make_tokenizer())
    mix = batches.Mix(share_conversations=1.0)
    batch = batches.draw(prompts, random.Random(1), 0.5, 1152, mix)
    rows = batch.questions
    assert rows is not None
    assert set(np.unique(rows.branches)) <= {batches.PADDING_BRANCH, 0}
    ends = (rows.labels == prompts.end).sum(axis=1)
    assert ends.max() > 1
    assert ends.max() <= batches.MAX_TURNS
    assert ((rows.labels != batches.NO_LOSS) == (rows.weights > 0)).all()
