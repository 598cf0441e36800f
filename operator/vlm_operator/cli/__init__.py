"""`vlm`, also `kubectl vlm`: what a person does with a service from a terminal.

status   what runs, what blocks                 chat     ask about a picture, see where time went
bench    open-loop load, exact accounting       demo     the whole line on this machine
explain  why pools have their sizes             simulate a policy on traffic, in simulated time
rollout  steps from one manifest to another     render   the objects of a manifest
doctor   what is missing in a cluster           release-finalizers   when the operator is gone
"""

from __future__ import annotations

import signal


def main() -> None:
    """Entry point of the console scripts `vlm` and `kubectl-vlm`."""
    from vlm_operator.cli.app import run

    # A script's background job inherits an ignored SIGINT, and could not be ended cleanly by it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run()
