"""The commands of `vlm`. The module of a command is imported when the command is used."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer
from typer._click.shell_completion import CompletionItem
from typer._completion_classes import completion_init
from typer.core import TyperGroup

from vlm_cli.output import run

# Other packages register commands in this group of entry points.
_GROUP = "vlm.commands"
_COMMANDS = tuple(
    EntryPoint(name, f"vlm_cli.{function}", _GROUP)
    for name, function in (
        ("status", "status:status"),
        ("top", "top.command:top"),
        ("logs", "logs.command:logs"),
        ("bundle", "bundle.command:bundle"),
        ("chat", "chat:chat"),
        ("bench", "bench.command:bench"),
        ("simulate", "simulate:simulate"),
        ("why", "why:why"),
        ("rollout-plan", "rollout_plan:rollout_plan"),
        ("render", "offline:render"),
        ("plan", "plan.command:plan"),
        ("advise", "advise.command:advise"),
        ("doctor", "doctor.command:doctor"),
        ("completion", "completion:completion"),
        ("release-finalizers", "release:release"),
    )
)


class _Commands(TyperGroup):
    """A group whose commands are entry points of functions, which may be async."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        return [command.name for command in (*_COMMANDS, *entry_points(group=_GROUP))]

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Complete names of commands; their modules are not imported for it."""
        names = self.list_commands(ctx)
        return [CompletionItem(name) for name in names if name.startswith(incomplete)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        """Return the command; None if there is none of that name."""
        for command in (*_COMMANDS, *entry_points(group=_GROUP)):
            if command.name == cmd_name:
                function = command.load()
                single = _typer()
                help_text = (inspect.getdoc(function) or "").partition("\n\n")[0]
                single.command(cmd_name, help=help_text)(_blocking(function))
                return typer.main.get_command(single)
        return None


def _typer(**settings: Any) -> typer.Typer:
    return typer.Typer(
        add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, **settings
    )


def _blocking(function: Callable[..., Any]) -> Callable[..., None]:
    if not inspect.iscoroutinefunction(function):
        return function

    @functools.wraps(function)
    def blocking(**arguments: Any) -> None:
        run(function(**arguments))

    return blocking


completion_init()  # typer's scripts for shells, without its options to install them
app = _typer(
    name="vlm",
    cls=_Commands,
    help="Vision-language models on Kubernetes: look at services, ask them, load them.",
    no_args_is_help=True,
)
app.callback()(lambda: None)
