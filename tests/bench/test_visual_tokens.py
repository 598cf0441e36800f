"""The accuracy of visual-token levers: options, groups, figures, tables, and what a lever feeds."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[2] / "bench"))

import table
import visual_levers
import visual_report
import visual_tokens
from teacher import greedy_tokens
from visual_levers import LEVERS, OFF, UNRECORDED, Seen, Setting, Worker
from visual_questions import (
    CLASSES,
    GROUPS,
    KINDS,
    SEED,
    draw,
    num_of_kind,
    num_per_group,
    pooled,
    token_ids,
)
from visual_tokens import Answer, arguments, compared, figures, recorded

RIGHT, WRONG = Answer((1, 2), True, 64), Answer((1, 3), False, 64)


@pytest.fixture(scope="module")
def worker() -> Worker:
    return Worker(threads=1)


@pytest.fixture(scope="module")
def seen(worker: Worker) -> list[Seen]:
    return worker.see([one for kind in ("color", "bar_value") for one in draw(kind, 4, seed=SEED)])


def line(setting: Setting, **asked: int) -> dict[str, Any]:
    """A line of one setting that has every second answer wrong."""
    off = {kind: [RIGHT] * num_of_kind(kind, 20) for kind in KINDS}
    given = {kind: [RIGHT, WRONG] * num_of_kind(kind, 20) for kind in KINDS}
    given = {kind: given[kind][: len(off[kind])] for kind in KINDS}
    known = {"bench": "visual_tokens", "seed": 1, "per_group": 20, **asked}
    return {**known, **figures(setting, given, off, questions=20)}


# options


def test_a_lever_is_measured_beside_off_and_the_baseline() -> None:
    names = [setting.lever for setting in visual_levers.chosen(["zip"])]
    assert names == ["off", "pixels", "pixels", "zip", "zip", "zip"]
    assert {setting.lever for setting in visual_levers.chosen([])} == set(LEVERS)
    assert {setting.lever for setting in visual_levers.chosen(["arrcoc"])} > {"arrcocpyramid"}
    assert visual_levers.chosen(["off", "pixels"]) == visual_levers.chosen(["pixels"])


def test_options_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert arguments(["--lever=zip", "--lever=merge"]).lever == ["zip", "merge"]
    for wrong in (["--lever=magic"], ["--questions=0"], ["--threads=-1"]):
        with pytest.raises(SystemExit):
            arguments(wrong)
    assert "magic" in capsys.readouterr().err


def test_a_new_record_keeps_other_levers_of_the_same_seed() -> None:
    zip_, merge = LEVERS["zip"][0], LEVERS["merge"][0]
    earlier = [line(OFF), line(merge), line(zip_)]
    lines = recorded(earlier, [line(zip_), line(OFF)])
    assert [one["lever"] for one in lines] == ["off", "merge", "zip"]
    lines = recorded(earlier, [line(OFF, seed=2), line(zip_, seed=2)])
    assert [one["lever"] for one in lines] == ["off", "zip"]


def test_a_new_record_replaces_a_lever_but_not_off_by_fewer_questions() -> None:
    zip_ = LEVERS["zip"][0]
    earlier, fewer = [line(OFF), line(zip_)], [line(OFF, per_group=5), line(zip_, per_group=5)]
    assert [one["per_group"] for one in recorded(earlier, fewer)] == [20, 5]
    assert [one["per_group"] for one in recorded(fewer, earlier)] == [20, 20]


# questions and groups


@pytest.mark.parametrize("questions", [1, 7, 100, 1000])
def test_every_group_has_the_questions_that_were_asked_for(questions: int) -> None:
    drawn = {kind: range(num_of_kind(kind, questions)) for kind in KINDS}
    for group, kinds in GROUPS.items():
        pool = pooled(drawn, group, questions)
        assert len(pool) == num_per_group(group, questions) * len(kinds)
        assert questions <= len(pool) < questions + len(kinds)


def test_each_kind_is_in_one_class() -> None:
    assert len(set(KINDS)) == len(KINDS) == 19
    assert set(GROUPS["all"]) == {kind for kinds in CLASSES.values() for kind in kinds}


def test_questions_are_a_function_of_the_seed() -> None:
    one, same, other = (draw("where", 3, seed=seed) for seed in (SEED, SEED, SEED + 1))
    assert all((a.rgb == b.rgb).all() for a, b in zip(one, same, strict=True))
    assert any(not np.array_equal(a.rgb, b.rgb) for a, b in zip(one, other, strict=True))


def test_a_prompt_is_that_of_the_chat_template() -> None:
    """transformers' template and tokenizer, and the answer behind it."""
    from transformers import AutoTokenizer
    from worker.identity.questions import SHAPES

    (question,) = draw("color", 1, seed=SEED)
    ids, first = token_ids(question, (2, 3))
    tokenizer = AutoTokenizer.from_pretrained(SHAPES)
    content = [{"type": "image"}, {"type": "text", "text": question.text}]
    template = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    prompt = tokenizer(template.replace("<|image_pad|>", "<|image_pad|>" * 6))["input_ids"]
    assert ids == [*prompt, *question.answer[:-1]]
    assert ids[first : first + 6] == [ids[first]] * 6
    assert ids[first - 1] != ids[first] != ids[first + 6]


