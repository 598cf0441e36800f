"""GPU kernels against the limits of the GPU that they run on, in one command.

    python bench/gpu/run.py                    all cases but tune; goals G1 to G6
    python bench/gpu/run.py decode rows        some
    python bench/gpu/run.py tune               try tile sizes, and write the winners to configs.json
    python bench/gpu/run.py --smoke            tiny shapes under Triton's interpreter, without a GPU

It needs numpy, torch for CUDA with its triton, and gcc or clang; nothing of this project has to be
installed. JSON lines, the machine and its limits first, what became of each goal last, as they are
found: to bench/results/gpu.jsonl, of some cases to a file that names them beside it, of a smoke run
to the output alone, since its times say nothing. What fails is a line with its error, and the
others go on.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import itertools
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

PACKAGES = [str(Path(__file__).parents[2] / name) for name in ("kernels", "worker")]
RESULTS = Path(__file__).parents[1] / "results" / "gpu.jsonl"

Cases = Callable[[Any], Iterator[Callable[[], dict[str, Any]]]]
"""Of a `timing.Bench`."""


def main() -> int:
    """Run the cases named, or all but tune; returns 1 where one failed, or something is missing."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    if args.smoke:
        os.environ["TRITON_INTERPRET"] = "1"  # noqa: TID251  before triton is imported
    sys.path[:0] = PACKAGES
    missing = _missing(is_smoke=args.smoke)
    if missing is not None:
        print(missing, file=sys.stderr)
        return 1
    import torch
    from timing import Bench

    cases = _cases()
    unknown = sorted(set(args.cases) - set(cases))
    if unknown:
        parser.error(f"unknown case {', '.join(unknown)}; there are {', '.join(cases)}")
    chosen = args.cases or [name for name in cases if args.smoke or name != "tune"]
    if args.smoke:
        _interpret()
    torch.manual_seed(0)
    lines: list[dict[str, Any]] = []
    results = Path(os.devnull) if args.smoke else results_of(args.cases)
    with torch.inference_mode(), results.open("w") as file:

        def say(line: dict[str, Any]) -> None:
            for out in (sys.stdout, file):
                print(json.dumps(line), file=out, flush=True)
            lines.append(line)

        bench = Bench.probed(rounds=1 if args.smoke else args.rounds, is_smoke=args.smoke)
        for line in _machine(bench):
            say(line)
        for name in chosen:
            for line in measured(name, cases[name], bench):
                say(line)
        say({"reached": reached(lines)})
    return int(any("error" in line for line in lines))


def results_of(named: Sequence[str]) -> Path:
    """Where lines go: those of all cases together, never over those of some."""
    return RESULTS.with_stem("-".join((RESULTS.stem, *named)))


def measured(name: str, cases: Cases, bench: Any) -> Iterator[dict[str, Any]]:
    """A line of each case of one module; of one that fails, its error."""
    found = cases(bench)
    for number in itertools.count():
        try:
            case = next(found, None)
            if case is None:
                return
            line = case()
        except Exception as error:  # noqa: BLE001  a compiler or a device may raise anything
            line = {"case": f"{name}, number {number}", "error": repr(error)[:500]}
        yield line


def reached(lines: Iterable[Mapping[str, Any]]) -> dict[str, bool]:
    """Each goal that a line is about: whether all of them reach it."""
    goals: dict[str, bool] = {}
    for line in lines:
        for name, holds in line.get("goals", {}).items():
            goals[name] = goals.get(name, True) and holds
    return dict(sorted(goals.items()))


def _missing(*, is_smoke: bool) -> str | None:
    """What is not here, and what to do."""
    for name in ("numpy", "torch", "triton"):
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed; requirements/dev.txt has its version"
    import torch

    if is_smoke:
        return None
    if not torch.cuda.is_available():
        return "torch finds no GPU; --smoke runs tiny shapes without one"
    from vlm_kernels import gpu

    if not gpu.serves(torch.device("cuda")):
        return "triton cannot build its launchers: install gcc or clang, or name one in CC"
    return None


def _cases() -> dict[str, Cases]:
    import decode
    import encoder
    import moves
    import prefill
    import rows
    import step
    import tune
    import weights

    modules = (decode, prefill, rows, weights, moves, step, encoder, tune)
    return {module.__name__: module.cases for module in modules}


def _machine(bench: Any) -> Iterator[dict[str, Any]]:
    import torch
    import triton

    name = torch.cuda.get_device_name() if bench.device.type == "cuda" else "interpreter"
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    yield {"machine": platform.machine(), "device": name, **versions}
    yield {"limits": {key: round(value) for key, value in dataclasses.asdict(bench.limits).items()}}


def _interpret() -> None:
    from vlm_kernels import gpu

    gpu.serves = lambda _device: True


if __name__ == "__main__":
    sys.exit(main())
