"""Replaces all files of a volume at once: readers see either the old files or the new ones.

key ─▶ ..data/key          ..data ─▶ ..<version>/       a new version is one rename of ..data
"""

import shutil
import time
from collections.abc import Mapping
from pathlib import Path

Files = dict[str, bytes]


def write_atomically(folder: Path, files: Mapping[str, bytes]) -> None:
    """Make `folder` hold `files`, all at once, through the link `..data` as a kubelet does."""
    link = folder / "..data"
    before = link.readlink().name if link.is_symlink() else None
    if before is not None and _read(folder / before) == dict(files):
        return
    version = folder / f"..{time.time_ns()}"
    for name, content in files.items():
        path = version / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    version.mkdir(exist_ok=True)
    fresh = folder / "..data_tmp"
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(version.name)
    fresh.rename(link)
    tops = {name.split("/")[0] for name in files}
    for top in tops:
        if not (folder / top).is_symlink():
            (folder / top).symlink_to(f"..data/{top}")
    for entry in folder.iterdir():
        if entry.is_symlink() and not entry.name.startswith("..") and entry.name not in tops:
            entry.unlink()
    if before is not None:
        shutil.rmtree(folder / before, ignore_errors=True)


def _read(folder: Path) -> Files:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
