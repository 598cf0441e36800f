"""Checks the commands that pages show, without running them: each program has a checker.

A checker takes the words after the program and raises ValueError with what does not exist: a
subcommand, flag, file, kind, field, condition, label, target, chart value or log message.
"""

from __future__ import annotations

import functools
import itertools
import re
import subprocess
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import kubernetes_validate
import typer
import yaml
from typer._click.exceptions import UsageError

import helm  # tools/helm.py
from docpages import cobra, shell
from docpages.blocks import ROOT
from vlm_cli.app import app
from vlm_cli.definitions import KINDS, crd
from vlm_operator import names
from vlm_operator.api.status import CONDITIONS
from vlm_worker.settings import command_line

# Short names of built-in kinds, and kinds of others that pages use.
SHORT = {"deploy", "svc", "cm", "pvc", "po", "no", "ns", "crd", "all", "lease", "leases"}
FOREIGN = {"podmonitors", "certificates"}
FOREIGN_CONDITIONS = {"Complete", "Established", "Available"}
# Files that only the reader has; commands of the same page may write more.
READERS_FILES = {"service.yaml", "manifest.yaml", "old.yaml", "new.yaml", "mine.jsonl", "FILE"}
KINDS_WITH_FIELDS = {
    name: kind for kind in KINDS for name in (kind.short, kind.plural, kind.kind.lower())
}
OTHERS = {  # programs whose words are checked for files only
    *(
        "cd",
        "source",
        ".",
        "curl",
        "tar",
        "git",
        "openssl",
        "printf",
        "yq",
        "jq",
        "kind",
        "cosign",
        "sleep",
        "date",
        "export",
        "wait",
        "cat",
        "head",
        "tail",
    ),
}


class NotFoundError(ValueError):
    """A command names what does not exist."""


def check(line: str, *, made: Iterable[str] = ()) -> None:
    """Check every command of a line; `made` are files that earlier lines of the page write.

    Raises:
        ValueError: something does not exist, or there is no checker for the program.
    """
    for words in shell.commands(line):
        program, *rest = words
        name = Path(program).name or program
        if name in CHECKERS:
            CHECKERS[name](rest)
        elif name not in OTHERS:
            raise NotFoundError(f"there is no checker for {program}")
        _check_files(words, set(made))


def check_span(code: str) -> bool:
    """Check code of a sentence, which may leave out words; whether a checker read it.

    Raises:
        ValueError: a subcommand or flag does not exist.
    """
    program, _, rest = code.partition(" ")
    if program not in SPANS or not rest or rest == "…":
        return False
    for words in shell.commands(code.replace("…", "WORD")):
        if words[0] == program:
            SPANS[program](words[1:])
    return True


def _check_files(words: Sequence[str], made: set[str]) -> None:
    """Paths below a folder of the repository exist."""
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name[0] != "."}
    for word in words:
        path = word.partition("=")[2] if word.startswith("-") else word
        ours = "/" in path and path.partition("/")[0] in folders
        if ours and path not in made and not (ROOT / path).exists():
            raise NotFoundError(f"{path} does not exist")


# --- our programs --------------------------------------------------------------------------------


def _vlm(words: Sequence[str]) -> None:
    command = _vlm_command(words)
    try:
        command.make_context(words[0], list(words[1:]))
    except UsageError as error:
        raise NotFoundError(f"vlm {words[0]}: {error.format_message()}") from error
    except typer.Exit:
        pass  # --help


def _vlm_command(words: Sequence[str]) -> Any:
    command = _loaded(words[0]) if words else None
    if command is None:
        raise NotFoundError(f"vlm has no command {' '.join(words[:1])}")
    return command


@functools.cache
def _loaded(name: str) -> Any:
    group: Any = typer.main.get_command(app)
    return group.get_command(None, name)


def _vlm_span(words: Sequence[str]) -> None:
    known = {flag for parameter in _vlm_command(words).params for flag in parameter.opts} | {
        "--help"
    }
    _known_flags(f"vlm {words[0]}", words, known)


def _worker(words: Sequence[str]) -> None:
    try:
        command_line().parse_args(words)
    except SystemExit as end:
        if end.code:
            raise NotFoundError(f"vlm-worker {' '.join(words)}: refused") from end


def _worker_span(words: Sequence[str]) -> None:
    (commands,) = (a for a in command_line()._actions if hasattr(a, "choices") and a.choices)
    parsers: dict[str, Any] = dict(commands.choices or {})  # type: ignore[arg-type]
    if words[0] not in {*parsers, "ROLE"}:
        raise NotFoundError(f"vlm-worker has no command {words[0]}")
    parser = parsers["decode" if words[0] == "ROLE" else words[0]]
    known = {flag for action in parser._actions for flag in action.option_strings}
    _known_flags(f"vlm-worker {words[0]}", words, known)


