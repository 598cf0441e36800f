"""Requests and streamed tokens per second of one gateway, and the processor time of each.

    python bench/gateway_speed.py [--rounds 3] [--seconds 5] [--against TREE ...] [--record]

The gateway is the process that pods run. Its worker is a stand-in that answers at once, and its
clients are a process too. All share the cores of this machine, over loopback. Per round and tree:

    requests   chat completions of 4 tokens, not streamed, by 64 clients as fast as answered
    half       the same at half of that rate; the gateway adds nearly all of the latency
    stream     answers of 200 tokens, streamed to 100 clients; each gets a token every 5 ms

`--against` measures the gateways of other checkouts in the same rounds; ratios are those of this
tree to theirs. One JSON line per case. `--record` writes the lines of this tree into results/.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import run
import table
from workers import free_port

HERE = Path(__file__).parent
ROOT = HERE.parent
MODEL = ROOT / "examples" / "shapes" / "model"
START_SECONDS = 60.0
NUM_TOKENS, STREAM_TOKENS = 4, 200
STEP_MS = 5.0
CASES = ("requests", "half", "stream")
GOALS = {"requests": 1_000.0, "stream": 10_000.0}
RECORD = table.RESULTS / "gateway_speed.jsonl"

Figures = dict[str, float]


@contextlib.contextmanager
def process(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A process that is ended on exit."""
    with subprocess.Popen(command, text=True, **options) as running:
        try:
            yield running
        finally:
            running.terminate()


@contextlib.contextmanager
def stand_in(*flags: str) -> Iterator[tuple[int, int]]:
    """The process id and the port of a stand-in worker."""
    command = [sys.executable, str(HERE / "gateway_stand_in.py"), *flags]
    with process(command, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        yield running.pid, json.loads(running.stdout.readline())["port"]


@contextlib.contextmanager
def gateway(tree: Path, worker_port: int) -> Iterator[tuple[int, int]]:
    """The process id and the port of a gateway of a checkout that is ready."""
    port = free_port()
    command = [
        sys.executable, "-m", "vlm_worker", "gateway", f"--model={MODEL}", "--served-name=shapes",
        "--bind=127.0.0.1", f"--http-port={port}", "--admin-port=0",
        f"--worker=127.0.0.1:{worker_port}",
    ]  # fmt: skip
    paths = os.pathsep.join(str(tree / name) for name in ("worker", "kernels"))
    environ = {**os.environ, "PYTHONPATH": paths}  # noqa: TID251
    with process(command, cwd=tree / "worker", env=environ, stderr=subprocess.DEVNULL) as running:
        end = time.monotonic() + START_SECONDS
        while not _is_ready(port):
            if running.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"the gateway of {tree} does not become ready")
            time.sleep(0.1)  # noqa: TID251
        yield running.pid, port


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=1):
            return True
    except OSError:  # also any status but 200
        return False


def figures(measured: dict[str, Any], what: str) -> Figures:
    """The rates of one measurement; `what` is counted: answers or tokens."""
    seconds, count = measured["seconds"], max(measured[what], 1)
    ours, worker, client = (sum(used.values()) for used in measured["used"])
    return {
        "per_second": count / seconds,
        "gateway_us": ours / count * 1e6,
        "per_gateway_core": count / max(ours, 1e-9),
        "loop_busy": measured["used"][0]["main"] / seconds,
        "gateway_cores": ours / seconds,
        "worker_cores": worker / seconds,
        "client_cores": client / seconds,
        "other_cores": measured["used_by_others"] / seconds,
        "p50_ms": measured["p50_ms"],
        "p95_ms": measured["p95_ms"],
        "failed": measured["failed"],
    }


