"""Requests and streamed tokens per second of one gateway, and the processor time of each.

    python bench/gateway_speed.py [--rounds 3] [--seconds 5] [--against TREE ...]

The gateway is the process that pods run. Before it is a stand-in worker that answers at once, and
behind it a process of clients; all share the machine's cores over loopback. Per round and tree:

    requests   chat completions of 4 tokens, not streamed, by 64 clients as fast as answered
    half       the same at half of that rate: the latency, all of it added by the gateway
    stream     answers of 200 tokens, streamed to 100 clients, with a token each per step

`--against` measures the gateways of other checkouts in the same rounds; ratios are those of this
tree. One JSON line per case.
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

from workers import free_port

HERE = Path(__file__).parent
ROOT = HERE.parent
MODEL = ROOT / "examples" / "shapes" / "model"
START_SECONDS = 60.0
NUM_TOKENS, STREAM_TOKENS = 4, 200
STEP_MS = 5.0
GOALS = {"requests": 1_000.0, "stream": 10_000.0}


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
    with contextlib.suppress(OSError):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=1) as answer:
            return answer.status == 200
    return False


def figures(measured: dict[str, Any], what: str) -> dict[str, float]:
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
) -> dict[Path, dict[str, dict[str, float]]]:
    """One round: each case, tree after tree."""
    window, tokens = f"--seconds={seconds}", f"--tokens={NUM_TOKENS}"
    found: dict[Path, dict[str, dict[str, float]]] = {tree: {} for tree in trees}
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


def line(case: str, rounds: Sequence[dict[str, float]], *, what: str) -> dict[str, Any]:
    """The medians of a case; the rate is the best of the rounds too, because work is shared."""
    names = rounds[0].keys()
    medians = {name: round(statistics.median(one[name] for one in rounds), 3) for name in names}
    best = round(max(one["per_second"] for one in rounds), 1)
    return {"bench": "gateway_speed", "what": case, "tree": what, **medians, "best": best}


def main() -> None:
    """Measure all trees in turn, print the lines."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--against", type=Path, nargs="*", default=[])
    options = parser.parse_args()
    trees = [ROOT, *(tree.resolve() for tree in options.against)]
    rounds: dict[Path, list[dict[str, dict[str, float]]]] = {tree: [] for tree in trees}
    with contextlib.ExitStack() as stack:
        at_once = {tree: serve(stack, tree) for tree in trees}
        by_steps = {tree: serve(stack, tree, f"--step-ms={STEP_MS}") for tree in trees}
        for number in range(options.rounds):
            order = trees if number % 2 == 0 else trees[::-1]
            for tree, found in measure(at_once, by_steps, order, options.seconds).items():
                rounds[tree].append(found)
    for case in ("requests", "half", "stream"):
        ours = [one[case] for one in rounds[ROOT]]
        figure = line(case, ours, what="this")
        if case in GOALS:
            figure |= {"goal": GOALS[case], "met": figure["per_second"] >= GOALS[case]}
        print(json.dumps(figure), flush=True)
        for tree in trees[1:]:
            theirs = [one[case] for one in rounds[tree]]
            other = line(case, theirs, what=tree.name)
            for name in ("per_second", "gateway_us", "p50_ms", "p95_ms"):
                pairs = zip(ours, theirs, strict=True)
                ratios = [round(a[name] / max(b[name], 1e-9), 3) for a, b in pairs]
                other[f"ratio_{name}"] = statistics.median(ratios)
                other[f"ratios_{name}"] = ratios
            print(json.dumps(other), flush=True)


if __name__ == "__main__":
    main()
