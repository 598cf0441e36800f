"""A child of `serve --split` ends with its parent, even one that is killed."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def exit_with(parent: int) -> None:
    """Get SIGTERM when the parent ends; exit now where it is gone already. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(0)
