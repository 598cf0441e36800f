"""`vlm completion`: prints a shell's script; completes words for kubectl.

bash, zsh, fish  ─ script of `vlm completion` ─▶ vlm with _VLM_COMPLETE ──▶ typer ─┬▶ words
kubectl vlm TAB  ─ kubectl_complete-vlm WORDS ─▶ complete_for_kubectl ────▶ typer ─┘

kubectl reads one word per line, with its help after a tab, and last a line with a number: Cobra's
directive (https://kubernetes.io/docs/tasks/extend-kubectl/kubectl-plugins/).
"""

from __future__ import annotations

import enum
import sys
from typing import Annotated

import typer
from typer._completion_classes import BashComplete
from typer._completion_shared import get_completion_script

from vlm_cli.app import app

_FILES, _NO_FILES = 0, 4  # ShellCompDirectiveDefault, ShellCompDirectiveNoFileComp


class Shell(enum.StrEnum):
    """Shells with a script."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(
    shell: Annotated[Shell, typer.Argument(help="The shell that reads the script.")],
) -> None:
    """Print the script that completes vlm in a shell."""
    script = get_completion_script(prog_name="vlm", complete_var="_VLM_COMPLETE", shell=shell.value)
    typer.echo(script)


def complete_for_kubectl() -> None:
    """Entry point of `kubectl_complete-vlm`; its arguments are the words after `kubectl vlm`."""
    *before, incomplete = sys.argv[1:] or [""]
    command = typer.main.get_command(app)
    shell = BashComplete(command, {}, "kubectl vlm", "_KUBECTL_VLM_COMPLETE")
    found = shell.get_completions(before, incomplete)
    for item in found:
        typer.echo(f"{item.value}\t{item.help}" if item.help else item.value)
    # typer has no words for a path: then the shell completes names of files, as in bash
    typer.echo(f":{_NO_FILES if found else _FILES}")
