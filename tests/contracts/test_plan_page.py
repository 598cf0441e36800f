"""The commands of docs/plan.md run; `test_page_outputs.py` compares the outputs that it shows."""

import re
import shlex
from pathlib import Path

from typer.testing import CliRunner

from vlm_cli.app import app
from vlm_cli.plan.speed import DEVICES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "plan.md").read_text()
SHELL = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def run(command: str) -> None:
    result = CliRunner().invoke(app, shlex.split(command)[1:])
    assert result.exit_code == 0, result.output


def test_each_command_of_the_page_runs(monkeypatch, tmp_path: Path):
    """In a copy of the examples, because one command writes a file there."""
    for name in ("plan", "node-types", "shapes/model"):
        for path in (ROOT / "examples" / name).rglob("*"):
            if path.is_file() and path.suffix in (".json", ".yaml"):
                copy = tmp_path / path.relative_to(ROOT)
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_bytes(path.read_bytes())
    monkeypatch.chdir(tmp_path)
    commands = [line for block in SHELL for line in block.replace("\\\n", " ").splitlines()]
    assert len(commands) == 3
    for command in commands:
        run(command)


def test_the_page_lists_the_known_devices():
    assert f"peak speeds of {', '.join(list(DEVICES)[:-1])} and {list(DEVICES)[-1]}." in PAGE
