"""A graph for machines without a GPU: what was launched runs again, Python does not.

Torch's operations and Triton's kernels are recorded with the tensors that they were called with.
A replay computes them again into the same memory, so a value that Python took from a tensor, or put
into a list, is that of the capture, as on a GPU. What a GPU refuses to capture is refused here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction

REFUSED = ("_local_scalar_dense", "nonzero", "lift_fresh")
"""They wait for the device, or copy from memory that is not pinned."""


class RecordedGraphs:
    """Captures as `GpuCapture` does, and counts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_captures = self.num_replays = 0
        self._recorder: Recorder | None = None
        real = InterpretedFunction.run

        def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            def launch() -> None:
                with _disable_current_modes():
                    real(kernel, *args, **kwargs)

            if self._recorder is not None:
                self._recorder.calls.append(launch)
            launch()

        monkeypatch.setattr(InterpretedFunction, "run", run)

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        self._recorder = recorder = Recorder()
        with recorder:
            run()
        self._recorder = None
        self.num_captures += 1

        def replay() -> None:
            self.num_replays += 1
            for call in recorder.calls:
                call()

        return replay


class Recorder(TorchDispatchMode):
    """Operations of torch, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], None]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name, kwargs = func._opname, kwargs or {}
        if name in REFUSED:
            raise RuntimeError(f"{name}: operation not permitted when stream is capturing")
        found = func(*args, **kwargs)

        def again() -> None:
            for old, new in zip(tensors(found), tensors(func(*args, **kwargs)), strict=True):
                if old.data_ptr() != new.data_ptr():  # neither a view nor in place
                    old.copy_(new)

        if "empty" not in name:
            self.calls.append(again)
        return found


def tensors(found: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor))
