"""Registers kernels with torch.compile: one operation each, into which the compiler does not look.

    called by Python              the function itself
    while torch.compile traces    torch.ops.triptych.NAME, which calls the function when it runs

A compiled layer therefore stays one graph around its kernels, which launch as usual.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")
Function = Callable[P, T]

_LIBRARY: Any = torch.library.Library("triptych", "FRAGMENT")  # type: ignore[no-untyped-call]


def shape_of_first(first: torch.Tensor, *_args: Any, **_kwargs: Any) -> Sequence[int]:
    """The shape of the first argument."""
    return first.shape


def opaque(
    schema: str, *, shape: Callable[..., Sequence[int]] = shape_of_first
) -> Callable[[Function[P, T]], Function[P, T]]:
    """Register a function as an operation.

    Args:
        schema: in torch's notation. The function returns a new tensor of its first argument's type,
            or nothing, and then marks the arguments that it writes. The result shares memory with
            no argument.
        shape: computes the shape of the new tensor from the same arguments.
    """
    name = schema.partition("(")[0]
    returns = not schema.endswith("-> ()")

    def decorate(function: Function[P, T]) -> Function[P, T]:
        def run(*args: Any, **kwargs: Any) -> Any:
            found: Any = function(*args, **kwargs)
            return _as_promised(found) if returns else None

        def like(first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if not returns:
                return None
            size = shape(first, *args, **kwargs)
            return torch.empty(size, dtype=first.dtype, device=first.device)

        _LIBRARY.define(schema)
        _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"triptych::{name}", like, lib=_LIBRARY)
        operation: Any = getattr(torch.ops.triptych, name).default

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            if torch.compiler.is_compiling():
                found: T = operation(*args, **kwargs)
                return found
            return function(*args, **kwargs)

        return call

    return decorate


def _as_promised(x: torch.Tensor) -> torch.Tensor:
    """Contiguous, with storage offset 0, as the fake implementation declares.

    The compiler makes views of it by their offsets, to write into them. With another storage
    offset, these would be views of other elements.
    """
    if x.is_contiguous() and x.storage_offset() == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)
