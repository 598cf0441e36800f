"""Reads lines of a shell as the commands that they start. Pure; no expansion."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

_OPERATOR = re.compile(r"[();<>|&]+")
_ASSIGNED = re.compile(r"[A-Za-z_]\w*=")
_SUBSTITUTED = re.compile(r"\$\(([^()]*)\)")


def typed(text: str) -> Iterator[tuple[str, list[str]]]:
    """The commands of a `console` block, after `$ `, each with the lines that it prints."""
    command, printed = "", list[str]()
    for line in [*text.replace("\\\n", " ").splitlines(), "$ "]:
        if line.startswith("$ "):
            if command:
                yield command, printed
            command, printed = re.sub(r"\s+#.*$", "", line[2:]), []
        else:
            printed.append(line)


def lines(text: str) -> Iterator[str]:
    """The lines of a block without comments; a line that ends in a backslash goes on."""
    for line in text.replace("\\\n", " ").splitlines():
        code = re.sub(r"(^|\s)#.*$", "", line).strip()
        if code:
            yield code


def commands(line: str) -> list[list[str]]:
    """The words of each command of a line, also of those in $( ) and <( ).

    Redirections and assignments before a command are dropped.

    Raises:
        ValueError: a quote is not closed.
    """
    found = [words for inner in _SUBSTITUTED.findall(line) for words in commands(inner)]
    lexer = shlex.shlex(
        _SUBSTITUTED.sub("SUBSTITUTED", line), posix=True, punctuation_chars="();<>|&"
    )
    lexer.whitespace_split = True
    lexer.commenters = ""
    words: list[str] = []
    redirected = False
    for word in [*lexer, ";"]:
        if not _OPERATOR.fullmatch(word):
            if not redirected and (words or not _ASSIGNED.match(word)):
                words.append(word)
            redirected = False
        elif word in ("<", ">", ">>"):
            redirected = True
        else:
            found += [words] if words else []
            words = []
    return found


def written(line: str) -> list[str]:
    """The files that a line writes: by redirection, or by a flag that names an output."""
    return re.findall(r"(?:>|-o|--output|--manifest|--out|--plot|--record)[ =]\s*([\w./~-]+)", line)
