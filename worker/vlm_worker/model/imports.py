"""transformers without two halves of torch that serving never uses: half the time of a start.

    torch._dynamo              transformers marks functions for a compiler at import, torch its own
                               at their first call; nothing that is so marked is compiled here
    torch.distributed.tensor   weights sharded over processes; a worker is one process

transformers takes a torch that was built without distributed as it is. The compiler's marks are
stood in for by functions that mark nothing; afterwards `torch._dynamo` is the real one again for
whoever asks for it.

And it reads all of its 2,500 files for the names in them, once as `transformers` and once more as
`transformers.models`; here the second finds what the first has read.
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
def lean_torch() -> Iterator[None]:
    """Import and build models of transformers in here; one thread at a time."""
    with _lock, _without_compiler(), _without_distributed(), _reading_names_once():
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


@contextlib.contextmanager
def _reading_names_once() -> Iterator[None]:
    """Transformers as it is where it is imported already."""
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Finder:
    """Has the module that reads the files read each directory once."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """As the import system asks; None leaves a module to the other finders."""
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
    """Of a function of a directory, or of a file for the directory that it is in."""
    known: dict[Path, dict[str, Any]] = {}
    reading: list[Path] = []

    def read_once(path: Any) -> dict[str, Any]:
        if reading:  # a directory inside of one
            return read(path)
        directory = Path(path).parent if Path(path).is_file() else Path(path)
        if directory not in known:
            reading.append(directory)
            try:
                known[directory] = read(path)
            finally:
                reading.clear()
        return copy.deepcopy(known[directory])  # the caller takes it apart

    return read_once


def _unmarked(function: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Any:
    """A decorator, with or without arguments."""
    return _unmarked if function is None else function


def _transform_get_item_to_index() -> Any:
    """The real one: transformers enters it while it makes masks with vmap."""
    return importlib.import_module(_MASKS).TransformGetItemToIndex()
