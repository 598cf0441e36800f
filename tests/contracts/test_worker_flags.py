"""docs/contract.md names exactly the flags that `vlm-worker --help` shows."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from vlm_worker.settings import command_line

PAGE = (Path(__file__).parents[2] / "docs/contract.md").read_text()
NAMED = set(re.findall(r"--[a-z][a-z-]+", PAGE))


def flags() -> dict[str, set[str]]:
    """The flags that help shows, by command."""
    (commands,) = (
        action
        for action in command_line()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    return {
        name: {
            option
            for action in parser._actions
            if action.help != argparse.SUPPRESS
            for option in action.option_strings
            if option.startswith("--") and option != "--help"
        }
        for name, parser in commands.choices.items()
    }


@pytest.mark.parametrize("command", flags())
def test_the_page_names_every_visible_flag(command: str) -> None:
    assert flags()[command] <= NAMED


def test_the_page_names_no_other_flag() -> None:
    assert set().union(*flags().values(), {"--help"}) >= NAMED
