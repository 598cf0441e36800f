"""GPU kernels against the limits of the GPU that they run on, in one command.

    python bench/gpu/run.py                    all cases, about 10 minutes; goals G1 to G6
    python bench/gpu/run.py decode rows        some
    python bench/gpu/run.py tune               try tile sizes, and write the winners to configs.json
    python bench/gpu/run.py --smoke            tiny shapes under Triton's interpreter, without a GPU

JSON lines, the machine and its limits first, to bench/results/gpu.jsonl; of a smoke run to the
output alone, since its times say nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results" / "gpu.jsonl"


def main() -> int:
    """Run the cases named, or all but tune; returns 1 where there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    if args.smoke:
        os.environ["TRITON_INTERPRET"] = "1"  # noqa: TID251  before triton is imported
    import torch
    from timing import Bench

    if not args.smoke and not torch.cuda.is_available():
        print("no GPU here; --smoke runs tiny shapes without one", file=sys.stderr)
        return 1
    cases = _cases()
    unknown = sorted(set(args.cases) - set(cases))
    if unknown:
        parser.error(f"unknown case {', '.join(unknown)}; there are {', '.join(cases)}")
    chosen = args.cases or [name for name in cases if args.smoke or name != "tune"]
    if args.smoke:
        _interpret()
    torch.manual_seed(0)
    lines = []
    with torch.inference_mode():
        bench = Bench.probed(rounds=1 if args.smoke else args.rounds, is_smoke=args.smoke)
        for line in _lines(bench, [cases[name] for name in chosen]):
            print(json.dumps(line), flush=True)
            lines.append(json.dumps(line))
    if not args.smoke:
        RESULTS.write_text("\n".join(lines) + "\n")
    return 0


def _cases() -> dict[str, Callable[[Any], Iterator[dict[str, Any]]]]:
    import decode
    import prefill
    import rows
    import step
    import tune

    modules = (decode, prefill, rows, step, tune)
    return {module.__name__: module.cases for module in modules}


def _lines(
    bench: Any, cases: list[Callable[[Any], Iterator[dict[str, Any]]]]
) -> Iterator[dict[str, Any]]:
    import torch
    import triton

    name = torch.cuda.get_device_name() if bench.device.type == "cuda" else "interpreter"
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    yield {"machine": platform.machine(), "device": name, **versions}
    yield {"limits": {key: round(value) for key, value in dataclasses.asdict(bench.limits).items()}}
    for case in cases:
        yield from case(bench)


def _interpret() -> None:
    from vlm_kernels import gpu

    gpu.serves = lambda _device: True


if __name__ == "__main__":
    sys.exit(main())