def _known_flags(command: str, words: Sequence[str], known: set[str]) -> None:
    flags = {word.partition("=")[0] for word in words if word.startswith("-") and word != "-"}
    if unknown := flags - known:
        raise NotFoundError(f"{command} has no flag {', '.join(sorted(unknown))}")


def _make(words: Sequence[str]) -> None:
    targets = set(re.findall(r"^([a-z][a-z0-9-]*)(?=[ :])", _text("Makefile"), re.MULTILINE))
    targets |= {
        t
        for line in re.findall(r"^\.PHONY: (.*)$", _text("Makefile"), re.MULTILINE)
        for t in line.split()
    }
    arguments = [word.partition("=")[2] for word in words if word.startswith("ARGS=")]
    given = [word for word in words if "=" not in word]
    if unknown := set(given) - targets:
        raise NotFoundError(f"make has no target {', '.join(sorted(unknown))}")
    for target, text in zip(given, arguments, strict=False):
        if target == "demo":
            (inner,) = shell.commands(f"vlm demo {text}".replace("FILE", "README.md"))
            _vlm(inner[1:])
        else:
            script = {
                "bench": "bench/run.py",
                "bench-peers": "bench/peers/run.py",
                "e2e-nodes": "e2e/nodes/*",
            }
            _flags_in_source(script[target], shlex_words(text))


def _python(words: Sequence[str]) -> None:
    """`python FILE`, or `python -m MODULE`, with flags that the file reads."""
    left = list(words)
    if left[0] == "-P":
        left.pop(0)
    if left[0] != "-m":
        _flags_in_source(left[0], left[1:])
    elif left[1] != "venv":
        name = left[1].replace(".", "/")
        roots = ("operator", "worker", "kernels", "examples/shapes")
        found = [
            p
            for r in roots
            for p in (ROOT / r / f"{name}.py", ROOT / r / name / "__main__.py")
            if p.exists()
        ]
        if not found:
            raise NotFoundError(f"there is no module {left[1]}")
        _flags_in_source(found[0].relative_to(ROOT).as_posix(), left[2:])


def _flags_in_source(pattern: str, words: Sequence[str]) -> None:
    files = [path for path in ROOT.glob(pattern) if path.is_file()]
    if not files:
        raise NotFoundError(f"{pattern} does not exist")
    text = "\n".join(path.read_text() for path in files) + "\n".join(
        path.read_text() for file in files for path in file.parent.glob("*.py")
    )
    flags = [word.partition("=")[0] for word in words if word.startswith("--")]
    for flag in flags:
        if flag not in text and f'"{flag[2:].replace("-", "_")}"' not in text:
            raise NotFoundError(f"{pattern} reads no flag {flag}")


# --- kubectl and helm ----------------------------------------------------------------------------


def _kubectl(words: Sequence[str], *, whole: bool = True) -> None:
    if words[0] == "vlm":
        _vlm(words[1:])
        return
    path, flags, others = cobra.parse("kubectl", words, whole=whole)
    for name, value in flags:
        if name in ("f", "filename") and path[0] != "logs" and value not in ("-", ""):
            if not (ROOT / value).exists() and value not in READERS_FILES:
                raise NotFoundError(f"kubectl {path[0]} -f {value}: does not exist")
        elif name == "for":
            _check_condition(value)
        elif name in ("l", "selector"):
            _check_labels(value)
        elif name in ("o", "output") and value.startswith("jsonpath="):
            _check_field(others[0].split("/")[0], value.removeprefix("jsonpath=").strip("{}'."))
        elif name == "p":
            yaml.safe_load(value)
    kinds = {"get", "describe", "delete", "wait", "patch", "scale", "label", "annotate"}
    if path[0] in kinds and others and not whole and others[0].isupper():
        return
    if path[0] in kinds and others:
        for kind in others[0].split(","):
            _check_kind(kind.split("/")[0])
    elif path[0] == "explain" and others:
        kind, _, field = others[0].partition(".")
        _check_kind(kind)
        _check_field(kind, field)
    elif path[0] in ("logs", "rollout", "exec", "port-forward") and others and "/" in others[0]:
        kind, _, name = others[0].partition("/")
        _check_kind(kind)
        if name == "triptych-operator" and f"name: {name}" not in _text("install.yaml"):
            raise NotFoundError(f"install.yaml has no {kind} {name}")


def _kubectl_span(words: Sequence[str]) -> None:
    if words != ["vlm"] and words[:2] != ["vlm", "WORD"]:
        _kubectl(words, whole=False)


def _check_kind(word: str) -> None:
    kind = word.lower().partition(".")[0]
    if kind not in {*KINDS_WITH_FIELDS, *_builtin_kinds(), *SHORT, *FOREIGN}:
        raise NotFoundError(f"kubectl knows no kind {word}")


@functools.cache
def _builtin_kinds() -> frozenset[str]:
    """Names of built-in kinds, singular and plural, of every API version of the newest schemas."""
    folder = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema"
    newest = max(folder.glob("*-local"), key=lambda p: [int(n) for n in re.findall(r"\d+", p.name)])
    kinds = {path.name.partition("-")[0] for path in newest.glob("*.json")}
    return frozenset(n for k in kinds for n in (k, f"{k}s", f"{k}es", f"{k.removesuffix('y')}ies"))


