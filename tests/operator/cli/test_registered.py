"""Every command is loaded by its name; other packages add commands through an entry-point group."""

import typer

from vlm_cli.app import app

COMMANDS = {
    *(
        "advise",
        "bench",
        "bundle",
        "chat",
        "completion",
        "demo",
        "doctor",
        "logs",
        "release-finalizers",
    ),
    *("plan", "render", "rollout-plan", "simulate", "status", "top", "why"),
}


def test_every_command_is_listed_and_has_a_help_text_of_one_line():
    group = typer.main.get_command(app)
    assert set(group.list_commands(None)) == COMMANDS
    texts = {name: group.get_command(None, name).help for name in COMMANDS}
    assert all(text and "\n" not in text for text in texts.values()), texts


def test_an_unknown_command_is_none():
    assert typer.main.get_command(app).get_command(None, "nothing") is None
