"""`vlm`, also `kubectl vlm`: what a person does with a service from a terminal.

status   what runs, what blocks                 chat     ask about a picture, see where time went
bench    open-loop load, exact accounting       demo     the whole line on this machine
release-finalizers   what is left to do when the operator is gone
"""

from __future__ import annotations

import signal


def main() -> None:
    """Entry point of the console scripts `vlm` and `kubectl-vlm`."""
    from vlm_operator.cli.app import run

    # A script's background job inherits an ignored SIGINT, and could not be ended cleanly by it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run()
