"""Engines against each other: the same texts, images and lengths, in turn, round by round.

    make bench-peers                               all that can be set up here
    make bench-peers ARGS="openvino --rounds 5"    ours and these
    make bench-peers ARGS="openvino --install-only"    set these up, and measure nothing
    make bench-peers ARGS="--sweep"                try each peer's settings, keep the best for later
    make bench-peers ARGS="--machine=amx"          of another machine than the rest

One engine answers while the others rest: each call waits until what answered before it has stopped
polling for more (`rest`). Printed are medians over the rounds, and how far ours is ahead of each;
JSON lines go to `bench/results/peers.jsonl`, or to the other machine's file.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import calls  # noqa: E402
import environments  # noqa: E402
import rest  # noqa: E402
import table  # noqa: E402
import tables  # noqa: E402
from goals import OURS, PEERS  # noqa: E402
from sides import read_bandwidth, seconds_of_others  # noqa: E402

RESULTS = table.RESULTS / "peers.jsonl"
Seconds = dict[str, dict[str, list[float]]]
Options = Mapping[str, int]
SWEEP = "peers-sweep"
JUDGED_BY = "trace_s"
"""One setting serves all columns, as one deployment would: that of the fastest mixed trace."""


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """What the counted rounds gave so far.

    Attributes:
        seconds: of each case, by engine.
        after: processor seconds that an engine computed after an answer, all cases of all rounds.
        bandwidths: of reading, bytes a second, one a round.
    """

    seconds: Seconds
    after: dict[str, list[float]]
    bandwidths: list[float] = dataclasses.field(default_factory=list)


class Process:
    """One engine, loaded, in a session of its own."""

    def __init__(self, name: str, log: Path, options: Options) -> None:
        engine = environments.ENGINES[name]
        ready = environments.prepare(engine)
        told, out = os.pipe()
        command = [
            "env", "HF_HUB_OFFLINE=1", str(ready.python), str(HERE / engine.script),
            str(ready.model_dir), str(out), json.dumps(options),
        ]  # fmt: skip
        with log.open("w") as log_file:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log_file, stderr=log_file, text=True,
                pass_fds=(out,), start_new_session=True,
            )  # fmt: skip
        self.session = self._process.pid
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
    parser.add_argument("--sweep", action="store_true", help="find each peer's best settings")
    parser.add_argument("--machine", help="of another machine: kept with what it measured")
    args = parser.parse_args()
    names = list(dict.fromkeys((OURS, *(args.peers or environments.ENGINES))))
    if args.install_only:
        return _install(names)
    file = table.file_of(args.machine) if args.machine else RESULTS
    if args.sweep:
        return _sweep([name for name in names if name != OURS], file, args.rounds)
    options = {name: best_options(name, table.read(file)) for name in names}
    began, others = time.perf_counter(), seconds_of_others()
    with tempfile.TemporaryDirectory(prefix="triptych-peers-") as folder:
        processes = _start(options, Path(folder))
        if OURS not in processes:
            return 1
        for measured in _rounds(processes, args.rounds, Path(folder)):
            if OURS not in measured.seconds:
                return 1  # nothing to compare the others with: what is recorded stays
            table.replace(file, PEERS, _lines(measured, options))
        for process in processes.values():
            process.close()
    took = time.perf_counter() - began
    share = (seconds_of_others() - others) / (took * (os.cpu_count() or 1))
    line = {"bench": "peers.took", "seconds": round(took), "by_others": round(share, 2)}
    table.write(file, [*table.read(file), line])
    lines = table.elsewhere()[args.machine] if args.machine else table.recorded()
    print(tables.render("peers", lines), tables.render("goals", lines), sep="\n\n")
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


def _sweep(names: Sequence[str], file: Path, rounds: int) -> int:
    """Try all settings of each peer, one process at a time; keep what each took."""
    for name in names:
        lines = []
        for options in environments.ENGINES[name].choices():
            with tempfile.TemporaryDirectory(prefix="triptych-peers-") as folder:
                processes = _start({name: options}, Path(folder))
                found = [*_rounds(processes, rounds, Path(folder))]
                for process in processes.values():
                    process.close()
            if found and name in found[-1].seconds:
                line = {"bench": SWEEP, "engine": name, "options": options, "rounds": rounds}
                lines.append({**line, **figures_of(found[-1].seconds[name])})
                print(json.dumps(lines[-1]), flush=True)
        kept = [
            line
            for line in table.read(file)
            if (line["bench"], line.get("engine")) != (SWEEP, name)
        ]
        table.write(file, [*kept, *lines])
    return 0


def best_options(name: str, lines: Sequence[table.Line]) -> dict[str, int]:
    """The settings of the fastest mixed trace of a recorded sweep, else the defaults."""
    engine = environments.ENGINES[name]
    swept = [
        line
        for line in lines
        if line["bench"] == SWEEP and line["engine"] == name and line["options"] in engine.choices()
    ]
    if not swept:
        return engine.defaults
    return dict(min(swept, key=lambda line: line[JUDGED_BY])["options"])


def _lines(measured: Measured, options: Mapping[str, Options]) -> list[table.Line]:
    """Each engine's figures of the rounds so far."""
    bandwidths = [round(value / 1e9, 1) for value in measured.bandwidths]
    return [
        {
            "bench": PEERS,
            "engine": name,
            "settings": environments.ENGINES[name].settings,
            "options": dict(options[name]),
            "rounds": len(bandwidths),
            "read_gb_per_second": bandwidths,
            **figures_of(of_cases),
            "after_answer_s": round(statistics.median(measured.after[name]), 3),
            "seconds": {key: [round(each, 3) for each in kept] for key, kept in of_cases.items()},
        }
        for name, of_cases in measured.seconds.items()
    ]


def _start(options: Mapping[str, Options], folder: Path) -> dict[str, Process]:
    found = {}
    for name, chosen in options.items():
        try:
            found[name] = Process(name, folder / f"{name}.log", chosen)
        except environments.UnavailableError as error:
            print(f"{name}: left out: {error}", flush=True)
    return found


def _rounds(processes: dict[str, Process], rounds: int, folder: Path) -> Iterator[Measured]:
    """Interleaved rounds, the first uncounted; an engine that fails is left out from there on.

    Yields, after each counted one, what all of them gave so far.
    """
    measured = Measured({name: {} for name in processes}, {name: [] for name in processes})
    computed = functools.partial(
        rest.processor_seconds, [process.session for process in processes.values()]
    )
    for number in range(rounds + 1):
        rest.await_rest(computed)
        if number:
            measured.bandwidths.append(read_bandwidth(os.cpu_count() or 1))
        for case in calls.cases(number, folder):
            names = list(measured.seconds)
            for name in names if number % 2 == 0 else reversed(names):
                try:
                    took = processes[name].run(case)
                except environments.UnavailableError as error:
                    print(f"{name}: left out: {error}", flush=True)
                    del measured.seconds[name]
                    continue
                after = rest.await_rest(computed)
                told = f"round {number}: {case.name} {name} {took:.3f} s, {after:.3f} s after it"
                print(told, file=sys.stderr, flush=True)
                if number:
                    measured.seconds[name].setdefault(case.name, []).append(took)
                    measured.after[name].append(after)
        if number:
            yield measured


def figures_of(of_cases: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """One engine's seconds to the first token and of the trace, and tokens a second; medians."""
    rounds = {
        "ttft_image_s": of_cases["ttft.image"],
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
