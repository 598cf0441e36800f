"""The error of a command that fails: the problem, and the remedy."""

from __future__ import annotations


class CliError(Exception):
    """Ends a command with status 1.

    Args:
        problem: one sentence that names the object.
        remedy: a command or a sentence; empty if there is none.
    """

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.remedy = remedy
