"""Subcommands and flags of kubectl and helm, from the help of the pinned binaries."""

from __future__ import annotations

import functools
import re
import subprocess
from collections.abc import Sequence
from typing import NamedTuple

import helm  # tools/helm.py

# kubectl: `    -f, --follow=false:`. helm: `  -n, --namespace string   namespace scope`
_KUBECTL = re.compile(r"^ +(?:-(\w), )?--([\w-]+)=(.*):$", re.MULTILINE)
_HELM = re.compile(r"^ +(?:-(\w), )?--([\w-]+)(?: (\S+))?   ?", re.MULTILINE)
_COMMANDS = re.compile(r"^  ?([a-z][\w-]*) {2,}\S", re.MULTILINE)


class Parsed(NamedTuple):
    """A command line: the path of subcommands, flags with their values, and other words."""

    path: tuple[str, ...]
    flags: list[tuple[str, str]]
    others: list[str]


@functools.cache
def _help(program: str, *path: str) -> str:
    binary = helm.kubectl() if program == "kubectl" else helm.binary()
    words = ["options"] if program == "kubectl" and path == ("options",) else [*path, "--help"]
    return subprocess.run([binary, *words], capture_output=True, text=True, check=True).stdout


@functools.cache
def _subcommands(program: str, *path: str) -> frozenset[str]:
    text = _help(program, *path)
    if program == "helm":
        text = text.partition("\nAvailable Commands:")[2].partition("\nFlags:")[0]
    return frozenset(_COMMANDS.findall(text))


@functools.cache
def flags_of(program: str, *path: str) -> dict[str, bool]:
    """Name to whether it takes a value; `f` is the flag `-f`."""
    if program == "kubectl":
        text = _help(program, *path) + _help(program, "options")
        rows = [
            (short, name, value not in ("true", "false"))
            for short, name, value in _KUBECTL.findall(text)
        ]
    else:
        rows = [
            (short, name, bool(value))
            for short, name, value in _HELM.findall(_help(program, *path))
        ]
    return {key: takes for short, name, takes in rows for key in (short, name) if key}


def parse(program: str, words: Sequence[str], *, whole: bool = True) -> Parsed:
    """Read the words after `kubectl` or `helm` as the program would.

    If not `whole`, the value of the last flag may be missing.

    Raises:
        ValueError: there is no such subcommand or flag, or the flag's value is missing.
    """
    path: tuple[str, ...] = ()
    flags: list[tuple[str, str]] = []
    others: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        if word == "--":
            return Parsed(path, flags, [*others, *left])
        if word.startswith("-") and word != "-":
            name, equals, value = word.lstrip("-").partition("=")
            if not word.startswith("--") and not equals and len(name) > 1:
                left[:0] = [f"-{letter}" for letter in name[1:]]  # -it
                name = name[0]
            known = flags_of(program, *path) if path else _any_flag(program)
            if name not in known:
                raise ValueError(f"{program} {' '.join(path)} has no flag {word}")
            if known[name] and not equals:
                if not left and whole:
                    raise ValueError(f"{program} {' '.join(path)}: {word} needs a value")
                value = left.pop(0) if left else ""
            flags.append((name, value))
        elif not others and (name := _subcommand(word, _subcommands(program, *path))):
            path = (*path, name)
        elif not path:
            raise ValueError(f"{program} has no command {word}")
        else:
            others.append(word)
    return Parsed(path, flags, others)


def _subcommand(word: str, known: frozenset[str]) -> str | None:
    """The name of a subcommand; `kubectl top pods` is an alias of `kubectl top pod`."""
    return next((name for name in (word, word.removesuffix("s")) if name in known), None)


def _any_flag(program: str) -> dict[str, bool]:
    """Flags that may precede the subcommand."""
    return flags_of(program, "options") if program == "kubectl" else flags_of(program)
