"""`python -m question_class` in tools/ trains the classifier and prints its accuracy.

--write       write the weights that the worker ships
--folds N     also leave wordings out: N trainings, each without 1/N of them (0: none)
--errors      print each question that is classified wrongly
"""

from __future__ import annotations

import argparse
from pathlib import Path

from question_class.evaluate import held_out, left_out, report, served
from question_class.train import train
from question_class.wordings import read
from vlm_worker.gateway import question_class

FILE = Path(question_class.__file__).with_suffix(".bin")


def main() -> None:
    """Train, print, and write if asked."""
    parser = argparse.ArgumentParser(prog="PYTHONPATH=tools:worker python -m question_class")
    parser.add_argument("--write", action="store_true", help=f"write {FILE.name}")
    parser.add_argument("--folds", type=int, default=0, help="trainings that leave wordings out")
    parser.add_argument("--errors", action="store_true", help="print wrongly classified questions")
    arguments = parser.parse_args()
    wordings = read("wordings.txt")
    weights = train(wordings)
    data = weights.to_bytes()
    if arguments.write:
        FILE.write_bytes(data)
    state = "is" if FILE.exists() and FILE.read_bytes() == data else "is not"
    print(
        f"{len(wordings)} wordings, {len(data)} bytes; {FILE.name} {state} this training's output"
    )
    for name in ("heldout.txt", "heldout_2.txt"):
        for line in report(name, held_out(weights, read(name)), errors=arguments.errors):
            print(line)
        print(f"  shipped   {dict(sorted(served(read(name)).items()))}")
    if arguments.folds:
        outcomes = list(left_out(wordings, folds=arguments.folds))
        for line in report("left out", outcomes, errors=arguments.errors):
            print(line)


if __name__ == "__main__":
    main()
