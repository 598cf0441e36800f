"""`vlm-worker` whose device is lost at its first step. Run as a module by a test."""

from __future__ import annotations

from typing import Any

from vlm_worker import testing
from vlm_worker.__main__ import main


class AcceleratorError(RuntimeError):
    """As torch names a device that is lost."""


def execute(*_: Any) -> Any:
    raise AcceleratorError("CUDA error: an illegal memory access was encountered")


if __name__ == "__main__":
    testing.ChecksumRunner.execute = execute  # type: ignore[method-assign]
    main()
