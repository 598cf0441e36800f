"""Runs the suites that start no cluster, server, model or native build, one pytest per processor.

Every other suite is in LEFT_OUT with its reason, so that a new suite runs here until it is listed.
Prints each suite as it ends, the output of those that fail, and what was left out.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

LEFT_OUT = {
    "e2e": "a local cluster",
    "tests/bench": "a model answers questions",
    "tests/examples": "a model is trained",
    "tests/kernels": "kernels are compiled and run",
    "tests/operator/live": "the control plane",
    "tests/worker/faults": "processes that are killed",
    "tests/worker/gateway": "servers and real waiting",
    "tests/worker/identity": "models",
    "tests/worker/media": "decode processes",
    "tests/worker/model": "models",
    "tests/worker/processes": "processes",
    "tests/worker/serve": "processes",
    "tests/worker/server": "servers",
    "tests/worker/transfer": "connections and shared memory",
}
MARKS = "not full and not nodes and not cluster"
LONGEST_FIRST = ("tests/operator/reconcile", "tests/operator/autoscale", "tests/worker/core")
NO_TESTS = 5  # pytest's exit status if it selected no test


def suites(root: Path) -> Iterator[str]:
    """The folders below tests/ with test files of their own that are not left out."""
    folders = {file.parent for file in root.glob("tests/**/test_*.py")}
    for name in sorted(folder.relative_to(root).as_posix() for folder in folders):
        below = [name, *(parent.as_posix() for parent in Path(name).parents)]
        if not any(path in LEFT_OUT for path in below):
            yield name


def run(name: str) -> tuple[bool, str]:
    """Run the tests of one folder, not of those below it; returns success and its output."""
    files = sorted(str(file) for file in Path(name).glob("test_*.py"))
    begun = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider"]
    command += ["-m", MARKS, *files]
    done = subprocess.run(
        command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    passed = done.returncode in (0, NO_TESTS)
    last = (done.stdout.strip().splitlines() or [""])[-1]
    print(
        f"{time.monotonic() - begun:5.0f}s  {'ok' if passed else 'FAILED':6}  {name}: {last}",
        flush=True,
    )
    return passed, done.stdout


def main() -> int:
    """Run all suites; returns the exit status."""
    begun = time.monotonic()
    order = sorted(suites(Path()), key=lambda name: (not name.startswith(LONGEST_FIRST), name))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(run, order))
    failed = [output for passed, output in results if not passed]
    print("\nleft out (make test runs them), and tests marked cluster or full:")
    print("\n".join(f"  {name}: {why}" for name, why in LEFT_OUT.items()))
    print("\n".join(failed))
    print(f"{len(failed)} of {len(results)} suites failed in {time.monotonic() - begun:.0f}s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
