"""transformers without two halves of torch that serving never uses: half the time of a start.

    torch._dynamo              transformers marks functions for a compiler at import, torch its own
                               at their first call; nothing that is so marked is compiled here
    torch.distributed.tensor   weights sharded over processes; a worker is one process

transformers takes a torch that was built without distributed as it is. The compiler's marks are
stood in for by functions that mark nothing; afterwards `torch._dynamo` is the real one again for
whoever asks for it.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

_COMPILER: Final = "torch._dynamo"
_MASKS: Final = "torch._dynamo._trace_wrapped_higher_order_op"
_lock = threading.Lock()


@contextlib.contextmanager
def lean_torch() -> Iterator[None]:
    """Import and build models of transformers in here; one thread at a time."""
    with _lock, _without_compiler(), _without_distributed():
        yield


@contextlib.contextmanager
def _without_compiler() -> Iterator[None]:
    """Stand-ins where the compiler is not imported yet."""
    if _COMPILER in sys.modules:
        yield
        return
    compiler, masks = types.ModuleType(_COMPILER), types.ModuleType(_MASKS)
    for mark in ("disable", "allow_in_graph", "assume_constant_result"):
        setattr(compiler, mark, _unmarked)
    masks.TransformGetItemToIndex = _transform_get_item_to_index  # type: ignore[attr-defined]
    sys.modules |= {_COMPILER: compiler, _MASKS: masks}
    torch._dynamo = compiler
    try:
        yield
    finally:
        del sys.modules[_COMPILER], sys.modules[_MASKS]
        del torch._dynamo  # torch imports it again when somebody asks


@contextlib.contextmanager
def _without_distributed() -> Iterator[None]:
    """Torch as it is where it was built without `torch.distributed`."""
    is_available = torch.distributed.is_available
    torch.distributed.is_available = lambda: False
    try:
        yield
    finally:
        torch.distributed.is_available = is_available


def _unmarked(function: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Any:
    """A decorator, with or without arguments."""
    return _unmarked if function is None else function


def _transform_get_item_to_index() -> Any:
    """The real one: transformers enters it while it makes masks with vmap."""
    return importlib.import_module(_MASKS).TransformGetItemToIndex()