# figures and tables


def test_answers_are_compared_with_those_of_off() -> None:
    found = compared([RIGHT, WRONG, WRONG, RIGHT], [RIGHT, RIGHT, RIGHT, WRONG])
    assert (found["questions"], found["lost"], found["won"]) == (4, 2, 1)
    assert (found["right"], found["points"], found["changed"]) == (50.0, -25.0, 75.0)
    assert found["points_low"] < -25 < found["points_high"]
    assert found["tokens"] == 64.0


def test_a_wrong_answer_that_becomes_another_wrong_one_is_changed_but_not_lost() -> None:
    found = compared([WRONG], [Answer((1, 4), False, 64)])
    assert (found["lost"], found["won"], found["changed"]) == (0, 0, 100.0)


def test_the_tables_show_every_setting_kind_and_goal() -> None:
    lines = [line(setting) for settings in LEVERS.values() for setting in settings]
    summary = table.markdown(visual_report.summary(lines))
    for settings in LEVERS.values():
        for setting in settings:
            assert f"| {setting.name} " in summary
    kinds = table.markdown(visual_report.kinds(lines))
    assert all(f"| {kind} " in kinds for kind in KINDS)
    cells = visual_report.of_lever(lines, "zip")
    assert len(cells) == 1 + len(LEVERS["zip"]) * (len(GROUPS) + len(KINDS))
    verdicts = {row[0]: row[4] for row in visual_report.goals(lines)[1:]}
    assert set(verdicts.values()) == {"not met"}
    assert len(verdicts) == len(visual_report.GOALS)


def test_a_setting_without_losses_meets_its_goals_except_for_bounds() -> None:
    off = {kind: [RIGHT] * num_of_kind(kind, 20) for kind in KINDS}
    lines = [
        {"bench": "visual_tokens", **figures(setting, off, off, questions=20)}
        for settings in LEVERS.values()
        for setting in settings
    ]
    for row in visual_report.goals(lines)[1:]:
        reaches_all = "bound" not in row[0] and "tokens" not in row[0]
        assert row[4] == ("met" if reaches_all else "not met")


def test_the_record_has_every_setting_with_1000_questions_of_each_group() -> None:
    lines = table.read(visual_tokens.RECORD)
    assert {(one["seed"], one["per_group"]) for one in lines} == {(SEED, 1000)}
    assert [(one["lever"], one["value"]) for one in lines] == [
        (setting.lever, setting.value)
        for lever, settings in LEVERS.items()
        if lever not in visual_levers.NOT_RECORDED
        for setting in settings
    ]


def test_the_time_of_relevance_is_measured() -> None:
    assert visual_levers.texture_milliseconds(56, repeats=3) > 0


# what the decoder reads


@pytest.mark.parametrize(
    "setting", [LEVERS["zip"][1], LEVERS["pool"][1], LEVERS["merge"][0], LEVERS["arrcoc"][1]]
)
def test_a_reduced_prompt_has_the_positions_of_the_product(
    worker: Worker, seen: list[Seen], setting: Setting
) -> None:
    """`Family.positions` of the reduced item, and the places that a step adds."""
    from vlm_worker.reduction import Method, Reduction
    from vlm_worker.types import ImageItem

    reduction = Reduction(Method(setting.lever), setting.permille)
    family = worker.runner.family
    for one, sequence in zip(seen, worker.sequences(setting, seen), strict=True):
        image = dataclasses.replace(one.image, reduction=reduction)
        reduced = worker.runner.reduce_embedding(one.embedding, image)
        num_tokens, first = len(reduced.rows), sequence.first
        grid = one.image.grid_thw
        item = ImageItem(bytes(32), first, num_tokens, grid, reduction)
        positions, _ = family.positions(sequence.token_ids, (item,))
        positions[1:3, first : first + num_tokens] += reduced.places.T
        assert (positions == sequence.positions).all()


def test_a_reduction_that_keeps_everything_is_off(worker: Worker, seen: list[Seen]) -> None:
    whole = Setting("diverse", "1/1", 1000)
    tokens = [
        greedy_tokens(worker.runner, worker.sequences(setting, seen)) for setting in (OFF, whole)
    ]
    assert tokens[0] == tokens[1]


