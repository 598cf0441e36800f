"""Engines against each other: the same texts, pictures and lengths, in turn, round by round.

    make bench-peers                               all that can be set up here
    make bench-peers ARGS="openvino --rounds 5"    ours and these
    make bench-peers ARGS="openvino --install-only"    set these up, and measure nothing
    make bench-peers ARGS="--machine=amx"          of another machine than the rest

One engine answers while the others rest. Printed are medians over the rounds, and how far ours is
ahead of each; JSON lines go to `bench/results/peers.jsonl`, or to the other machine's file.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import calls  # noqa: E402
import environments  # noqa: E402
import table  # noqa: E402
import tables  # noqa: E402
from goals import OURS  # noqa: E402
from sides import read_bandwidth  # noqa: E402

RESULTS = table.RESULTS / "peers.jsonl"
Seconds = dict[str, dict[str, list[float]]]


class Process:
    """One engine, loaded."""

    def __init__(self, name: str, log: Path) -> None:
        engine = environments.ENGINES[name]
        ready = environments.prepare(engine)
        told, out = os.pipe()
        command = [
            "env", "HF_HUB_OFFLINE=1", str(ready.python), str(HERE / engine.script),
            str(ready.model_dir), str(out),
        ]  # fmt: skip
        with log.open("w") as log_file:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log_file, stderr=log_file, text=True,
                pass_fds=(out,),
            )  # fmt: skip
        os.close(out)
        self._told, self._log = os.fdopen(told), log
        self._read()

    def run(self, case: calls.Case) -> float:
        """Seconds that its requests took together.

        Raises:
            UnavailableError: the engine ended, or answered too little.
        """
        assert self._process.stdin is not None
        asked = [dataclasses.asdict(call) for call in case.calls]
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        reply = self._read()
        wanted = sum(call.num_output for call in case.calls)
        if reply["tokens"] != wanted:
            raise environments.UnavailableError(
                f"{case.name}: {reply['tokens']} tokens instead of {wanted}"
            )
        return reply["seconds"]

    def close(self) -> None:
        """End it and wait."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=120)

    def _read(self) -> dict[str, float]:
        line = self._told.readline()
        if not line:
            self._process.wait()
            last = " | ".join(self._log.read_text().strip().splitlines()[-3:])
            raise environments.UnavailableError(f"it ended: {last}")
        return dict(json.loads(line))


def main() -> int:
    """Compare, print the table, keep the lines; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("peers", nargs="*", choices=[*environments.ENGINES], metavar="PEER")
    parser.add_argument("--rounds", type=int, default=3, help="counted rounds")
    parser.add_argument("--install-only", action="store_true", help="set up, and measure nothing")
    parser.add_argument("--machine", help="of another machine: kept with what it measured")
    args = parser.parse_args()
    names = list(dict.fromkeys((OURS, *(args.peers or environments.ENGINES))))
    if args.install_only:
        return _install(names)
    file = table.file_of(args.machine) if args.machine else RESULTS
    with tempfile.TemporaryDirectory(prefix="triptych-peers-") as folder:
        processes = _start(names, Path(folder))
        if OURS not in processes:
            return 1
        for seconds, bandwidths in _rounds(processes, args.rounds, Path(folder)):
            table.replace(file, "peers", _lines(seconds, bandwidths))
        for process in processes.values():
            process.close()
    lines = table.elsewhere()[args.machine] if args.machine else table.recorded()
    print(tables.said("peers", lines), tables.said("goals", lines), sep="\n\n")
    return 0


def _install(names: Sequence[str]) -> int:
    """Set every engine up; returns the exit status: 1 where one cannot be."""
    status = 0
    for name in names:
        try:
            environments.prepare(environments.ENGINES[name])
        except environments.UnavailableError as error:
            print(f"{name}: cannot be set up: {error}", flush=True)
            status = 1
        else:
            print(f"{name}: set up", flush=True)
    return status


def _lines(seconds: Seconds, bandwidths: Sequence[float]) -> list[table.Line]:
    """Each engine's figures of the rounds so far."""
    return [
        {
            "bench": "peers",
            "engine": name,
            "settings": environments.ENGINES[name].settings,
            "rounds": len(bandwidths),
            "read_gb_per_second": [round(value / 1e9, 1) for value in bandwidths],
            **figures_of(of_cases),
            "seconds": {key: [round(each, 3) for each in kept] for key, kept in of_cases.items()},
        }
        for name, of_cases in seconds.items()
    ]


def _start(names: Sequence[str], folder: Path) -> dict[str, Process]:
    found = {}
    for name in names:
        try:
            found[name] = Process(name, folder / f"{name}.log")
        except environments.UnavailableError as error:
            print(f"{name}: left out: {error}", flush=True)
    return found


def _rounds(
    processes: dict[str, Process], rounds: int, folder: Path
) -> Iterator[tuple[Seconds, list[float]]]:
    """Interleaved rounds, the first uncounted; an engine that fails is left out from there on.

    Yields, after each counted one, the seconds and the bandwidths of all so far.
    """
    seconds: Seconds = {name: {} for name in processes}
    bandwidths = []
    for number in range(rounds + 1):
        if number:
            bandwidths.append(read_bandwidth(os.cpu_count() or 1))
        for case in calls.cases(number, folder):
            order = list(seconds) if number % 2 == 0 else list(reversed(seconds))
            for name in order:
                try:
                    took = processes[name].run(case)
                except environments.UnavailableError as error:
                    print(f"{name}: left out: {error}", flush=True)
                    del seconds[name]
                    continue
                print(
                    f"round {number}: {case.name} {name} {took:.3f} s", file=sys.stderr, flush=True
                )
                if number:
                    seconds[name].setdefault(case.name, []).append(took)
        if number:
            yield seconds, bandwidths


def figures_of(of_cases: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """One engine's seconds to the first token and of the trace, and tokens a second; medians."""
    rounds = {
        "ttft_picture_s": of_cases["ttft.picture"],
        "ttft_text_s": of_cases["ttft.text"],
        "prefill_s": of_cases["prefill"],
        "trace_s": of_cases["trace"],
    }
    for batch in calls.BATCHES:
        first, whole = (of_cases[f"decode{batch}.{n}"] for n in (1, 1 + calls.NUM_DECODED))
        rounds[f"decode{batch}_tok_s"] = [
            batch * calls.NUM_DECODED / (b - a) for a, b in zip(first, whole, strict=True)
        ]
    return {
        **{name: round(statistics.median(kept), 3) for name, kept in rounds.items()},
        "per_round": {name: [round(one, 3) for one in kept] for name, kept in rounds.items()},
    }


if __name__ == "__main__":
    sys.exit(main())
