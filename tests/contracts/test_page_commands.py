"""Commands on pages name commands, flags, files, kinds, fields and targets that exist.

`e2e/test_readme.py` runs the commands of the README and of console blocks, `test_plan_page.py`
those of docs/plan.md.
"""

from __future__ import annotations

import pytest
from docpages import shell
from docpages.blocks import ROOT, SHELLS, Block, blocks, pages, spans
from docpages.commands import CHECKERS, check, check_span

# Synopses: options in brackets. The test that checks them is named.
SYNOPSES = {"docs/contract.md": "test_worker_flags.py compares its flags with the parsers"}
PROGRAMS = (*(f"{name} " for name in CHECKERS), ".venv/bin/")
BLOCKS = [
    block
    for page in pages()
    for block in blocks(page)
    if block.language in SHELLS
    or (not block.language and block.text.startswith(PROGRAMS) and page not in SYNOPSES)
]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_each_command_names_what_exists(block: Block, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    lines = [line for b in blocks(block.page) if b.language in SHELLS for line in _lines(b)]
    made = [file for line in lines for file in shell.written(line)]
    problems = []
    for line in _lines(block):
        try:
            check(line, made=made)
        except ValueError as error:
            problems.append(f"{line}\n    {error}")
    assert not problems, "\n".join(problems)


def _lines(block: Block) -> list[str]:
    if block.language == "console":
        return [command for command, _ in shell.typed(block.text)]
    return list(shell.lines(block.text))


def test_a_console_block_has_commands_and_what_they_print():
    text = "$ a \\\n  b    # why\none\ntwo\n$ c\n"
    assert list(shell.typed(text)) == [("a    b", ["one", "two"]), ("c", [])]


@pytest.mark.parametrize("page", pages())
def test_commands_in_sentences_name_what_exists(page: str):
    problems = []
    for code in spans(page):
        try:
            check_span(code)
        except ValueError as error:
            problems.append(f"{code}\n    {error}")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    "line",
    [
        "vlm nothing",
        "vlm status NAME --nothing",
        "vlm logs shapes --role",
        "vlm-worker serve MODEL --nothing",
        "vlm-worker nothing",
        "kubectl nothing",
        "kubectl get nothings",
        "kubectl get pods --nothing",
        "kubectl apply -f examples/nothing.yaml",
        "kubectl wait --for=condition=Nothing vlm/shapes",
        "kubectl get pods -l triptych.dev/nothing=a",
        "kubectl get vlm NAME -o jsonpath='{.status.nothing}'",
        "kubectl get vlm NAME -o jsonpath='{.status.pools.decode.nothing}'",
        "kubectl explain vlm.spec.nothing",
        "kubectl -n triptych-system logs deployment/triptych-operator | grep 'never printed'",
        "helm nothing",
        "helm install triptych helm/triptych --nothing",
        "helm install triptych helm/nothing",
        "helm install triptych helm/triptych --set nothing=1",
        "helm template triptych helm/triptych --show-only templates/nothing.yaml",
        "make nothing",
        "make demo ARGS=--nothing",
        "make bench ARGS=--nothing",
        "docker build -f operator/Dockerfile --target nothing .",
        "docker build -f nothing/Dockerfile .",
        "sed 's|nothing-like-it|x|' install.yaml",
        "python bench/nothing.py",
        "python -m shapes_vlm.nothing",
        "python -m shapes_vlm.train --nothing 1",
        "nothing --at all",
        "echo a > b; cat <(vlm nothing)",
    ],
)
def test_a_command_that_names_nothing_is_found(line: str):
    with pytest.raises(ValueError, match=r"\S"):
        check(line)
