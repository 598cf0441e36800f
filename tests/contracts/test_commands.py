"""Every command of the pages names flags, targets, values and files that exist.

e2e/test_readme.py types those of the README, and test_plan_page.py those of docs/plan.md. The
others need a cluster of the user; here their words are compared with the programs that take them.
"""

from __future__ import annotations

import argparse
import itertools
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from vlm_cli.app import app
from vlm_worker.settings import command_line

ROOT = Path(__file__).parents[2]
PAGES = [
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/**/*.md"),
    *ROOT.glob("examples/**/README.md"),
    ROOT / "helm/triptych/README.md",
    ROOT / "e2e/nodes/README.md",
]
BLOCK = re.compile(r"^```(sh|bash|console|)\n(.*?)^```", re.DOTALL | re.MULTILINE)
VALUES = yaml.safe_load((ROOT / "helm/triptych/values.yaml").read_text())
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
# programs of others, whose words only they can check
OTHERS = frozenset(
    [
        *("argocd", "base64", "cat", "cd", "chmod", "cosign", "cp", "curl", "docker", "echo"),
        *("export", "flux", "git", "grep", "jq", "kind", "ls", "mkdir", "openssl", "pip"),
        *("printf", "promtool", "python", "python3", "sed", "source", "tar", "uv", "yq"),
    ]
)


def commands(text: str) -> Iterator[list[str]]:
    """The simple commands of a page, without comments, prompts, output and assignments."""
    for language, block in BLOCK.findall(text):
        if not language and not re.match(r"make |\.venv/bin/", block):
            continue  # output
        for line in block.replace("\\\n", " ").splitlines():
            lexer = shlex.shlex(line.removeprefix("$ "), posix=True, punctuation_chars=True)
            lexer.whitespace_split, lexer.commenters = True, "#"
            words, is_file = [], False
            for word in [*lexer, ";"]:
                if is_file:  # of a redirection
                    is_file = False
                elif re.fullmatch(r"[<>]+", word):
                    is_file = True
                elif re.fullmatch(r"[;&|()]+", word):
                    if words:
                        yield words
                    words = []
                elif words or not re.match(r"\w+=", word):
                    words.append(word)


def program(words: list[str]) -> str:
    name = Path(words[0]).name
    return {"kubectl-vlm": "vlm"}.get(name, name)


def typed() -> list[tuple[str, list[str]]]:
    return [
        (str(page.relative_to(ROOT)), words)
        for page in PAGES
        for words in commands(page.read_text())
    ]


ALL = typed()


def of(*names: str) -> list[Any]:
    """The commands of a program as parameters, `kubectl vlm` as `vlm`."""
    found = {}
    for page, words in ALL:
        own = words[1:] if words[:2] == ["kubectl", "vlm"] else words
        if program(own) in names:
            found[page, " ".join(own)] = own
    return [pytest.param(words, id=f"{page}: {text}"[:90]) for (page, text), words in found.items()]


def flags(words: list[str]) -> list[str]:
    own = words[: words.index("--")] if "--" in words else words
    return [word.partition("=")[0] for word in own if re.match(r"--?[a-zA-Z]", word)]


def exists(name: str) -> bool:
    """Whether a path is in the repository; placeholders and what a user makes are not."""
    return (ROOT / name).exists() or not re.match(
        r"(examples|docs|helm|crds|operator|worker|tools|install\.yaml|requirements)", name
    )


@pytest.mark.parametrize("words", of("vlm"))
def test_vlm_has_the_command_and_its_flags(words: list[str]):
    group: Any = __import__("typer").main.get_command(app)
    names = [word for word in words[1:] if not word.startswith("-")]
    command = group.get_command(None, names[0])
    assert command is not None, f"no command {names[0]}"
    known = {option for parameter in command.params for option in parameter.opts}
    known |= {option for parameter in command.params for option in parameter.secondary_opts}
    assert not {*flags(words)} - known - {"--help"}
    written = ("-o", "--output", "--manifest")
    read = [word for flag, word in itertools.pairwise(words[1:]) if flag not in written]
    assert [word for word in read if not exists(word)] == []


@pytest.mark.parametrize("words", of("vlm-worker"))
def test_vlm_worker_has_the_command_and_its_flags(words: list[str]):
    (choices,) = (
        action.choices
        for action in command_line()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    actions = choices[words[1]]._actions
    assert not {*flags(words)} - {option for action in actions for option in action.option_strings}


@pytest.mark.parametrize("words", of("make"))
def test_make_has_the_target(words: list[str]):
    targets = [word for word in words[1:] if "=" not in word and not word.startswith("-")]
    assert {*targets} <= TARGETS, words


@pytest.mark.parametrize("words", of("helm"))
def test_the_chart_has_the_values_that_helm_sets(words: list[str]):
    sets = [
        pair
        for flag, text in itertools.pairwise(words)
        if flag in ("--set", "--set-string")
        for pair in re.split(r",(?=[\w.]+=)", text)
    ]
    for pair in sets:
        at: Any = VALUES
        for key in pair.partition("=")[0].split("."):
            if at in ({}, []):  # a free map
                break
            assert key in at, f"no value {pair}"
            at = at[key]
    assert [word for word in words[1:] if "=" not in word and not exists(word)] == []


@pytest.mark.parametrize("words", of("kubectl", "docker"))
def test_files_and_targets_of_kubectl_and_docker_exist(words: list[str]):
    paths = [word for flag, word in itertools.pairwise(words) if flag in ("-f", "--filename")]
    assert [path for path in paths if not exists(path)] == []
    for flag, target in itertools.pairwise(words):
        if flag == "--target":
            file = (ROOT / words[words.index("-f") + 1]).read_text()
            assert re.search(rf"^FROM .* AS {target}$", file, re.MULTILINE)


def test_every_program_is_ours_or_known():
    ours = {"vlm", "vlm-worker", "make", "helm", "kubectl"}
    names = {program(words): page for page, words in ALL}
    unknown = {name: page for name, page in names.items() if name not in ours | OTHERS}
    assert not {name for name in unknown if not name.endswith((".sh", ".py"))}, unknown
    scripts = [words[0] for _, words in ALL if words[0].endswith((".sh", ".py"))]
    assert all(map(exists, scripts))


FILES = test_files_and_targets_of_kubectl_and_docker_exist
CHECKS: dict[str, Callable[[list[str]], None]] = {
    "vlm status shapes --no-such-flag": test_vlm_has_the_command_and_its_flags,
    "vlm render -f examples/gone.yaml": test_vlm_has_the_command_and_its_flags,
    "vlm-worker decode --no-such-flag": test_vlm_worker_has_the_command_and_its_flags,
    "make no-such-target": test_make_has_the_target,
    "helm upgrade t x --set network.typo=1": test_the_chart_has_the_values_that_helm_sets,
    "kubectl apply -f examples/gone": FILES,
    "docker build -f worker/Dockerfile --target typo .": FILES,
}


@pytest.mark.parametrize("line", CHECKS)
def test_a_wrong_word_is_found(line: str):
    (words,) = commands(f"```sh\n{line}  # comment\n```\n")
    with pytest.raises(AssertionError):
        CHECKS[line](words)
