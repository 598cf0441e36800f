"""`vlm`, also `kubectl vlm`: the command line for users of a service.

status        pods, blocking causes, TTFT     chat      ask about an image; TTFT by stage
bench         open-loop load, percentiles     demo      the whole system on this machine
why           reasons for sizes of pools      simulate  an autoscaling policy in simulated time
rollout-plan  steps between two manifests     render    the objects of a manifest
doctor        what a cluster lacks            release-finalizers  deletion without an operator
plan          memory, pools and cost of a model     advise    levers of a running service
top           load of services and pods, live           logs      merged logs of all pods
bundle        an archive for a bug report               completion  completion for shells
"""

from __future__ import annotations

import signal


def main() -> None:
    """Entry point of the console scripts `vlm` and `kubectl-vlm`."""
    from vlm_cli.app import app

    # A background job of a script inherits an ignored SIGINT. Restore it, so that SIGINT ends vlm.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    app()


def complete_for_kubectl() -> None:
    """Entry point of the console script `kubectl_complete-vlm`, which kubectl runs."""
    from vlm_cli.completion import complete_for_kubectl

    complete_for_kubectl()
