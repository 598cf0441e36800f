"""Certificates of a service, as the tests have them (`tests/worker/authority.py`)."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from worker.authority import Authority  # type: ignore[import-not-found]

__all__ = ["Authority"]
