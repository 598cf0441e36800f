"""Run clients against `vlm-worker serve`, and print what each of their calls did.

    make clients                              # all; installs them if they are missing
    make clients ARGS='--client "AI SDK"'
    make clients ARGS=--write                 # also the table in docs/openai.md
    make clients ARGS='--write --client LiteLLM'   # only the row of this client

The server is a process of its own with the `shapes` model. Its template writes tools as hermes
models do, because the one that `shapes` has knows none.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from openai_clients.clients import CLIENTS, command_of, version_of
from pinned import UnavailableError

from vlm_local.subprocesses import tied

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples" / "shapes" / "model"
IMAGE = ROOT / "examples" / "quickstart" / "image.png"
PAGE = ROOT / "docs" / "openai.md"
START, END = "<!-- clients: start -->", "<!-- clients: end -->"
HEADER = ("| client | version | calls |", "| --- | --- | --- |")
SCRIPT_SECONDS = 600.0
LOG_CHARS = 4000


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """One call of a client; `error` is None if it did what the client promises."""

    name: str
    error: str | None


@dataclasses.dataclass(frozen=True, slots=True)
class Server:
    """A server that is ready.

    Attributes:
        url: with `/v1`.
        metrics: the URL of the gateway's metrics.
        model: the folder of its model.
    """

    url: str
    metrics: str
    model: Path


@contextlib.contextmanager
def served() -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        shutil.copytree(MODEL, model)
        shutil.copy(Path(__file__).with_name("chat_template.jinja"), model)
        command = [
            sys.executable, "-m", "vlm_worker", "serve", model, "--served-name=shapes", "--port=0",
        ]  # fmt: skip
        with subprocess.Popen(tied(command), stderr=subprocess.PIPE, text=True) as server:
            assert server.stderr is not None
            reader = threading.Thread(target=server.stderr.read)  # it never waits to print
            try:
                metrics = _url(server.stderr, r"metrics of the gateway: (\S+)")
                url = _url(server.stderr, r"is served at (\S+);")
                reader.start()
                yield Server(url, metrics, model)
            finally:
                server.terminate()
                if reader.ident is not None:
                    reader.join()


def _url(lines: Iterable[str], pattern: str) -> str:
    told = []
    for line in lines:
        told.append(line)
        if found := re.search(pattern, line):
            return found[1]
    raise RuntimeError(f"the server ended: {''.join(told)[-LOG_CHARS:]}")


def calls_of(name: str, server: Server) -> list[Call]:
    """Run the script of a client; what it did not report is a failed call.

    Raises:
        UnavailableError: the client cannot be installed here.
    """
    with tempfile.TemporaryDirectory() as work:
        command = command_of(CLIENTS[name], Path(work))
        environment = {
            **os.environ,
            "BASE_URL": server.url, "METRICS_URL": server.metrics, "MODEL": "shapes",
            "MODEL_DIR": str(server.model), "IMAGE": str(IMAGE), "OPENAI_API_KEY": "none",
            "OPENAI_BASE_URL": server.url, "HF_HUB_OFFLINE": "1",
        }  # fmt: skip
        try:
            done = subprocess.run(
                command, check=False, env=environment, cwd=work, capture_output=True, text=True,
                timeout=SCRIPT_SECONDS,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return [Call("the script", f"it took more than {SCRIPT_SECONDS:.0f} s")]
    calls = [
        Call(said["call"], said["error"])
        for line in done.stdout.splitlines()
        if line.startswith('{"call":')
        for said in (json.loads(line),)
    ]
    if done.returncode or not calls or any(call.error for call in calls):
        print(done.stderr[-LOG_CHARS:], file=sys.stderr)
    if done.returncode:
        calls.append(Call("the script", f"it ended with {done.returncode}"))
    return calls or [Call("the script", "it reported no call")]


def row(name: str, calls: list[Call]) -> str:
    """One client's row in the table of docs/openai.md."""
    done = [call.name for call in calls if call.error is None]
    failed = [f"**fails: {call.name}**" for call in calls if call.error is not None]
    return f"| {name} | {version_of(CLIENTS[name])} | {'; '.join([*done, *failed])} |"


def with_rows(page: str, rows: dict[str, str]) -> str:
    """The page with these rows in its table; rows of other clients stay as they are."""
    before, _, rest = page.partition(START)
    old, _, after = rest.partition(END)
    all_rows = {line.split(" | ")[0].removeprefix("| "): line for line in old.split("\n")} | rows
    table = "\n".join([*HEADER, *(all_rows[name] for name in CLIENTS if name in all_rows)])
    return f"{before}{START}\n\n{table}\n\n{END}{after}"


def main() -> int:
    """Run them; the exit code is 1 if a call failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--client", action="append", choices=CLIENTS, help="repeatable")
    parser.add_argument("--write", action="store_true", help="write the table of docs/openai.md")
    arguments = parser.parse_args()
    results: dict[str, list[Call]] = {}
    with served() as server:
        for name in arguments.client or CLIENTS:
            try:
                results[name] = calls_of(name, server)
            except UnavailableError as error:
                print(f"skipped {name}: {error}")
                continue
            for call in results[name]:
                print(f"{'FAIL' if call.error else 'ok  '}  {name}: {call.name}", flush=True)
                if call.error:
                    print(f"      {call.error}")
    if arguments.write:
        rows = {name: row(name, calls) for name, calls in results.items()}
        PAGE.write_text(with_rows(PAGE.read_text(), rows))
    return int(any(call.error for calls in results.values() for call in calls))


if __name__ == "__main__":
    sys.exit(main())
