"""Bounds on the time and memory of one grammar. Gateways check grammars with those of workers."""

from __future__ import annotations

from typing import Final

from llguidance import LLParserLimits

INITIAL_FUEL: Final = 1_000_000
"""About 20 ms of one core to build the lexer."""

STEP_FUEL: Final = 50_000
"""About 4 ms of one core for one mask; those of usual schemas need a tenth of a millisecond."""


EXCEEDED: Final = "an answer exceeds a limit"
"""Begins the problem of a grammar that compiles, but whose answers cannot be followed."""


def parser_limits() -> LLParserLimits:
    """The limits of a matcher. A lexer state has about 0.5 KiB: a matcher about 10 MiB at most."""
    return LLParserLimits(
        initial_lexer_fuel=INITIAL_FUEL,
        step_lexer_fuel=STEP_FUEL,
        step_max_items=20_000,
        max_lexer_states=20_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )
