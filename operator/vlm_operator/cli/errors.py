"""What a command says when it cannot do its work: the problem, and what to do about it."""

from __future__ import annotations


class CliError(Exception):
    """Ends a command with status 1.

    Args:
        problem: one sentence that names the thing.
        remedy: a command or a sentence; empty where there is nothing to do.
    """

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.remedy = remedy
