"""`python -m vlm_kernels.cpu DIR`: compiles an image's libraries for this architecture."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

from vlm_kernels.cpu import libraries


def main() -> None:
    """Compile, or exit with the reason."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m vlm_kernels.cpu DIR")
    try:
        places = libraries.Places.of(os.environ)  # noqa: TID251  a separate entry point
        libraries.prebuild(Path(sys.argv[1]), places, machine=platform.machine())
    except libraries.NativeError as error:
        sys.exit(f"native kernels: {error}")


if __name__ == "__main__":
    main()
