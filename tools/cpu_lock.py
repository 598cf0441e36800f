"""`cpu_lock.py CUDA_LOCK TORCH LOCK`: writes the lock of the CPU image.

It is the lock of the CUDA image with the torch of the file TORCH, and without the packages that
only a torch for CUDA needs. So both images have the same version of everything else.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

CUDA = re.compile(r"(cuda|nvidia)-|triton==")


def requirements(text: str) -> Iterator[str]:
    """Each requirement with its hashes, without comments."""
    lines = [line for line in text.splitlines(keepends=True) if not line.startswith("#")]
    return (item for item in re.split(r"(?m)^(?=\S)", "".join(lines)) if item.strip())


def cpu_lock(cuda: str, torch: str) -> str:
    """Return the text of the CPU lock. Raises ValueError if the versions of torch differ."""
    (other,) = requirements(torch)
    kept = []
    for item in requirements(cuda):
        if item.startswith("torch=="):
            version = re.match(r"torch==[0-9.]+", other)
            if version is None or not re.match(rf"{re.escape(version[0])}[ ;\n]", item):
                raise ValueError(f"torch differs: {item.split()[0]} and {other.split()[0]}")
            kept.append(other)
        elif not CUDA.match(item):
            kept.append(item)
    return "".join(kept)


if __name__ == "__main__":
    source, choice, target = map(Path, sys.argv[1:])
    target.write_text(cpu_lock(source.read_text(), choice.read_text()))