def _check_condition(value: str) -> None:
    kind, _, name = value.partition("=")
    if kind == "condition" and name.partition("=")[0] not in {*CONDITIONS, *FOREIGN_CONDITIONS}:
        raise NotFoundError(f"no object has a condition {name}")


def _check_labels(selector: str) -> None:
    known = {getattr(names, name) for name in dir(names) if name.startswith("LABEL_")}
    for term in selector.split(","):
        key = term.partition("=")[0].strip("!")
        if key not in known:
            raise NotFoundError(f"no object has the label {key}")


def _check_field(kind: str, path: str) -> None:
    """A path of fields in the schema of one of our kinds."""
    if kind not in KINDS_WITH_FIELDS or not path:
        return
    schema = _schema(kind)
    for part in re.sub(r"\[[^]]*\]", "", path).split("."):
        node = schema.get("items", schema)
        below = node.get("properties", {})
        if part not in below and "additionalProperties" not in node:
            raise NotFoundError(f"{kind} has no field {path}: {part} does not exist")
        schema = below.get(part) or node["additionalProperties"]


@functools.cache
def _schema(kind: str) -> dict[str, Any]:
    (version,) = crd(KINDS_WITH_FIELDS[kind])["spec"]["versions"]
    schema: dict[str, Any] = version["schema"]["openAPIV3Schema"]
    return schema


def _helm(words: Sequence[str]) -> None:
    path, flags, others = cobra.parse("helm", words)
    charts = [word for word in others if "/" in word]
    for chart in charts:
        if not (ROOT / chart / "Chart.yaml").exists():
            raise NotFoundError(f"helm {path[0]}: {chart} is no chart")
    keep = {"set", "set-string", "f", "values", "show-only"}
    if charts and any(name in keep for name, _ in flags):
        given = [f"{'-' if len(n) == 1 else '--'}{n}={v}" for n, v in flags if n in keep]
        command = [helm.binary(), "template", "triptych", charts[0], *given]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise NotFoundError(f"helm {path[0]}: {done.stderr}")


def _helm_span(words: Sequence[str]) -> None:
    cobra.parse("helm", words, whole=False)


# --- other programs ------------------------------------------------------------------------------


def _docker(words: Sequence[str]) -> None:
    """`docker build` of a Dockerfile of this repository, and a target that it has."""
    if words[0] not in ("build", "push"):
        raise NotFoundError(f"docker {words[0]} has no checker")
    given = dict(itertools.pairwise(words))
    if (file := given.get("-f", "-")) != "-":
        stages = re.findall(r"(?mi)^FROM \S+ AS (\S+)$", _text(file))
        if given.get("--target", stages[-1]) not in stages:
            raise NotFoundError(f"{file} has no target {given['--target']}")


def _sed(words: Sequence[str]) -> None:
    """The text that it replaces is in the file."""
    program, file = words
    text = program.split(program[1])[1]
    if not re.search(text, _text(file), re.MULTILINE):
        raise NotFoundError(f"{file} does not contain {text}")


def _grep(words: Sequence[str]) -> None:
    """The text that it looks for in output is a string of the product's source."""
    patterns = [w for w in words if not w.startswith("-")]
    for pattern in patterns:
        if not any(pattern.strip('"').lower() in text.lower() for text in _sources()):
            raise NotFoundError(f"the product prints no {pattern}")


def _pip(words: Sequence[str]) -> None:
    if "-r" in words and not (ROOT / words[words.index("-r") + 1]).exists():
        raise NotFoundError(f"{words[words.index('-r') + 1]} does not exist")


@functools.cache
def _sources() -> tuple[str, ...]:
    roots = ("operator/vlm_operator", "operator/vlm_cli", "worker/vlm_worker")
    return tuple(path.read_text() for root in roots for path in (ROOT / root).rglob("*.py"))


def _text(name: str) -> str:
    if not (ROOT / name).is_file():
        raise NotFoundError(f"{name} does not exist")
    return (ROOT / name).read_text()


def shlex_words(text: str) -> list[str]:
    found = shell.commands(text)
    return found[0] if found else []


CHECKERS: dict[str, Callable[[Sequence[str]], None]] = {
    "docker": _docker,
    "grep": _grep,
    "helm": _helm,
    "kubectl": _kubectl,
    "make": _make,
    "pip": _pip,
    "python": _python,
    "python3": _python,
    "sed": _sed,
    "vlm": _vlm,
    "vlm-worker": _worker,
}
SPANS: dict[str, Callable[[Sequence[str]], None]] = {
    "helm": _helm_span,
    "kubectl": _kubectl_span,
    "make": _make,
    "python": _python,
    "vlm": _vlm_span,
    "vlm-worker": _worker_span,
}