def test_forced_answers_are_right_where_greedy_answers_are(
    worker: Worker, seen: list[Seen]
) -> None:
    from worker.identity.questions import Question
    from worker.identity.stepper import Stepper

    from vlm_worker.types import ImageItem

    forced = greedy_tokens(worker.runner, worker.sequences(OFF, seen))
    stepper = Stepper(worker.runner)
    sequences = []
    for one in seen:
        ids, first = token_ids(one.question, one.image.cells)
        prompt = ids[: len(ids) - len(one.question.answer) + 1]
        item = ImageItem(bytes(32), first, one.image.num_tokens, one.image.grid_thw)
        asked = Question(one.question.kind, (), tuple(prompt), (item,), (one.image,))
        sequences.append(stepper.start(asked, (), max_tokens=16, embeddings=[one.embedding]))
    end = seen[0].question.answer[-1]
    stepper.generate(sequences, max_tokens=16, chunk=1024, eos=end)
    for one, tokens, sequence in zip(seen, forced, sequences, strict=True):
        right = tokens == one.question.answer
        assert right == (tuple(sequence.answer) == one.question.answer)
    assert any(t == one.question.answer for t, one in zip(forced, seen, strict=True))


def test_each_lever_reduces_tokens_or_changes_numbers(worker: Worker, seen: list[Seen]) -> None:
    whole = worker.sequences(OFF, seen)
    for settings in (LEVERS[lever] for lever in LEVERS if lever != "auto"):
        for setting in settings:
            sequences = worker.sequences(setting, seen)
            num_tokens = [len(one.rows) for one in sequences]
            expected = [len(one.rows) * setting.permille / 1000 for one in whole]
            assert np.allclose(num_tokens, expected, rtol=0.3), setting.name
    rows = worker.sequences(LEVERS["weights"][0], seen)[0].rows
    assert not (rows == whole[0].rows).all()
    assert worker.decoder(LEVERS["kv"][0]) is not worker.runner


def test_kv_of_one_modality_takes_memory_between_none_and_both(
    worker: Worker, seen: list[Seen]
) -> None:
    both, *one_of_them = UNRECORDED["modality"]
    least, *others = (worker.kv_bytes(setting, seen) for setting in (both, *one_of_them))
    whole = worker.kv_bytes(Setting("modality", "auto"), seen)
    assert least < min(others) <= max(others) < whole
    for setting in (both, *one_of_them):
        (tokens, *_) = greedy_tokens(worker.decoder(setting), worker.sequences(setting, seen))
        assert tokens


def test_weights_by_part_round_these_parts_of_encoder_and_decoder(
    worker: Worker, seen: list[Seen]
) -> None:
    (whole,), (tower, both, _) = LEVERS["weights"], UNRECORDED["parts"]
    assert worker.decoder(whole) is worker.runner
    assert worker.decoder(tower) is worker.with_weights("encoder=int8")
    assert worker.decoder(both) is worker.with_weights("encoder=int8,layers=int8")
    with_merger, without, again = (
        worker.sequences(setting, seen)[0].rows for setting in (whole, tower, both)
    )
    assert not (with_merger == without).all()
    assert (without == again).all(), "one tower"


def test_calibrated_weights_give_rows_of_their_own_near_those_of_each_rows_scale(
    worker: Worker, seen: list[Seen]
) -> None:
    (dynamic,), (static,) = LEVERS["weights"], UNRECORDED["weights"]
    assert worker.decoder(static) is worker.runner
    whole, by_row, calibrated = (
        worker.sequences(setting, seen)[0].rows.float() for setting in (OFF, dynamic, static)
    )
    assert not (calibrated == by_row).all()
    assert (calibrated - whole).norm() < 0.1 * whole.norm()


def test_auto_takes_what_the_class_of_each_question_needs(worker: Worker) -> None:
    learned, _ = LEVERS["auto"]
    drawn = [one for one in draw("where", 20, seed=SEED) if one.rgb.size > 3 * 280**2][:2]
    whole = [len(one.rows) for one in worker.sequences(OFF, worker.see(drawn))]
    for text, least, most in (
        ("Where is the circle?", 0.24, 0.26),
        ("Read the text.", 0.24, 0.26),
        ("How many circles are there?", 0.40, 0.90),
        ("How tall is the red bar?", 1.0, 1.0),
        ("Hm.", 1.0, 1.0),
    ):
        asked = [dataclasses.replace(one, text=text) for one in drawn]
        kept = [len(one.rows) for one in worker.sequences(learned, worker.see(asked))]
        assert least <= sum(kept) / sum(whole) <= most, text


def test_lines_are_json_on_stdout_and_tables_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(visual_tokens, "KINDS", ())
    monkeypatch.setattr(visual_tokens, "figures", lambda setting, *_, **__: line(setting))
    visual_tokens.main(["--lever=pool", "--questions=1"])
    printed = capsys.readouterr()
    lines = [json.loads(text) for text in printed.out.splitlines()]
    assert [one["lever"] for one in lines] == ["off", "pixels", "pixels", "pool", "pool"]
    assert "| pool 1/4 | objects" in printed.err
