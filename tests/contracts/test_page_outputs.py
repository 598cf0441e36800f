"""Outputs on pages are what the commands print; `make docs-outputs` writes them again.

OTHER lists the outputs that need a cluster or a load, with the test of the code that prints them.
"""

from __future__ import annotations

import dataclasses
import shlex

import pytest
from docpages.blocks import ROOT, Block, blocks, pages
from docpages.commands import CHECKERS
from typer.testing import CliRunner

import docs_outputs  # tools/docs_outputs.py
from vlm_cli.app import app
from vlm_operator.autoscale.explain import explain
from vlm_operator.autoscale.record import load_record, replay
from vlm_operator.names import POOL_ROLES

SHOWN = list(docs_outputs.shown())
RECORDED = ROOT / "e2e/recorded/bottlenecks.jsonl"
FOUR_LOADS = "images not seen before"
# First words of a block without a language to the test of what it shows; None: a drawing.
OTHER = {
    '{"time":"…"': "tests/operator/cli/test_explain.py",
    FOUR_LOADS: "tests/contracts/test_page_outputs.py",
    "  load     1.79 s of work": "tests/operator/autoscale/test_record.py",
    "NAME              ROLE     VARIANT": "tests/operator/cli/test_top.py",
    "shapes-decode-7c  {": "tests/operator/cli/test_logs.py",
    "bug.tar.gz: 23 files": "tests/operator/cli/test_bundle.py",
    "ok    api  ": "tests/operator/cli/test_doctor.py",
    "  What is to the right of the circle?": "e2e/test_demo.py",
    " etcd ◀─ kube-apiserver": None,
    "client ─HTTP─▶ gateway": None,
    "vlm_kernels/rms_norm.py": None,
}
COMMANDS = ("$ vlm ", ".venv/bin/", *(f"{name} " for name in CHECKERS))


@pytest.mark.parametrize("shown", SHOWN, ids=str)
def test_each_output_on_a_page_is_printed_again(
    shown: docs_outputs.Shown, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(ROOT)
    result = CliRunner().invoke(app, shlex.split(shown.command)[1:])
    assert result.exit_code == 0, result.output
    printed = docs_outputs.plain(result.stdout)
    assert docs_outputs.updated(shown.output, printed) == shown.output, "run make docs-outputs"


def test_pages_show_outputs():
    assert {shown.page.name for shown in SHOWN} >= {"plan.md", "rollouts.md", "simulator.md"}


@pytest.mark.parametrize(
    ("before", "output", "after"),
    [
        ("a\nb\n", "a\nc\n", "a\nc\n"),
        ("...\nb 1\nc\n", "a\nb 1\nnew\n", "...\nb 1\nnew\n"),
        ("a x\n...\nc\n...\n", "a x\nb\nc\nd\n", "a x\n...\nc\n...\n"),
        ("a\nb\n...\n", "a\nnew\nb\nd\n", "a\nnew\nb\n...\n"),
    ],
)
def test_what_a_page_leaves_out_stays_left_out(before: str, output: str, after: str):
    assert docs_outputs.updated(before, output) == after


def test_a_line_that_is_gone_is_named():
    with pytest.raises(docs_outputs.LostError, match="b 1"):
        docs_outputs.updated("...\nb 1\n", "a\nc\n")


def test_every_output_on_a_page_has_a_test():
    others = [
        block
        for page in pages()
        for block in blocks(page)
        if not block.language and not block.text.startswith(COMMANDS)
    ]
    unknown = [str(block) for block in others if _source(block) == "unknown"]
    assert not unknown, "name the test of each in OTHER, or show the command with `$ vlm`"
    assert all((ROOT / file).exists() for file in OTHER.values() if file)
    used = {start for start in OTHER for block in others if block.text.startswith(start)}
    assert used == OTHER.keys()


def test_console_blocks_are_on_pages_whose_commands_are_typed():
    found = {
        block.page for page in pages() for block in blocks(page) if block.language == "console"
    }
    assert found == {"docs/scale-break-see.md"}, "e2e/test_readme.py types this page"


def _source(block: Block) -> str | None:
    found = [file for start, file in OTHER.items() if block.text.startswith(start)]
    return found[0] if found else "unknown"


def test_the_page_on_sizes_shows_what_the_present_rules_decide_from_the_recorded_run():
    records = [load_record(line) for line in RECORDED.read_text().splitlines()]
    replayed = [dataclasses.replace(record, outcome=replay(record)) for record in records]
    printed = "\n".join(explain(record) for record in replayed).splitlines()
    (shown,) = (b for b in blocks("docs/autoscaling.md") if b.text.startswith(FOUR_LOADS))
    lines = [line for line in shown.text.splitlines() if line.startswith((" ", *POOL_ROLES))]
    assert len(lines) >= 15
    assert [line for line in lines if line not in printed] == []