@dataclasses.dataclass(frozen=True, slots=True)
class Served:
    """A running gateway of a checkout with its worker: one answers at once, one by steps."""

    port: int
    pids: tuple[int, int]

    def measure(self, *flags: str) -> dict[str, Any]:
        """One measurement of the clients' process."""
        command = [sys.executable, str(HERE / "gateway_clients.py"), f"--port={self.port}", *flags]
        done = subprocess.run(
            [*command, "--pids", *map(str, self.pids)],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        measured: dict[str, Any] = json.loads(done.stdout)
        return measured


def serve(stack: contextlib.ExitStack, tree: Path, *flags: str) -> Served:
    """Start a gateway and its worker."""
    worker, worker_port = stack.enter_context(stand_in(*flags))
    pid, port = stack.enter_context(gateway(tree, worker_port))
    return Served(port, (pid, worker))


def measure(
    at_once: Mapping[Path, Served],
    by_steps: Mapping[Path, Served],
    trees: Sequence[Path],
    seconds: float,
) -> dict[Path, dict[str, Figures]]:
    """One round: each case, tree after tree."""
    window, tokens = f"--seconds={seconds}", f"--tokens={NUM_TOKENS}"
    found: dict[Path, dict[str, Figures]] = {tree: {} for tree in trees}
    for tree in trees:
        found[tree]["requests"] = figures(at_once[tree].measure(window, tokens), "answers")
    rate = min(found[tree]["requests"]["per_second"] for tree in trees) / 2
    for tree in trees:
        measured = at_once[tree].measure(window, tokens, f"--rate={rate}")
        found[tree]["half"] = figures(measured, "answers")
    stream = ("--stream", f"--tokens={STREAM_TOKENS}", "--connections=100", "--warmup=2")
    for tree in trees:
        found[tree]["stream"] = figures(by_steps[tree].measure(window, *stream), "tokens")
    return found


def line(case: str, rounds: Sequence[Figures]) -> dict[str, Any]:
    """The medians of a case."""
    names = rounds[0].keys()
    medians = {name: round(statistics.median(one[name] for one in rounds), 3) for name in names}
    found = {"bench": "gateway_speed", "what": case, **medians}
    if (goal := GOALS.get(case)) is not None:
        found |= {"goal": goal, "met": medians["per_second"] >= goal}
    return found


def against(ours: Sequence[Figures], theirs: Sequence[Figures]) -> dict[str, Any]:
    """Our figures divided by those of another tree, of each round and their medians."""
    ratios = {
        name: [round(a[name] / max(b[name], 1e-9), 3) for a, b in zip(ours, theirs, strict=True)]
        for name in ("per_second", "gateway_us", "p50_ms", "p95_ms")
    }
    medians = {name: round(statistics.median(each), 3) for name, each in ratios.items()}
    return {"ratio": medians, "ratio_per_round": ratios}


def took(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The line about the run: the machine, and the share of it that other processes used."""
    cores = os.cpu_count() or 1
    others = max(one["other_cores"] for one in lines) / cores
    return {"bench": "gateway_speed.took", "by_others": round(others, 2), **run.measured()}


def main() -> None:
    """Measure all trees in turn, print the lines."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--against", type=Path, nargs="*", default=[], metavar="TREE")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name}")
    options = parser.parse_args()
    trees = [ROOT, *(tree.resolve() for tree in options.against)]
    rounds: dict[Path, list[dict[str, Figures]]] = {tree: [] for tree in trees}
    with contextlib.ExitStack() as stack:
        at_once = {tree: serve(stack, tree) for tree in trees}
        by_steps = {tree: serve(stack, tree, f"--step-ms={STEP_MS}") for tree in trees}
        for number in range(options.rounds):
            order = trees if number % 2 == 0 else trees[::-1]
            for tree, found in measure(at_once, by_steps, order, options.seconds).items():
                rounds[tree].append(found)
    lines = []
    for case in CASES:
        ours = [one[case] for one in rounds[ROOT]]
        lines.append(line(case, ours))
        print(json.dumps(lines[-1]), flush=True)
        for tree in trees[1:]:
            theirs = [one[case] for one in rounds[tree]]
            other = {**line(case, theirs), "tree": tree.name, **against(ours, theirs)}
            print(json.dumps(other), flush=True)
    if options.record:
        table.replace(RECORD, "gateway_speed", [took(lines), *lines])


if __name__ == "__main__":
    main()
