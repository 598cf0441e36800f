"""Imports transformers without two unused parts of torch, which saves half of the start-up time.

    torch._dynamo              transformers marks functions for the compiler at import, torch at
                               their first call; no marked function is compiled here
    torch.distributed.tensor   weights sharded over processes; a worker is one process

transformers supports a torch without distributed, so `is_available` returns False during the
import. Stubs replace the compiler's decorators; a later import gets the real `torch._dynamo`.

transformers also scans the names in its 2,500 files twice: as `transformers` and as
`transformers.models`. Here the second scan reuses the result of the first.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.machinery
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch

_COMPILER: Final = "torch._dynamo"
_CATALOGUE: Final = "transformers.utils.import_utils"
_MASKS: Final = "torch._dynamo._trace_wrapped_higher_order_op"
_lock = threading.Lock()


@contextlib.contextmanager
def skip_unused_imports() -> Iterator[None]:
    """A context to import transformers and build its models in; one thread at a time."""
    with _lock, _without_compiler(), _without_distributed(), _reading_names_once():
        yield


@contextlib.contextmanager
def _without_compiler() -> Iterator[None]:
    """Replace the compiler by a stub, unless it is imported already."""
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
        del torch._dynamo  # torch imports the real one on the next access


@contextlib.contextmanager
def _without_distributed() -> Iterator[None]:
    """Make torch report that it was built without `torch.distributed`."""
    is_available = torch.distributed.is_available
    torch.distributed.is_available = lambda: False
    try:
        yield
    finally:
        torch.distributed.is_available = is_available


@contextlib.contextmanager
def _reading_names_once() -> Iterator[None]:
    """Make transformers scan each directory once; no effect if it is imported already."""
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Finder:
    """An import hook that caches the directory scans of `transformers.utils.import_utils`."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder`; None leaves a module to the other finders."""
        if name != _CATALOGUE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        loader: Any = spec and spec.loader
        if loader is not None:
            execute = loader.exec_module

            def execute_and_remember(module: Any) -> None:
                execute(module)
                if hasattr(module, "create_import_structure_from_path"):
                    module.create_import_structure_from_path = _remembering(
                        module.create_import_structure_from_path
                    )

            loader.exec_module = execute_and_remember
        return spec


def _remembering(read: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    """Cache a function of a directory; a path of a file means its directory."""
    known: dict[Path, dict[str, Any]] = {}
    reading: list[Path] = []

    def read_once(path: Any) -> dict[str, Any]:
        if reading:  # a recursive call for a subdirectory
            return read(path)
        directory = Path(path).parent if Path(path).is_file() else Path(path)
        if directory not in known:
            reading.append(directory)
            try:
                known[directory] = read(path)
            finally:
                reading.clear()
        return copy.deepcopy(known[directory])  # the caller modifies it

    return read_once


def _unmarked(function: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Any:
    """A decorator without effect; it may be used with or without arguments."""
    return _unmarked if function is None else function


def _transform_get_item_to_index() -> Any:
    """The real context manager: transformers enters it while it makes masks with vmap."""
    return importlib.import_module(_MASKS).TransformGetItemToIndex()
