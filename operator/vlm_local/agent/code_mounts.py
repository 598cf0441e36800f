"""Keeps the code that containers run visible: images are this machine's own Python.

A checkout below /tmp would vanish under the emptyDir that a worker mounts there.
"""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from .process import Bind


def code() -> list[Path]:
    """Return the folders of this interpreter and of everything that it may import."""
    entries = [sys.prefix, sys.base_prefix, *(entry for entry in sys.path if entry)]
    folders = {Path(entry).resolve() for entry in entries}
    return sorted(folder for folder in folders if folder.is_dir())


def keep(binds: Sequence[Bind], needed: Iterable[Path]) -> list[Bind]:
    """Return the binds, and one for each needed folder that they would hide, read-only.

    Its place is made in the volume that hides it; in a read-only one, in the container alone.
    """
    shown: list[Bind] = []
    for folder in needed:
        hiding = [bind for bind in binds if folder.is_relative_to(bind.path)]
        if not hiding or any(folder.is_relative_to(bind.path) for bind in shown):
            continue
        nearest = max(hiding, key=lambda bind: len(Path(bind.path).parts))
        if nearest.source.is_dir() and not nearest.read_only:
            inside = nearest.source / folder.relative_to(nearest.path)
            inside.mkdir(parents=True, exist_ok=True)
        shown.append(Bind(folder, str(folder), read_only=True))
    return [*binds, *shown]
