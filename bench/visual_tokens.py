"""Accuracy of `shapes` with fewer or cheaper visual tokens, by kind of question.

    make bench ARGS=visual_tokens                      every lever, about two minutes
    python bench/visual_tokens.py --lever=zip          one lever, beside `off` and the baseline
    python bench/visual_tokens.py --lever=prune        KV of text (`visual_pruning`), alone
    python bench/visual_tokens.py --questions 1000 --record         results/visual_tokens.jsonl

Each lever answers the same held-out questions (`visual_questions`) by teacher forcing (`teacher`),
and is compared with `off` question by question (`paired`). Downsampling the image ("pixels") is the
baseline: a lever is of use where it loses less than that at equally many visual tokens.

One JSON line per setting on stdout; tables on stderr.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

import table
import visual_levers
import visual_pruning
import visual_report
from paired import Paired
from teacher import greedy_tokens
from visual_levers import LEVERS, OFF, UNRECORDED, Setting, Worker
from visual_questions import GROUPS, KINDS, SEED, draw, num_of_kind, pooled

TOGETHER: Final = 32
"""Questions of a step."""
PRUNE: Final = "prune"
RECORD: Final = table.RESULTS / "visual_tokens.jsonl"


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """One answer.

    Attributes:
        tokens: greedy, at each place of the right answer.
        right: whether they are the right answer.
        num_visual: visual tokens in the prompt.
    """

    tokens: tuple[int, ...]
    right: bool
    num_visual: int


Answers = Mapping[str, Sequence[Answer]]
"""By kind, in the order of the questions."""


def main(argv: Sequence[str] | None = None) -> None:
    """Ask, and print a JSON line per setting and a table per lever."""
    args = arguments(argv)
    if args.lever == [PRUNE]:
        visual_pruning.main(questions=args.questions, seed=args.seed, threads=args.threads)
        return
    settings = visual_levers.chosen(args.lever)
    answers: dict[Setting, dict[str, list[Answer]]] = {setting: {} for setting in settings}
    worker = Worker(threads=args.threads)
    for kind in KINDS:
        count = num_of_kind(kind, args.questions)
        for setting, given in ask(worker, settings, kind, count, seed=args.seed).items():
            answers[setting][kind] = given
        print(f"{kind}: {count} questions", file=sys.stderr, flush=True)
    asked = {"bench": "visual_tokens", "seed": args.seed, "per_group": args.questions}
    lines = [
        {**asked, **figures(setting, given, answers[OFF], questions=args.questions)}
        for setting, given in answers.items()
    ]
    for line in lines:
        print(json.dumps(line), flush=True)
    for lever in dict.fromkeys(setting.lever for setting in settings):
        cells = visual_report.of_lever(lines, lever)
        print(f"\n{lever}\n\n{table.markdown(cells)}", file=sys.stderr)
    modality = [setting for setting in settings if setting.lever == "modality"]
    if modality:
        seen = worker.see([one for kind in KINDS for one in draw(kind, 4, seed=args.seed)])
        for setting in (Setting("modality", "auto"), *modality):
            num_bytes = worker.kv_bytes(setting, seen)
            line = {"lever": "modality", "value": setting.value, "kv_bytes_per_request": num_bytes}
            print(json.dumps(line), flush=True)
    if "arrcoc" in {setting.lever for setting in settings}:
        took = visual_levers.texture_milliseconds(448)
        print(f"\nrelevance and groups of 448 x 448 pixels: {took:.1f} ms", file=sys.stderr)
    if args.record:
        table.write(RECORD, recorded(table.read(RECORD), lines))


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--lever",
        action="append",
        default=[],
        choices=tuple(dict.fromkeys((*LEVERS, *UNRECORDED, PRUNE))),
        help="beside off and pixels; may be repeated; default: all; prune: alone (visual_pruning)",
    )
    parser.add_argument("--questions", type=_positive, default=100, help="of each group")
    parser.add_argument("--seed", type=int, default=SEED, help="of the questions")
    parser.add_argument("--threads", type=_positive, default=1)
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name}")
    args = parser.parse_args(argv)
    if PRUNE in args.lever and args.lever != [PRUNE]:
        parser.error(f"--lever={PRUNE}: it asks other questions, so it goes alone")
    if args.record and (without := sorted(set(args.lever) - set(LEVERS))):
        parser.error(f"--record: {', '.join(without)} has no place in {RECORD.name}")
    return args


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return number


def recorded(earlier: Sequence[table.Line], lines: Sequence[table.Line]) -> list[table.Line]:
    """The lines to record, in the order of `LEVERS`: these, and earlier ones of other settings.

    Earlier lines stay only if they are of the same seed: more questions begin with fewer ones. So
    those of `ALWAYS` also stay if they answered more questions than the new ones.
    """
    seeds = {line["seed"] for line in lines}
    found: dict[tuple[str, str], table.Line] = {}
    for line in (*(one for one in earlier if one["seed"] in seeds), *lines):
        name = line["lever"], line["value"]
        asked_more = found.get(name, line)["per_group"] > line["per_group"]
        if not (line["lever"] in visual_levers.ALWAYS and asked_more):
            found[name] = line
    order = [(one.lever, one.value) for settings in LEVERS.values() for one in settings]
    return [found[name] for name in order if name in found]


def ask(
    worker: Worker, settings: Sequence[Setting], kind: str, count: int, *, seed: int
) -> dict[Setting, list[Answer]]:
    """The answers of every setting to the questions of one kind."""
    questions = draw(kind, count, seed=seed)
    answers: dict[Setting, list[Answer]] = {setting: [] for setting in settings}
    for first in range(0, count, TOGETHER):
        seen = worker.see(questions[first : first + TOGETHER])
        for setting in settings:
            sequences = worker.sequences(setting, seen)
            given = greedy_tokens(worker.decoder(setting), sequences)
            answers[setting] += [
                Answer(tokens, tokens == one.question.answer, len(sequence.rows))
                for one, sequence, tokens in zip(seen, sequences, given, strict=True)
            ]
    return answers


def figures(setting: Setting, given: Answers, off: Answers, *, questions: int) -> dict[str, Any]:
    """The figures of one setting against `off`: each kind, and groups of `questions`."""
    groups = {
        group: compared(pooled(given, group, questions), pooled(off, group, questions))
        for group in GROUPS
    }
    kinds = {kind: compared(answers, off[kind]) for kind, answers in given.items()}
    return {"lever": setting.lever, "value": setting.value, "groups": groups, "kinds": kinds}


def compared(here: Sequence[Answer], off: Sequence[Answer]) -> dict[str, float]:
    """Shares and bounds in percent, and differences to `off` in points.

    `changed` is the percentage of answers with another token than `off`'s, right or wrong.
    """
    pairs = Paired.of([one.right for one in here], [one.right for one in off])
    changed = sum(a.tokens != b.tokens for a, b in zip(here, off, strict=True))
    low, high = pairs.share_interval
    less, more = pairs.difference_interval
    percentages = {
        "right": pairs.share,
        "right_low": low,
        "right_high": high,
        "points": pairs.difference,
        "points_low": less,
        "points_high": more,
        "changed": changed / pairs.questions,
    }
    return {
        "questions": pairs.questions,
        "tokens": round(sum(one.num_visual for one in here) / pairs.questions, 1),
        **{name: round(100 * value, 2) for name, value in percentages.items()},
        "lost": pairs.lost,
        "won": pairs.won,
    }


if __name__ == "__main__":
    main()
